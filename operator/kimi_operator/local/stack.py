"""What the supervisor is given, and what it writes down while it runs."""

from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from kimi_runtime.spec.base import SpecModel

Kind = Literal["umbp", "worker", "router"]
START_ORDER: tuple[Kind, ...] = ("umbp", "worker", "router")
"""Each kind is ready before the next starts; stopping goes the other way, see `stop_order`."""

Phase = Literal["waiting", "starting", "ready", "unready", "restarting", "failed", "stopped"]


class Command(SpecModel):
    """One process to keep running. `ready_url` answers 200 once it serves."""

    name: str
    kind: Kind
    role: str
    argv: tuple[str, ...]
    port: PositiveInt
    ready_url: str
    start_s: PositiveFloat
    stop_s: PositiveFloat


class Stack(SpecModel):
    """All processes of a deployment, in starting order."""

    name: str
    model: str
    url: str
    state_dir: Path
    run_dir: Path
    commands: tuple[Command, ...]

    def log(self, process: str) -> Path:
        """Where a process's output goes."""
        return self.state_dir / "logs" / f"{process}.log"


class ProcessState(SpecModel):
    """One process as last seen. `started_ticks` tells it from a later one with the same pid."""

    name: str
    kind: Kind
    role: str
    port: PositiveInt
    ready_url: str
    phase: Phase = "waiting"
    pid: PositiveInt | None = None
    started_ticks: NonNegativeInt | None = None
    restarts: NonNegativeInt = 0
    note: str = ""


class StackState(SpecModel):
    """The supervisor and its processes; the file is replaced as a whole at every change."""

    name: str
    model: str
    url: str
    run_dir: Path
    pid: PositiveInt
    started_ticks: NonNegativeInt
    phase: Literal["starting", "ready", "degraded", "stopping"] = "starting"
    processes: tuple[ProcessState, ...]


def stop_order(command: Command) -> int:
    """Rank of a process in stopping: router, decode, prefill, pool."""
    if command.kind == "router":
        return 0
    if command.kind == "umbp":
        return 3
    return 2 if command.role == "prefill" else 1
