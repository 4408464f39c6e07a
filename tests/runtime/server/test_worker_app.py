"""The worker's wire format over HTTP, with the router's client."""

import asyncio
import itertools
from contextlib import aclosing, asynccontextmanager

import aiohttp
import pytest

from kimi_runtime.engine.adapters.scripted import Pace
from kimi_runtime.engine.adapters.scripts import Reply
from kimi_runtime.errors import (
    DeadlineExceeded,
    Overloaded,
    RequestError,
    Unavailable,
    WorkerFailed,
)
from kimi_runtime.router.client import PeerClient
from kimi_runtime.spec.request import FinishReason, GenerateRequest, KvPlan, Sampling
from kimi_runtime.spec.umbp import FeedBatch, FeedHello, FeedSnapshotPage
from kimi_runtime.umbp.feed import FeedFollower, FollowState
from scripted_stack import CALL_KEY, Part, call_key_file, ids_of, running_worker, until

HELLO = ids_of("Hello.<|im_end|>")
ASK = GenerateRequest(
    request_id="r1",
    ids=tuple(range(100, 120)),
    sampling=Sampling(max_tokens=100),
    deadline_ms=5_000,
    router="router-0",
)


@asynccontextmanager
async def worker_and_client(folder, script, **options):
    async with (
        running_worker(Part("w", script, **options), call_key_file(folder)) as worker,
        aiohttp.ClientSession() as http,
    ):
        await until(lambda: worker.server.ready)
        yield worker, PeerClient(http, "w", worker.url, CALL_KEY.encode())


async def collect(client, request):
    async with aclosing(client.generate(request, trace_id="t")) as chunks:
        return [chunk async for chunk in chunks]


async def test_a_generation_streams_ids_and_ends_with_finish_and_usage(tmp_path):
    async with worker_and_client(tmp_path, lambda r: Reply(HELLO)) as (_, client):
        chunks = await collect(client, ASK)
    assert [number for chunk in chunks for number in chunk.ids] == HELLO
    assert [chunk.finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish is FinishReason.STOP
    assert chunks[0].usage.computed_tokens == 20
    assert chunks[-1].usage is not None


async def test_an_offer_ends_with_a_hand_off_that_can_be_released_once(tmp_path):
    async with worker_and_client(tmp_path, lambda r: Reply(HELLO)) as (worker, client):
        chunks = await collect(client, ASK.model_copy(update={"kv": KvPlan(offer=True)}))
        assert [chunk.finish for chunk in chunks] == [FinishReason.HANDED_OFF]
        hand_off = chunks[0].hand_off
        assert (hand_off.tokens, len(hand_off.blocks)) == (20, 3)
        await client.release(hand_off.ticket, trace_id="t")
        await client.release(hand_off.ticket, trace_id="t")
        await client.release("unknown x?y=%2F", trace_id="t")
        assert worker.adapter.counters().hand_offs_released == 1


@pytest.mark.parametrize(
    "error",
    [
        RequestError("no", param="ids", code="c"),
        Overloaded("full", retry_after_s=4.0),
        Unavailable("gone"),
        DeadlineExceeded("late"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("after", [0, 3])
async def test_errors_cross_the_wire_before_and_after_the_first_ids(tmp_path, error, after):
    script = lambda r: Reply(  # noqa: E731
        HELLO if r.tenant == "readyz" else itertools.repeat(5),
        error=None if r.tenant == "readyz" else error,
        fail_after=after,
    )
    async with worker_and_client(tmp_path, script) as (_, client):
        with pytest.raises(type(error), match=str(error)) as raised:
            await collect(client, ASK)
    assert raised.value.status == error.status
    assert getattr(raised.value, "param", None) == getattr(error, "param", None)
    assert getattr(raised.value, "retry_after_s", 0) == getattr(error, "retry_after_s", 0)


async def test_a_stream_that_ends_without_finish_is_a_failure(tmp_path):
    script = lambda r: Reply(HELLO, cut_after=None if r.tenant == "readyz" else 2)  # noqa: E731
    async with worker_and_client(tmp_path, script) as (_, client):
        with pytest.raises(WorkerFailed, match="broke off"):
            await collect(client, ASK)


async def test_a_caller_that_leaves_cancels_its_request_at_once(tmp_path):
    pace = Pace(output_ids_per_s=200.0)
    script = lambda r: Reply(HELLO if r.tenant == "readyz" else itertools.repeat(5))  # noqa: E731
    async with worker_and_client(tmp_path, script, pace=pace) as (worker, client):
        async with aclosing(client.generate(ASK, trace_id="t")) as chunks:
            await anext(chunks)
            assert worker.adapter.load().in_flight == {"router-0": 1}
        await until(lambda: not worker.adapter.load().in_flight, within_s=2.0)
        assert worker.adapter.counters().finished["left"] == 1


async def test_a_request_that_does_not_parse_is_refused_by_name(tmp_path):
    async with worker_and_client(tmp_path, lambda r: Reply(HELLO)) as (_, client):
        broken = ASK.model_copy(update={"deadline_ms": 0})
        with pytest.raises(RequestError, match="deadline_ms"):
            await collect(client, broken)


async def test_a_feed_follows_changes_and_resumes(tmp_path):
    async with worker_and_client(tmp_path, lambda r: Reply(HELLO)) as (worker, client):
        follower, log = FeedFollower(), worker.adapter.feed
        log.add([bytes([n]) * 16 for n in range(5)])
        async with asyncio.timeout(5), aclosing(client.feed(None, 0)) as lines:
            kinds = []
            async for line in lines:
                kinds.append(type(line))
                assert follower.apply(line)
                if len(follower.keys) == 6:
                    break
                if follower.state is FollowState.EXACT and len(follower.keys) == 5:
                    log.add([b"x" * 16])
        assert kinds[:2] == [FeedHello, FeedSnapshotPage]
        log.remove([b"x" * 16])
        async with asyncio.timeout(5), aclosing(client.feed(*follower.resume_point())) as lines:
            assert isinstance(await anext(lines), FeedHello)
            line = await anext(lines)
            assert isinstance(line, FeedBatch)
            assert follower.apply(line)
        assert len(follower.keys) == 5


async def test_draining_lets_the_running_request_finish_and_refuses_others(tmp_path):
    pace = Pace(output_ids_per_s=50.0)
    async with worker_and_client(tmp_path, lambda r: Reply(HELLO), pace=pace) as (worker, client):
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(collect(client, ASK))
            await until(lambda: worker.adapter.load().in_flight)
            drain = tasks.create_task(worker.server.drain(within_s=5.0))
            await until(lambda: worker.server.draining)
            with pytest.raises(Unavailable, match="draining"):
                await collect(client, ASK.model_copy(update={"request_id": "r2"}))
            assert (await client.load(within_s=1.0)).draining
            assert not drain.done()
        assert running.result()[-1].finish is FinishReason.STOP


async def test_metrics_say_where_prompts_came_from(tmp_path):
    async with worker_and_client(tmp_path, lambda r: Reply(HELLO)) as (worker, client):
        await collect(client, ASK)
        await collect(client, ASK)
        async with aiohttp.ClientSession(worker.url) as http, http.get("/metrics") as answer:
            text = await answer.text()
    assert 'kimistack_worker_prompt_tokens_total{source="hbm"} 16.0' in text
    assert 'kimistack_worker_requests_total{path="/generate",status="200"} 2.0' in text
    assert "kimistack_worker_running 0.0" in text
