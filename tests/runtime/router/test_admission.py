import asyncio
from contextlib import ExitStack

import pytest

from kimi_runtime.errors import Overloaded, Unavailable
from kimi_runtime.router.admission import Admission


def test_beyond_the_limit_requests_are_refused_with_a_time_to_come_back():
    admission = Admission(2)
    admission.served(21.0)
    with ExitStack() as held:
        held.enter_context(admission.slot())
        held.enter_context(admission.slot())
        with pytest.raises(Overloaded, match="2 of 2") as refused:
            held.enter_context(admission.slot())
        assert refused.value.retry_after_s == 2.0  # 3 s held, 2 in flight: one ends in 1.5 s
    assert admission.in_flight == 0


def test_a_slot_is_free_again_after_a_failure():
    admission = Admission(1)
    with pytest.raises(ValueError, match="x"), admission.slot():
        raise ValueError("x")
    with admission.slot():
        pass


def test_the_last_slots_are_for_turns_of_running_sessions():
    admission = Admission(32)
    with ExitStack() as held:
        for _ in range(30):
            held.enter_context(admission.slot()).starts_session()
        newcomer = held.enter_context(admission.slot())
        with pytest.raises(Overloaded):
            newcomer.starts_session()
        held.enter_context(admission.slot())  # a turn does not call starts_session
        with pytest.raises(Overloaded):
            held.enter_context(admission.slot())


async def test_draining_refuses_newcomers_and_waits_for_the_others():
    admission = Admission(4)
    async with asyncio.TaskGroup() as tasks:
        with admission.slot():
            drain = tasks.create_task(admission.drain(within_s=5.0))
            await asyncio.sleep(0)
            with pytest.raises(Unavailable), admission.slot():
                pass
            assert not drain.done()
        await drain


async def test_while_it_lingers_a_router_takes_requests_and_closes_their_connections():
    admission = Admission(4)
    async with asyncio.TaskGroup() as tasks:
        drain = tasks.create_task(admission.drain(within_s=5.0, linger_s=0.2))
        await asyncio.sleep(0)
        assert admission.closing
        with admission.slot():
            await drain_begins(admission)
            with pytest.raises(Unavailable), admission.slot():
                pass
            assert not drain.done()


async def drain_begins(admission):
    async with asyncio.timeout(5):
        while not admission.draining:
            await asyncio.sleep(0.01)


async def test_draining_ends_after_its_time():
    admission = Admission(4)
    with admission.slot():
        await admission.drain(within_s=0.01)
        assert admission.in_flight == 1
