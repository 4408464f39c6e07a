"""The supervisor over real, tiny processes."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kimi_operator.local.events import Event
from kimi_operator.local.folders import Folders
from kimi_operator.local.stack import Stack
from kimi_operator.local.supervisor import Supervisor
from stand_in_stack import ended, handle_of, stack_of, starts_of

PATIENCE_S = 30.0


class Running:
    """A supervisor under test: its events in order, and the state file it writes."""

    def __init__(self, stack: Stack, folders: Folders, most_rapid: int = 5) -> None:
        self.folders = folders
        self.heard: list[Event] = []
        self._new = asyncio.Event()
        self.supervisor = Supervisor(stack, folders, os.getpid(), self._hear, most_rapid=most_rapid)

    def _hear(self, event: Event) -> None:
        self.heard.append(event)
        self._new.set()

    async def until(self, kind: str, process: str = "", count: int = 1) -> None:
        """Wait for the `count`-th such event."""
        async with asyncio.timeout(PATIENCE_S):
            while self.kinds(process).count(kind) < count:
                self._new.clear()
                await self._new.wait()

    def kinds(self, process: str) -> list[str]:
        return [event.kind for event in self.heard if event.process == process]

    def order(self, kind: str) -> list[str]:
        return [event.process for event in self.heard if event.kind == kind and event.process]

    def pid(self, process: str) -> int:
        state = self.folders.read_state()
        assert state is not None
        (pid,) = (line.pid for line in state.processes if line.name == process)
        assert pid is not None
        return pid


@asynccontextmanager
async def running(stack: Stack, folders: Folders) -> AsyncIterator[Running]:
    """The stack, serving; stopped on the way out."""
    under_test = Running(stack, folders)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(under_test.supervisor.run())
        try:
            await under_test.until("serving")
            yield under_test
        finally:
            under_test.supervisor.request_stop()


async def run_to_its_end(stack: Stack, folders: Folders) -> tuple[bool, Running]:
    under_test = Running(stack, folders)
    async with asyncio.timeout(PATIENCE_S):
        return await under_test.supervisor.run(), under_test


async def test_parts_start_in_order_and_stop_in_the_order_that_drains(
    folders: Folders, tmp_path: Path
):
    stack = stack_of(folders, tmp_path, pool="", prefill_0="", decode_0="", router="")
    async with running(stack, folders) as under_test:
        order = under_test.order("ready")
        assert (order[0], set(order[1:3]), order[3]) == (
            "pool",
            {"prefill-0", "decode-0"},
            "router",
        )
    assert under_test.order("stopped") == ["router", "decode-0", "prefill-0", "pool"]


async def test_a_later_stage_is_not_started_before_the_earlier_is_ready(
    folders: Folders, tmp_path: Path
):
    stack = stack_of(folders, tmp_path, pool="unready", router="")
    asked, under_test = await run_to_its_end(stack, folders)
    assert not asked
    assert under_test.order("starting") == ["pool"]


async def test_a_process_that_dies_is_started_again(folders: Folders, tmp_path: Path):
    stack = stack_of(folders, tmp_path, decode_0="", router="")
    async with running(stack, folders) as under_test:
        killed = under_test.pid("decode-0")
        os.kill(killed, signal.SIGKILL)
        await under_test.until("ready", "decode-0", count=2)
        assert under_test.pid("decode-0") != killed
        (died,) = (event for event in under_test.heard if event.kind == "died")
        assert "signal SIGKILL" in died.text
        state = folders.read_state()
        assert state is not None
        assert (state.phase, state.processes[0].restarts) == ("ready", 1)
    assert starts_of(stack, tmp_path, "decode-0") == 2
    assert starts_of(stack, tmp_path, "router") == 1


async def test_a_restart_that_crashes_is_tried_again(folders: Folders, tmp_path: Path):
    stack = stack_of(folders, tmp_path, decode_0="twice", router="")
    async with running(stack, folders) as under_test:
        os.kill(under_test.pid("decode-0"), signal.SIGKILL)
        await under_test.until("ready", "decode-0", count=2)
    assert starts_of(stack, tmp_path, "decode-0") == 3


async def test_a_crash_at_the_start_ends_the_stack_with_the_end_of_its_log(
    folders: Folders, tmp_path: Path
):
    stack = stack_of(folders, tmp_path, pool="", prefill_0="crash", decode_0="", router="")
    asked, under_test = await run_to_its_end(stack, folders)
    (failed,) = (event.text for event in under_test.heard if event.kind == "failed")
    assert not asked
    assert failed.startswith("prefill-0 ended while starting (exit code 3)")
    assert "no such weights" in failed
    assert "router" not in under_test.order("starting")


async def test_a_start_past_its_deadline_says_so(folders: Folders, tmp_path: Path):
    stack = stack_of(folders, tmp_path, decode_0="unready", router="")
    _, under_test = await run_to_its_end(stack, folders)
    (failed,) = (event.text for event in under_test.heard if event.kind == "failed")
    assert "was not ready within 0.5s" in failed
    assert "loading layer 3" in [e.text for e in under_test.heard if e.kind == "loading"]


async def test_what_ignores_the_request_to_stop_is_killed_with_all_it_started(
    folders: Folders, tmp_path: Path
):
    stack = stack_of(folders, tmp_path, decode_0="stubborn child", router="")
    async with running(stack, folders) as under_test:
        stubborn = handle_of(under_test.pid("decode-0"))
        grandchild = handle_of(int((tmp_path / "child").read_text()))
    assert ended(stubborn)
    assert ended(grandchild)
    (note,) = (event.text for event in under_test.heard if event.kind == "note")
    assert "was killed" in note


async def test_a_stop_while_starting_leaves_nothing(folders: Folders, tmp_path: Path):
    stack = stack_of(folders, tmp_path, pool="", decode_0="", router="")
    under_test = Running(stack, folders)
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(under_test.supervisor.run())
        await under_test.until("starting", "decode-0")
        handles = [handle_of(under_test.pid(name)) for name in ("pool", "decode-0")]
        under_test.supervisor.request_stop()
    assert run.result()
    assert all(ended(handle) for handle in handles)
    assert "serving" not in under_test.kinds("")


@pytest.mark.parametrize("spared", [None, "decode-1"])
async def test_the_stack_goes_on_while_another_of_the_role_serves(
    folders: Folders, tmp_path: Path, spared: str | None
):
    stack = stack_of(folders, tmp_path, decode_0="", decode_1="", router="")
    under_test = Running(stack, folders, most_rapid=0)
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(under_test.supervisor.run())
        await under_test.until("serving")
        for name in {"decode-0", "decode-1"} - {spared}:
            os.kill(under_test.pid(name), signal.SIGKILL)
            await under_test.until("gave_up", name)
        if spared:
            state = folders.read_state()
            assert state is not None
            assert state.phase == "degraded"
            under_test.supervisor.request_stop()
    assert run.result() is (spared is not None)


def test_logs_and_state_are_private(folders: Folders, tmp_path: Path):
    stack = stack_of(folders, tmp_path, router="crash")
    asyncio.run(run_to_its_end(stack, folders))
    paths = (folders.state, folders.run, folders.call_key, stack.log("router"))
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o700, 0o700, 0o600, 0o600]
