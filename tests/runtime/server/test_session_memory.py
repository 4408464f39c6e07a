"""What bounds the sessions of a router: workers' memory, unless a pool keeps what they evict."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from kimi_runtime import clock
from kimi_runtime.engine.adapters.scripts import Reply
from kimi_runtime.router.session_gate import Entry
from kimi_runtime.spec.router import Cost, PoolEndpoint, SessionAdmission
from scripted_stack import Part, ids_of, running_stack, until

POOL = (PoolEndpoint(name="pool", url="http://127.0.0.1:1"),)


@asynccontextmanager
async def router_of(folder, *, pools, **admission):
    """A router over one worker, which it has heard from."""
    worker = Part("w", lambda _: Reply(ids_of("Yes.<|im_end|>")))
    sessions = SessionAdmission(**admission)
    async with running_stack(
        folder, [worker], pools=pools, policy=Cost(), sessions=sessions
    ) as stack:
        await until(lambda: all(member.ready for member in stack.router.fleet.members))
        yield stack.router


def memory_of(router):
    """Tokens the workers have memory for."""
    (member,) = router.fleet.members
    return member.info.total_blocks * member.info.block_tokens


@pytest.mark.parametrize(("pools", "admission"), [((), {}), (POOL, {"enabled": True})])
async def test_sessions_are_bounded_by_workers_memory(tmp_path, pools, admission):
    async with router_of(tmp_path, pools=pools, **admission) as router:
        assert router.gate.capacity_tokens == memory_of(router)


async def test_a_pool_that_keeps_what_workers_evict_leaves_sessions_unbounded_while_it_is_there(
    tmp_path,
):
    async with router_of(tmp_path, pools=POOL) as router:
        assert router.gate.capacity_tokens is None
        router.feeds.remove("pool")
        assert router.gate.capacity_tokens == memory_of(router)


async def test_signals_tell_of_the_sessions_that_wait_for_memory(tmp_path):
    async with router_of(tmp_path, pools=()) as router, asyncio.TaskGroup() as tasks:
        tokens, end = memory_of(router), asyncio.Event()

        async def turn(name):
            entry = Entry(name, "t", tokens, continues=False, deadline_s=clock.now_s() + 60)
            async with router.gate.turn(entry):
                await end.wait()

        for name in (b"a", b"b"):
            tasks.create_task(turn(name))
        await until(lambda: router.gate.waiting == 1)
        told = router.signals()
        assert (told.held_requests, told.held_tokens) == (1, tokens)
        assert (told.session_tokens, told.session_capacity_tokens) == (tokens, tokens)
        assert (told.fleet.waiting_requests, told.fleet.kv_use) == (1, 2.0)
        end.set()
    assert router.signals().held_requests == 0
