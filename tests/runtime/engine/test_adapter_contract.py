"""What every engine behind a worker promises, whatever computes its ids."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass

import pytest

from hash_engine import Answer, Setup, hash_engine, request
from kimi_runtime.engine.adapters.base import Adapter
from kimi_runtime.engine.adapters.scripted import Pace, ScriptedAdapter, scripted_info
from kimi_runtime.engine.adapters.scripts import derived
from kimi_runtime.errors import DeadlineExceeded, Overloaded, RequestError, Unavailable
from kimi_runtime.spec.request import FinishReason, GenerateRequest, KvPlan
from kimi_runtime.transfer.loopback import Fabric, LoopbackTransport
from kimi_runtime.umbp.feed import FeedFollower, FollowState


@dataclass(frozen=True)
class Limits:
    """What the tests vary. A `slow` engine's first step is not done before a test's next look."""

    max_running: int = 8
    max_waiting: int = 8
    slow: bool = False
    lease_s: float = 30.0


Open = Callable[..., AbstractAsyncContextManager[Adapter]]


@asynccontextmanager
async def open_scripted(limits: Limits, fabric: Fabric) -> AsyncIterator[Adapter]:
    del fabric
    adapter = ScriptedAdapter(
        scripted_info("w", block_tokens=4, total_blocks=64, max_context_tokens=128),
        derived(1000, length=1000),
        pace=Pace(prefill_tokens_per_s=0.2) if limits.slow else None,
        max_running=limits.max_running,
        max_waiting=limits.max_waiting,
        lease_s=limits.lease_s,
    )
    yield adapter
    await adapter.aclose()


@asynccontextmanager
async def open_reference(limits: Limits, fabric: Fabric) -> AsyncIterator[Adapter]:
    setup = Setup(
        max_running=limits.max_running,
        max_waiting=limits.max_waiting,
        lease_s=limits.lease_s,
        transport=LoopbackTransport("w", fabric),
        before_step=_stuck() if limits.slow else lambda plan: None,
    )
    async with hash_engine(setup) as running:
        yield running.engine


def _stuck() -> Callable[[object], None]:
    """Steps of a fifth of a second."""
    never = threading.Event()
    return lambda plan: (never.wait(0.2), None)[1]


@pytest.fixture(params=[open_scripted, open_reference], ids=["scripted", "reference"])
def open_engine(request: pytest.FixtureRequest) -> Open:
    opened: Open = request.param
    return lambda limits=None, fabric=None: opened(limits or Limits(), fabric or Fabric())


async def generate(adapter: Adapter, asked: GenerateRequest) -> Answer:
    return Answer([chunk async for chunk in adapter.generate(asked)])


async def in_flight(adapter: Adapter, count: int) -> None:
    """Let others run until so many requests are in."""
    while sum(adapter.load().in_flight.values()) < count:
        await asyncio.sleep(0)


def prompt(seed: int, size: int) -> list[int]:
    return random.Random(seed).choices(range(500), k=size)


async def test_a_stream_ends_with_its_only_finish_and_the_usage(open_engine):
    async with open_engine() as adapter:
        answer = await generate(adapter, request(prompt(1, 11), 5))
        assert len(answer.ids) == 5
        assert [chunk.finish for chunk in answer.chunks[:-1]] == [None] * (len(answer.chunks) - 1)
        assert answer.finish is FinishReason.LENGTH
        usage = answer.usage
        assert usage.hbm_tokens + usage.computed_tokens == 11
        first = next(chunk for chunk in answer.chunks if chunk.ids)
        assert first.usage == usage
        others = [chunk for chunk in answer.chunks[:-1] if chunk is not first]
        assert all(chunk.usage is None for chunk in others)


async def test_equal_requests_get_equal_ids_and_the_second_hits_the_cache(open_engine):
    async with open_engine() as adapter:
        first = await generate(adapter, request(prompt(1, 11), 5))
        second = await generate(adapter, request(prompt(1, 11), 5))
        assert first.ids == second.ids
        assert second.usage.hbm_tokens >= 8
        tokens = adapter.counters().prompt_tokens
        assert tokens["hbm"] + tokens["computed"] == 22


async def test_the_feed_tells_the_blocks_that_a_request_left_behind(open_engine):
    async with open_engine() as adapter:
        await generate(adapter, request(prompt(1, 11), 5))
        follower = FeedFollower()
        follower.apply(adapter.feed.hello())
        for page in adapter.feed.snapshot():
            follower.apply(page)
        assert follower.state is FollowState.EXACT
        assert len(follower.keys) >= 2
        assert adapter.feed.epoch == adapter.info.epoch


async def test_no_tokens_wanted_computes_the_prompt_alone(open_engine):
    async with open_engine() as adapter:
        answer = await generate(adapter, request(prompt(1, 11), 0))
        assert (answer.ids, answer.finish) == ([], FinishReason.LENGTH)


async def test_a_prompt_that_fills_the_context_is_refused(open_engine):
    async with open_engine() as adapter:
        with pytest.raises(RequestError) as refused:
            await generate(adapter, request(prompt(1, 128), 1))
        assert refused.value.code == "context_length_exceeded"
        assert adapter.load().in_flight == {}


async def test_a_generation_stops_at_the_context(open_engine):
    async with open_engine() as adapter:
        answer = await generate(adapter, request(prompt(1, 100), 500))
        assert (len(answer.ids), answer.finish) == (28, FinishReason.LENGTH)


async def test_an_offer_samples_nothing_and_is_released_once(open_engine):
    async with open_engine() as adapter:
        answer = await generate(adapter, request(prompt(1, 11), kv=KvPlan(offer=True)))
        assert (answer.ids, answer.finish) == ([], FinishReason.HANDED_OFF)
        hand_off = answer.hand_off
        assert hand_off.tokens == 11
        assert [block.tokens for block in hand_off.blocks] == [4, 4, 3]
        assert await adapter.release(hand_off.ticket)
        assert not await adapter.release(hand_off.ticket)
        assert not await adapter.release("unknown")


async def test_a_taken_hand_off_gives_the_ids_of_one_worker(open_engine):
    fabric = Fabric()
    async with (
        open_engine(fabric=fabric) as prefill,
        open_engine(fabric=fabric) as decode,
        open_engine() as alone,
    ):
        wanted = await generate(alone, request(prompt(1, 11), 5))
        offered = await generate(prefill, request(prompt(1, 11), kv=KvPlan(offer=True)))
        taken = await generate(decode, request(prompt(1, 11), 5, kv=KvPlan(take=offered.hand_off)))
        assert taken.ids == wanted.ids
        assert (taken.usage.hand_off_tokens, taken.usage.computed_tokens) == (10, 1)
        assert decode.counters().hand_offs_taken == 1


async def test_an_expired_offer_cannot_be_released(open_engine):
    async with open_engine(Limits(lease_s=1e-9)) as adapter:
        answer = await generate(adapter, request(prompt(1, 11), kv=KvPlan(offer=True)))
        assert not await adapter.release(answer.hand_off.ticket)


async def test_closing_a_stream_ends_the_request(open_engine):
    async with open_engine() as adapter:
        async with aclosing(adapter.generate(request(prompt(1, 11), 100))) as chunks:
            await anext(chunks)
        assert adapter.load().in_flight == {}
        assert adapter.counters().finished == {"left": 1}


async def test_the_deadline_ends_a_request(open_engine):
    async with open_engine(Limits(slow=True)) as adapter:
        with pytest.raises(DeadlineExceeded):
            await generate(adapter, request(prompt(1, 11), 5, deadline_ms=20))
        assert adapter.load().in_flight == {}
        assert adapter.counters().finished == {"late": 1}


async def test_load_reports_say_who_is_served_and_are_numbered(open_engine):
    async with open_engine(Limits(slow=True)) as adapter, asyncio.TaskGroup() as tasks:
        before = adapter.load()
        task = tasks.create_task(generate(adapter, request(prompt(1, 11), 5, router="r0")))
        await in_flight(adapter, 1)
        report = adapter.load()
        assert report.seq > before.seq
        assert report.in_flight == {"r0": 1}
        assert report.last_request == {"r0": "r"}
        assert report.running + report.waiting == 1
        task.cancel()


async def test_a_full_queue_refuses_with_a_time_to_come_back(open_engine):
    limits = Limits(max_running=1, max_waiting=1, slow=True)
    async with open_engine(limits) as adapter, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(generate(adapter, request(prompt(1, 11), 5)))
        while not adapter.load().running:
            await asyncio.sleep(0)
        waiting = tasks.create_task(generate(adapter, request(prompt(2, 11), 5)))
        await in_flight(adapter, 2)
        with pytest.raises(Overloaded) as refused:
            await generate(adapter, request(prompt(3, 11), 5))
        assert refused.value.retry_after_s > 0
        running.cancel()
        waiting.cancel()


async def test_draining_refuses_the_new_and_cancels_what_is_left(open_engine):
    async with open_engine(Limits(slow=True)) as adapter, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(generate(adapter, request(prompt(1, 11), 50)))
        await in_flight(adapter, 1)
        await adapter.drain(within_s=0.01)
        with pytest.raises(Unavailable):
            await generate(adapter, request(prompt(2, 11), 5))
        assert (await running).finish is FinishReason.CANCELLED
        assert adapter.load().draining


async def test_closing_forgets_every_block(open_engine):
    async with open_engine() as adapter:
        await generate(adapter, request(prompt(1, 11), 5))
        await adapter.aclose()
        assert len(adapter.feed) == 0
