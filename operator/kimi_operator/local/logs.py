"""The logs of a deployment's processes."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from kimi_operator.local.folders import Folders
from kimi_runtime.errors import ConfigError

LOOK_EVERY_S = 0.2


def log_files(folders: Folders, process: str | None) -> list[Path]:
    """The log of one process, or all; ConfigError naming those there are."""
    found = sorted(folders.logs.glob("*.log"))
    if process is None:
        return found
    chosen = [log for log in found if log.stem == process]
    if not chosen:
        there = ", ".join(log.stem for log in found) or "none yet"
        raise ConfigError(f"there is no log of {process!r}; there are: {there}")
    return chosen


def follow(logs: list[Path]) -> Iterator[tuple[Path, str]]:
    """Lines as they are written, from now on, until the reader has enough (Ctrl-C)."""
    with ExitStack() as opened:
        files = [(log, opened.enter_context(log.open(errors="replace"))) for log in logs]
        partial = dict.fromkeys(logs, "")
        for _, file in files:
            file.seek(0, 2)
        while True:
            for log, file in files:
                *whole, partial[log] = (partial[log] + file.read()).split("\n")
                for line in whole:
                    yield log, line
            time.sleep(LOOK_EVERY_S)
