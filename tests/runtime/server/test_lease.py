"""A worker that no router hears ends its work before anybody may take it for ended."""

import asyncio
from contextlib import AsyncExitStack

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.auth import read_call_keys
from kimi_runtime.engine.adapters.scripted import Pace
from kimi_runtime.engine.adapters.scripts import Reply
from kimi_runtime.errors import RequestError, Unavailable, WorkerFailed
from kimi_runtime.router.client import PeerClient
from kimi_runtime.server.lease import PROBATION_S, Lease
from kimi_runtime.server.serve import bind, listening
from kimi_runtime.server.worker_app import serving, worker_app
from kimi_runtime.spec.request import GenerateRequest, Sampling
from kimi_runtime.spec.router import RouterSpec, WorkerEndpoint
from kimi_runtime.spec.worker import Role
from scripted_stack import (
    CALL_KEY,
    MODEL,
    Part,
    RunningWorker,
    call_key_file,
    ids_of,
    running_router,
    running_worker,
    until,
)

LEASE_S = 30.0


def test_a_worker_works_only_once_a_router_has_heard_it():
    lease = Lease(LEASE_S, epoch=7, now_s=0.0)
    assert lease.fenced(0.0)
    lease.reported(1, now_s=1.0)
    lease.heard(7, 1, now_s=1.2)
    assert not lease.fenced(1.2)
    assert lease.fenced(1.0 + LEASE_S)


def test_calls_whose_answers_are_lost_renew_nothing():
    lease = Lease(LEASE_S, epoch=7, now_s=0.0)
    lease.reported(1, now_s=0.0)
    for second in range(60):
        lease.heard(7, 1, now_s=float(second))
        lease.reported(second + 2, now_s=float(second))
    assert lease.fenced(30.0)
    assert lease.fenced(59.0)


def test_what_another_process_said_renews_nothing():
    lease = Lease(LEASE_S, epoch=7, now_s=0.0)
    lease.reported(1, now_s=0.0)
    lease.heard(6, 1, now_s=0.1)
    lease.heard(7, 2, now_s=0.1)
    assert lease.fenced(0.1)


def test_a_lease_that_was_over_takes_work_only_after_a_probation():
    lease = Lease(LEASE_S, epoch=7, now_s=0.0)
    lease.reported(1, now_s=0.0)
    lease.heard(7, 1, now_s=0.0)
    lease.reported(2, now_s=100.0)
    lease.heard(7, 2, now_s=100.2)
    assert lease.fenced(100.2 + PROBATION_S - 0.1)
    assert not lease.fenced(100.2 + PROBATION_S)


def test_routers_of_before_renew_by_calling_and_without_a_lease_nothing_ends():
    old = Lease(LEASE_S, epoch=7, now_s=0.0)
    old.called(now_s=5.0)
    assert not old.fenced(34.0)
    assert old.fenced(35.0)
    assert not Lease(None, epoch=7, now_s=0.0).fenced(1e9)


@settings(max_examples=200, deadline=None)
@given(
    polls=st.lists(
        st.tuples(st.floats(0.05, 40.0), st.booleans(), st.floats(0.0, 3.0), st.floats(0.0, 3.0)),
        max_size=40,
    )
)
def test_whenever_a_router_has_heard_nothing_for_a_lease_the_worker_is_fenced(polls):
    """Polls after pauses; the answer arrives or is lost; both ways take their time."""
    lease, now_s = Lease(LEASE_S, epoch=1, now_s=0.0), 0.0
    heard, answered_s = None, float("-inf")
    for seq, (pause_s, arrives, there_s, back_s) in enumerate(polls, 1):
        now_s += pause_s
        if now_s - answered_s >= LEASE_S:
            assert lease.fenced(now_s)
        if heard is not None:
            lease.heard(1, heard, now_s=now_s + there_s)
        lease.reported(seq, now_s=now_s + there_s)
        now_s += there_s + back_s
        if now_s - answered_s >= LEASE_S:
            assert lease.fenced(now_s)
        if arrives:
            heard, answered_s = seq, now_s


def generate(worker: str, max_tokens: int = 1000) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"{worker}-1",
        ids=(1, 2, 3),
        sampling=Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        deadline_ms=20_000,
        tenant="t",
        router="r",
    )


class leased:
    """A worker with a lease, and a client to call it by."""

    def __init__(self, folder, lease_s, script=None):
        self._folder, self._lease_s = folder, lease_s
        self._script = script or (lambda _: Reply([5] * 1000))

    async def __aenter__(self):
        self._owned = AsyncExitStack()
        key_file = call_key_file(self._folder)
        part = Part("w", self._script, pace=Pace(output_ids_per_s=50.0, ids_per_chunk=1))
        running: RunningWorker = await self._owned.enter_async_context(
            running_worker(part, key_file)
        )
        listener = self._owned.enter_context(bind("127.0.0.1", 0))
        server = await self._owned.enter_async_context(
            serving(running.adapter, read_call_keys(key_file), None, self._lease_s)
        )
        url = await self._owned.enter_async_context(listening(worker_app(server), listener))
        self._owned.push_async_callback(server.drain, within_s=0.0)
        http = await self._owned.enter_async_context(aiohttp.ClientSession())
        return server, PeerClient(http, "w", url, CALL_KEY.encode())

    async def __aexit__(self, *exc):
        return await self._owned.__aexit__(*exc)


async def exhausted(chunks):
    """How many chunks were left."""
    return len([chunk async for chunk in chunks])


async def test_a_fenced_worker_refuses_ends_what_runs_and_says_that_it_drains(tmp_path):
    async with leased(tmp_path, 0.6) as (server, client):
        first = await client.load(within_s=2.0)
        assert first.draining
        with pytest.raises(Unavailable, match="lease is over"):
            await exhausted(client.generate(generate("w"), trace_id="t"))
        second = await client.load(within_s=2.0, heard=(first.epoch, first.seq))
        assert not second.draining
        chunks = client.generate(generate("w"), trace_id="t")
        await anext(chunks)
        with pytest.raises(Unavailable, match="lease"):
            await exhausted(chunks)
        await until(lambda: server.adapter.load().in_flight.get("r", 0) == 0)
        assert (await client.load(within_s=2.0)).draining


async def test_a_word_that_is_none_is_refused(tmp_path):
    async with leased(tmp_path, 5.0) as (_, client):
        for word in ("1", "a.b", "1.2.3x", "", "-1.2", "9" * 40 + ".1"):
            with pytest.raises((RequestError, WorkerFailed)):
                await client._get(f"/load?heard={word}", object, 2.0)


async def test_a_router_keeps_the_leases_of_its_workers_and_serves(tmp_path):
    # long enough for the pauses of a busy machine
    async with leased(tmp_path, 2.5, lambda _: Reply(ids_of("Hello.<|im_end|>"))) as (server, one):
        endpoint = WorkerEndpoint(name="w", role=Role.BOTH, url=one.url)
        spec = RouterSpec(
            port=0,
            model_name=MODEL,
            workers=(endpoint,),
            call_key=tmp_path / "call.key",
            load_interval=0.1,
            thinking=False,
        )
        ask = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
        async with running_router(spec) as (url, router), aiohttp.ClientSession(url) as http:
            await until(lambda: router.readiness.obstacle is None)
            start = router.fleet["w"].heard
            # 40 polls outlast a lease
            await until(lambda: router.fleet["w"].heard[1] > start[1] + 40, within_s=30.0)
            assert not server.fence.up
            async with http.post("/v1/chat/completions", json=ask) as answer:
                assert answer.status == 200
        await until(lambda: server.fence.up)
        await asyncio.sleep(0)
