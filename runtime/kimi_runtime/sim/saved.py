"""Finished runs in files: JSON, compressed where the name ends in .gz.

A file is an object with `runs`: a list of `{task, summary, requests}`, of experiments also
`scenario` and `arm`.
"""

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from kimi_runtime.errors import ConfigError
from kimi_runtime.sim.tasks import Task
from kimi_runtime.spec.base import SpecModel

PLACES = 6
"""Decimals of seconds that are kept: microseconds."""


class SavedRun(SpecModel):
    """One run as it was written."""

    task: Task
    summary: dict[str, Any]
    requests: list[dict[str, Any]]
    scenario: str | None = None
    arm: str | None = None

    @property
    def label(self) -> str:
        """What to call it beside others: its arm, or its policy."""
        if self.arm is None:
            return self.task.policy
        return self.arm if self.scenario is None else f"{self.scenario}: {self.arm}"


def rounded(value: Any) -> Any:
    """The same with its numbers to `PLACES` decimals."""
    match value:
        case float():
            return round(value, PLACES)
        case dict():
            return {name: rounded(one) for name, one in value.items()}
        case _:
            return value


def read_runs(path: Path) -> list[SavedRun]:
    """A file's runs. ConfigError naming the file, and the field that does not fit."""
    try:
        text = path.read_bytes()
        if path.suffix == ".gz":
            text = gzip.decompress(text)
        runs = json.loads(text)["runs"]
        return [SavedRun.model_validate(run) for run in runs]
    except (OSError, EOFError) as exc:
        raise ConfigError(f"{path} cannot be read: {exc}") from exc
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise ConfigError(f"{path}: {where}: {first['msg']}") from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise ConfigError(
            f"{path}: not what `kimistack sim run --json` or `sim experiment --json` writes: {exc}"
        ) from exc


@contextmanager
def written(path: Path) -> Iterator[BinaryIO | gzip.GzipFile]:
    """A file to write to, compressed if its name says so. ConfigError if it cannot be."""
    try:
        with path.open("wb") as raw:
            if path.suffix == ".gz":
                with gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=6, mtime=0) as packed:
                    yield packed
            else:
                yield raw
    except OSError as exc:
        raise ConfigError(f"{path} cannot be written: {exc.strerror}") from exc
