"""Keeps the processes of a stack running: starts them in order, restarts what dies, stops all.

One task per process keeps it (`_keep`); `run` walks through the stages and waits for what the
tasks report. Nothing is ever polled but readiness, and every wait ends with the process, the
request to stop, or a deadline.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from kimi_operator.local.child import Child, exit_text, tail
from kimi_operator.local.events import Event, Tell
from kimi_operator.local.folders import Folders
from kimi_operator.local.machine import started_ticks
from kimi_operator.local.readiness import Answer, probe
from kimi_operator.local.restarts import MOST_RAPID, Restarts
from kimi_operator.local.stack import (
    START_ORDER,
    Command,
    Phase,
    ProcessState,
    Stack,
    StackState,
    stop_order,
)
from kimi_runtime.clock import now_s
from kimi_runtime.errors import ConfigError

PROBE_EVERY_S = 0.1
TAIL_LINES = 15


@dataclass
class _Kept:
    """One process and what became of it."""

    command: Command
    restarts: Restarts
    child: Child | None = None
    phase: Phase = "waiting"
    note: str = ""

    @property
    def settled(self) -> bool:
        """Whether its start has succeeded or failed."""
        return self.phase in ("ready", "failed")


class Supervisor:
    """Runs one stack. `request_stop` may be called at any time, from a signal handler too."""

    def __init__(
        self,
        stack: Stack,
        folders: Folders,
        pid: int,
        tell: Tell,
        *,
        most_rapid: int = MOST_RAPID,
    ) -> None:
        self._stack, self._folders, self._pid, self._tell = stack, folders, pid, tell
        self._kept = [_Kept(command, Restarts(most_rapid)) for command in stack.commands]
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()
        self._was_ready = False

    def request_stop(self) -> None:
        """Begin to stop; `run` returns once everything has ended."""
        self._stop.set()
        self._changed.set()

    async def run(self) -> bool:
        """Start, keep and stop the stack; whether it ended because it was asked to."""
        self._write("starting")
        async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as tasks:
            try:
                if await self._bring_up(tasks, http):
                    self._was_ready = True
                    self._write("ready")
                    self._tell(Event(kind="serving", text=self._stack.url))
                    await self._until(lambda: self._hopeless() is not None)
                failure = None if self._stop.is_set() else self._failure()
            finally:
                self._stop.set()
                await self._stop_all()
        if failure is not None:
            self._tell(Event(kind="failed", text=failure))
        self._tell(Event(kind="stopped"))
        return failure is None

    async def _bring_up(self, tasks: asyncio.TaskGroup, http: aiohttp.ClientSession) -> bool:
        """Start stage after stage; whether all became ready before a failure or a stop."""
        for kind in START_ORDER:
            stage = [kept for kept in self._kept if kept.command.kind == kind]
            for kept in stage:
                tasks.create_task(self._keep(kept, http), name=kept.command.name)
            await self._until(
                lambda stage=stage: (  # type: ignore[misc]
                    all(kept.settled for kept in stage) or self._failed(stage)
                )
            )
            if self._stop.is_set() or self._failed(stage):
                return False
        return True

    @staticmethod
    def _failed(stage: list[_Kept]) -> bool:
        return any(kept.phase == "failed" for kept in stage)

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Wait for the condition, or for a stop. Every change of a process wakes it."""
        while not (self._stop.is_set() or holds()):
            self._changed.clear()
            await self._changed.wait()

    async def _keep(self, kept: _Kept, http: aiohttp.ClientSession) -> None:
        """Start one process, again and again, until it is given up or the stack stops."""
        while not self._stop.is_set():
            began_s = now_s()
            try:
                kept.child = await Child.start(kept.command, self._stack.log(kept.command.name))
            except ConfigError as exc:
                self._give_up(kept, str(exc))
                return
            if self._stop.is_set():  # it was on its way when `_stop_all` looked
                await kept.child.stop(kept.command.stop_s)
                return
            self._set(kept, "starting", Event(kind="starting", process=kept.command.name))
            ready = await self._watch_start(kept, kept.child, http, began_s)
            if ready:
                await kept.child.wait()
            if self._stop.is_set():
                return  # `_stop_all` waits for it
            code = await self._end(kept, kept.child)
            kept.child = None
            if not ready and not self._was_ready:
                self._give_up(kept, f"ended while starting ({code})")
                return
            delay_s = kept.restarts.after(now_s() - began_s, was_ready=ready)
            if delay_s is None:
                self._give_up(kept, f"ended {kept.restarts.rapid} times in a row ({code})")
                return
            text = f"ended ({code}); it is started again in {delay_s:g}s"
            self._set(kept, "restarting", Event(kind="died", process=kept.command.name, text=text))
            await self._stopped_within(delay_s)

    async def _watch_start(
        self, kept: _Kept, child: Child, http: aiohttp.ClientSession, began_s: float
    ) -> bool:
        """Probe until it is ready (True), or has ended, is late or must stop (False)."""
        name, deadline_s = kept.command.name, began_s + kept.command.start_s
        while not self._stop.is_set():
            answer = await probe(http, kept.command.ready_url)
            elapsed_s = now_s() - began_s
            if answer.ready:
                self._set(kept, "ready", Event(kind="ready", process=name, seconds=elapsed_s))
                return True
            self._show_progress(kept, answer)
            if elapsed_s > kept.command.start_s:
                kept.note = f"was not ready within {kept.command.start_s:g}s"
                return False
            if await child.ended_within(min(PROBE_EVERY_S, max(0.01, deadline_s - now_s()))):
                return False
        return False

    def _show_progress(self, kept: _Kept, answer: Answer) -> None:
        if answer.text and answer.text != kept.note:
            note = Event(kind="loading", process=kept.command.name, text=answer.text)
            self._set(kept, "starting", note)
            kept.note = answer.text

    async def _end(self, kept: _Kept, child: Child) -> str:
        """Make sure a process that ended, or was late, is gone with all it started."""
        late = not await child.ended_within(0)
        if late:
            await child.stop(kept.command.stop_s)
            return kept.note
        child.kill_group()
        return exit_text(await child.wait())

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return False
        return True

    def _give_up(self, kept: _Kept, why: str) -> None:
        log = self._stack.log(kept.command.name)
        last = "".join(f"\n  {line}" for line in tail(log, TAIL_LINES))
        kept.note = f"{kept.command.name} {why}; the end of {log}:{last}"
        event = Event(kind="gave_up", process=kept.command.name, text=why)
        self._set(kept, "failed", event)

    def _hopeless(self) -> _Kept | None:
        """A process given up without which no request can be served."""
        for kept in self._kept:
            command = kept.command
            if kept.phase != "failed" or command.kind == "umbp":
                continue  # without the pool there are misses, but answers
            if all(
                other.phase == "failed"
                for other in self._kept
                if (other.command.kind, other.command.role) == (command.kind, command.role)
            ):
                return kept
        return None

    def _failure(self) -> str:
        failed = self._hopeless() or next(kept for kept in self._kept if kept.phase == "failed")
        return failed.note

    async def _stop_all(self) -> None:
        """Stop in order, each rank at once; what does not end in its time is killed."""
        self._write("stopping")
        self._tell(Event(kind="stopping"))
        for rank in sorted({stop_order(kept.command) for kept in self._kept}):
            async with asyncio.TaskGroup() as stopping:
                for kept in self._kept:
                    if stop_order(kept.command) == rank and kept.child is not None:
                        stopping.create_task(self._stop_one(kept, kept.child))

    async def _stop_one(self, kept: _Kept, child: Child) -> None:
        if not await child.stop(kept.command.stop_s):
            text = f"did not end within {kept.command.stop_s:g}s and was killed"
            self._tell(Event(kind="note", process=kept.command.name, text=text))
        if kept.phase != "failed":
            self._set(kept, "stopped", Event(kind="stopped", process=kept.command.name))

    def _set(self, kept: _Kept, phase: Phase, event: Event) -> None:
        kept.phase = phase
        if self._stop.is_set():
            self._write("stopping")
        elif self._was_ready:
            all_ready = all(other.phase == "ready" for other in self._kept)
            self._write("ready" if all_ready else "degraded")
        else:
            self._write("starting")
        self._tell(event)  # whoever hears of it finds it written down
        self._changed.set()

    def _write(self, phase: str) -> None:
        processes = tuple(_state_of(kept) for kept in self._kept)
        state = {
            "name": self._stack.name,
            "model": self._stack.model,
            "url": self._stack.url,
            "run_dir": self._stack.run_dir,
            "pid": self._pid,
            "started_ticks": started_ticks(self._pid) or 0,
            "phase": phase,
            "processes": processes,
        }
        self._folders.write_state(StackState.model_validate(state))


def _state_of(kept: _Kept) -> ProcessState:
    command, alive = kept.command, kept.phase in ("starting", "ready", "unready")
    return ProcessState(
        name=command.name,
        kind=command.kind,
        role=command.role,
        port=command.port,
        ready_url=command.ready_url,
        phase=kept.phase,
        pid=kept.child.pid if kept.child and alive else None,
        started_ticks=kept.child.started_ticks if kept.child and alive else None,
        restarts=kept.restarts.total,
        note=kept.note.splitlines()[0] if kept.phase == "failed" else "",
    )
