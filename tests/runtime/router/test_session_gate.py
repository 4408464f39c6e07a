"""Requests that wait for KV memory: within their deadlines, and never for ever."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from kimi_runtime import clock
from kimi_runtime.errors import DeadlineExceeded, Overloaded
from kimi_runtime.router.ledger import Ledger
from kimi_runtime.router.session_gate import Entry, SessionGate
from kimi_runtime.spec.router import SessionAdmission
from kimi_runtime.spec.worker import LoadReport
from scripted_stack import until


def entry(name, tokens=100, *, continues=False, within_s=10.0):
    deadline_s = clock.now_s() + within_s
    return Entry(name.encode(), "t", tokens, continues=continues, deadline_s=deadline_s)


@asynccontextmanager
async def gate_of(capacity=1000, *, enabled=True, **spec):
    gate = SessionGate(SessionAdmission(**spec), lambda: capacity, enabled=enabled)
    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(gate.watch())
        yield gate
        watch.cancel()


@asynccontextmanager
async def inside(gate, *entries, pause_s=None):
    """Turns that run while the block does."""
    over = asyncio.Event()

    async def run(one, began):
        async with gate.turn(one) as seat:
            began.set()
            seat.pause_s = pause_s
            await over.wait()

    async with asyncio.TaskGroup() as tasks:
        for one in entries:
            began = asyncio.Event()
            tasks.create_task(run(one, began))
            await began.wait()
        yield
        over.set()


async def passed(gate, one):
    async with gate.turn(one) as seat:
        return seat.waited_s


async def test_a_start_waits_until_the_memory_it_needs_is_free():
    async with gate_of() as gate:
        async with inside(gate, entry("a", 900)):
            waiting = asyncio.ensure_future(passed(gate, entry("b", 200)))
            await until(lambda: gate.waiting == 1)
        assert await waiting > 0
        assert gate.outcomes == {"at_once": 1, "waited": 1}
        assert gate.used_tokens == 0


async def test_a_start_that_waits_too_long_is_refused_with_when_to_come_back():
    async with gate_of(max_wait=0.02) as gate, inside(gate, entry("a", 900)):
        with pytest.raises(Overloaded) as refused:
            await passed(gate, entry("b", 200))
        assert 1 <= refused.value.retry_after_s <= 60
        assert gate.waiting == 0


async def test_a_turn_of_a_session_waits_as_long_as_its_deadline_lets_it():
    async with gate_of(max_wait=0.0) as gate, inside(gate, entry("a", 900)):
        with pytest.raises(DeadlineExceeded):
            await passed(gate, entry("b", 200, continues=True, within_s=0.02))
        assert gate.used_tokens == 900


async def test_a_client_that_leaves_while_it_waits_holds_nobody_back():
    async with gate_of() as gate:
        async with inside(gate, entry("a", 900)):
            leaves = asyncio.ensure_future(passed(gate, entry("b", 1000)))
            await until(lambda: gate.waiting == 1)
            stays = asyncio.ensure_future(passed(gate, entry("c", 100)))
            await until(lambda: gate.waiting == 2)
            leaves.cancel()
            await asyncio.wait_for(stays, 5.0)
        assert gate.outcomes["left"] == 1
        assert gate.used_tokens == 0


async def test_a_session_whose_tool_runs_keeps_its_memory_only_as_long_as_was_said():
    async with gate_of() as gate:
        async with inside(gate, entry("a", 900), pause_s=0.05):
            pass
        assert gate.used_tokens == 900
        assert 0 < await passed(gate, entry("b", 200)) < 5
        assert gate.used_tokens == 0


async def test_a_session_that_is_over_gives_its_memory_back_at_once():
    async with gate_of() as gate:
        async with inside(gate, entry("a", 900), pause_s=60.0):
            gate.end(b"a")  # its turn still runs
            assert gate.used_tokens == 900
        gate.end(b"a")
        assert await passed(gate, entry("b", 1000)) < 1


async def test_two_turns_of_one_session_at_once_each_need_room_and_neither_is_lost():
    async with gate_of() as gate, inside(gate, entry("a", 400), entry("a", 400)):
        assert gate.used_tokens == 800
    assert gate.used_tokens == 0


async def test_a_prompt_larger_than_all_memory_runs_alone():
    async with gate_of(capacity=50) as gate:
        await passed(gate, entry("large", 100))
        async with inside(gate, entry("a", 10)):
            waiting = asyncio.ensure_future(passed(gate, entry("large", 100)))
            await until(lambda: gate.waiting == 1)
        await waiting


async def test_nobody_is_held_back_while_no_worker_is_known_or_it_is_switched_off():
    async with gate_of(capacity=None) as gate, inside(gate, entry("a", 10**9)):
        await passed(gate, entry("b", 10**9))
    async with gate_of(enabled=False) as gate, inside(gate, entry("a", 10**9)):
        await passed(gate, entry("b", 10**9))
        assert gate.used_tokens == 0


async def test_a_queue_that_is_full_refuses_starts_and_sheds_them_for_turns():
    async with gate_of(max_waiting=1) as gate:
        async with inside(gate, entry("a", 1000)):
            start = asyncio.ensure_future(passed(gate, entry("start")))
            await until(lambda: gate.waiting == 1)
            with pytest.raises(Overloaded):
                await passed(gate, entry("one more"))
            later = asyncio.ensure_future(passed(gate, entry("later", continues=True)))
            with pytest.raises(Overloaded):
                await start
        await later
        assert (gate.outcomes["refused"], gate.outcomes["shed"]) == (1, 1)


def test_replicas_share_memory_by_what_workers_report_of_them():
    def report(**in_flight):
        return LoadReport(
            epoch=1,
            seq=1,
            waiting=0,
            running=sum(in_flight.values()),
            queued_tokens=0,
            free_blocks=10,
            total_blocks=10,
            steps=0,
            in_flight=in_flight,
            last_request={},
            draining=False,
        )

    ledger = Ledger("r-0", stale_after_s=1.0)
    assert ledger.share(["w"]) == 1.0
    ledger.report("w", report(), now_s=0.0)
    ledger.start("w", "a", new_tokens=1)
    assert ledger.share(["w"]) == 1.0
    ledger.report("v", report(**{"r-1": 3, "r-0": 5}), now_s=0.0)
    assert ledger.share(["w", "v"]) == pytest.approx(2 / 6)
