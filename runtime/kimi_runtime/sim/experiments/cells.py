"""Running an experiment's cells, each kept in a file: a run that was killed goes on.

A cell's file is named by all that its run depends on, the code included, so that a changed regime
or simulator finds none of the old ones. Scenario and arm are not part of it: equal runs are one.
"""

import gzip
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import kimi_connect
import kimi_runtime
from kimi_runtime.errors import ConfigError
from kimi_runtime.sim.experiments.regime import Cell, cell_key
from kimi_runtime.sim.saved import rounded
from kimi_runtime.sim.tasks import Task, simulate

_CODE = ("engine", "router", "sim", "spec", "umbp")


@dataclass(frozen=True, slots=True)
class Cells:
    """The files of finished runs, in `folder`."""

    folder: Path

    def path(self, cell: Cell) -> Path:
        """Where the run is, or will be."""
        return self.folder / f"{cell_key(cell, code_digest())}.json.gz"

    def read(self, cell: Cell) -> dict[str, Any]:
        """A finished run: `task`, `summary`, `requests`."""
        return dict(json.loads(self.text(cell)))

    def text(self, cell: Cell) -> bytes:
        """The same as it is written. ConfigError if the file is damaged or gone."""
        path = self.path(cell)
        try:
            return gzip.decompress(path.read_bytes())
        except (OSError, EOFError) as exc:
            raise ConfigError(f"{path} cannot be read: {exc}; delete it and run again") from exc

    def missing(self, cells: Iterable[Cell]) -> tuple[Cell, ...]:
        """The runs still to be made, each once."""
        found = {self.path(cell): cell for cell in cells}
        return tuple(cell for path, cell in found.items() if not path.exists())

    def fill(self, cells: Sequence[Cell], jobs: int, *, told: Callable[[Cell], None]) -> None:
        """Make the missing runs, `jobs` at a time; `told` of each one that is kept."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError(f"{self.folder} cannot be made: {exc.strerror}") from exc
        missing = self.missing(cells)
        if jobs == 1 or len(missing) < 2:
            for cell in missing:
                _keep(cell.task, self.path(cell))
                told(cell)
            return
        workers = min(jobs, len(missing))
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            running = {pool.submit(_keep, cell.task, self.path(cell)): cell for cell in missing}
            for one in as_completed(running):
                one.result()
                told(running[one])


@lru_cache(maxsize=1)
def code_digest() -> str:
    """SHA-256 over the source that a run depends on."""
    root, found = Path(kimi_runtime.__file__).parent, hashlib.sha256()
    folders = [root / name for name in _CODE] + [Path(kimi_connect.__file__).parent]
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder)
            if path.suffix in (".py", ".json") and inside.parts[0] not in _UNSEEN:
                found.update(f"{folder.name}/{inside}\n".encode())
                found.update(path.read_bytes())
    return found.hexdigest()


_UNSEEN = frozenset(
    (
        *("adapters", "capacity.py", "cli.py", "compare.py", "experiments", "html.py"),
        *("command.py", "pictures.py", "plots.py", "reports_cli.py", "stats.py", "tables.py"),
    )
)
"""What only looks at finished runs, or is not simulated."""


def _keep(task: Task, path: Path) -> None:
    outcome = simulate(task, keep=True)
    run = {
        "task": task.model_dump(mode="json"),
        "summary": outcome.summary.model_dump(mode="json"),
        "requests": [rounded(one) for one in outcome.requests],
    }
    text = gzip.compress(json.dumps(run, separators=(",", ":")).encode(), 6, mtime=0)
    draft = path.with_suffix(f".{os.getpid()}.part")
    draft.write_bytes(text)
    draft.replace(path)  # whole or not there at all
