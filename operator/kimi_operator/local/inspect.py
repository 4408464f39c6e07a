"""What runs, how it is, and how it is stopped, for commands other than the supervisor itself."""

import asyncio
import os
import select
import signal
from pathlib import Path
from typing import Literal

import aiohttp

from kimi_operator.local.folders import Folders, deployments
from kimi_operator.local.machine import resident_bytes, send, started_ticks, uptime_s
from kimi_operator.local.readiness import probe
from kimi_operator.local.stack import Phase, ProcessState, StackState
from kimi_runtime.errors import ConfigError, DeadlineExceeded
from kimi_runtime.spec.base import SpecModel

KILL_WAIT_S = 10.0


class ProcessReport(SpecModel):
    """One line of `kimistack status`."""

    process: str
    role: str
    pid: int | None
    port: int
    phase: Phase
    ready: bool
    restarts: int
    uptime_s: float | None
    memory_bytes: int | None
    note: str = ""


class StackReport(SpecModel):
    """One deployment of `kimistack status`."""

    name: str
    phase: Literal["starting", "ready", "degraded", "stopping", "killed", "down"]
    model: str | None = None
    url: str | None = None
    supervisor_pid: int | None = None
    processes: tuple[ProcessReport, ...] = ()


def live(home: Path, shm: Path) -> tuple[str, ...]:
    """Names of the deployments that run, or were killed and left something behind."""
    found = (Folders(home, shm, name) for name in deployments(home))
    return tuple(each.state.name for each in found if each.is_running() or each.read_state())


def the_one(home: Path, shm: Path, name: str | None, flag: str = "") -> str:
    """The name given, or that of the only deployment there is. Raises ConfigError.

    `flag` is what a command takes the name by, where it is no argument.
    """
    known = deployments(home)
    if name is not None:
        if name not in known:
            listed = f"; there are {', '.join(known)}" if known else ""
            raise ConfigError(f"there is no deployment {name}{listed}")
        return name
    choice = live(home, shm) or known
    if len(choice) != 1:
        by = f" by {flag}" if flag else ""
        which = f"name one of {', '.join(choice)}{by}" if choice else "start one with: kimistack up"
        raise ConfigError(f"{len(choice)} deployments are here; {which}")
    return choice[0]


def reports(home: Path, shm: Path, names: tuple[str, ...]) -> tuple[StackReport, ...]:
    """How these deployments are, with readiness asked now."""
    return asyncio.run(_reports([Folders(home, shm, name) for name in names]))


async def _reports(all_folders: list[Folders]) -> tuple[StackReport, ...]:
    async with aiohttp.ClientSession() as http:
        return tuple([await _report(folders, http) for folders in all_folders])


async def _report(folders: Folders, http: aiohttp.ClientSession) -> StackReport:
    state, running = folders.read_state(), folders.is_running()
    if state is None:
        phase: Literal["starting", "down"] = "starting" if running else "down"
        return StackReport(name=folders.state.name, phase=phase)
    lines = await asyncio.gather(*(_line(process, http) for process in state.processes))
    # a supervisor notices that a process ends, not that one takes itself out of service
    unready = state.phase == "ready" and not all(line.ready for line in lines)
    return StackReport(
        name=state.name,
        phase="killed" if not running else "degraded" if unready else state.phase,
        model=state.model,
        url=state.url,
        supervisor_pid=state.pid if running else None,
        processes=tuple(lines),
    )


async def _line(process: ProcessState, http: aiohttp.ClientSession) -> ProcessReport:
    pid, ticks = process.pid, process.started_ticks
    alive = pid is not None and ticks is not None and started_ticks(pid) == ticks
    ready = alive and (await probe(http, process.ready_url)).ready
    phase: Phase = process.phase
    if phase == "ready" and not ready:
        phase = "unready"
    return ProcessReport(
        process=process.name,
        role=process.role,
        pid=pid if alive else None,
        port=process.port,
        phase=phase,
        ready=ready,
        restarts=process.restarts,
        uptime_s=uptime_s(ticks) if alive and ticks is not None else None,
        memory_bytes=resident_bytes(pid) if alive and pid is not None else None,
        note=process.note,
    )


def take_down(folders: Folders) -> bool:
    """Stop a deployment and clean up; whether it was running.

    Raises DeadlineExceeded if even a killed supervisor keeps the lock.
    """
    state = folders.read_state()
    was_running = folders.is_running()
    if was_running and state is not None:
        within_s = _stop_time_s(state)
        if not _end(state.pid, state.started_ticks, signal.SIGTERM, within_s):
            _end(state.pid, state.started_ticks, signal.SIGKILL, KILL_WAIT_S)
    lock = folders.lock()
    if lock is None:
        raise DeadlineExceeded(
            f"{folders.state.name} is being started or stopped by another command; try again"
        )
    try:
        kill_leftovers(folders)
    finally:
        os.close(lock)
    return was_running


def _stop_time_s(state: StackState) -> float:
    """Longer than the supervisor allows its processes, rank by rank."""
    return 60.0 + 60.0 * len({process.role for process in state.processes})


def _end(pid: int, ticks: int, number: signal.Signals, within_s: float) -> bool:
    """Signal that very process and wait until it has ended; True if it has."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        if not send(pid, ticks, number):
            return True
        ended, _, _ = select.select([handle], [], [], within_s)
        return bool(ended)
    finally:
        os.close(handle)


def kill_leftovers(folders: Folders) -> bool:
    """Clean up after a supervisor that was killed; whether there was anything. Needs the lock.

    Its processes die with it, but one may still be on its way out, holding its port and memory.
    """
    state = folders.read_state()
    if state is not None:
        for process in state.processes:
            if process.pid is not None and process.started_ticks is not None:
                _end(process.pid, process.started_ticks, signal.SIGKILL, KILL_WAIT_S)
    found = state is not None or folders.run.exists()
    folders.remove_state()
    folders.remove_run_dir()
    return found
