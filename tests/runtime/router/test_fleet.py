"""Discovery and feeds against real workers: who is found, refused, lost and found again."""

import asyncio
import json
from contextlib import asynccontextmanager

import aiohttp
import pytest

from kimi_operator.local.machine import free_ports
from kimi_runtime.engine.adapters.scripted import Pace
from kimi_runtime.engine.adapters.scripts import Reply
from kimi_runtime.protocol.chat import Chat, Message
from kimi_runtime.spec.router import PoolEndpoint, RouterSpec, WorkerEndpoint
from kimi_runtime.spec.worker import Role
from kimi_runtime.umbp.feed import FollowState
from scripted_stack import (
    CODEC,
    MODEL,
    Part,
    all_ready,
    call_key_file,
    ids_of,
    running_router,
    running_stack,
    running_worker,
    until,
)

HELLO = ids_of("Hello.<|im_end|>")
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello, " * 10}]}


def hello(request):
    return Reply(HELLO)


def free_port():
    return free_ports("127.0.0.1", 1)[0]


def spec_of(folder, endpoints, **options):
    return RouterSpec(
        port=0,
        model_name=MODEL,
        workers=endpoints,
        call_key=folder / "call.key",
        load_interval=0.02,
        thinking=False,
        **({"retry_window": 0.0} | options),
    )


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (Part("b", hello, info={"vocabulary_digest": "0" * 64}), "vocabulary"),
        (Part("b", hello, info={"block_tokens": 16}), "KV could not be shared"),
        (Part("other-name", hello), "calls itself 'other-name'"),
        (Part("b", hello, Role.DECODE), "its role is decode, not both"),
    ],
    ids=["vocabulary", "layout", "name", "role"],
)
async def test_a_worker_that_does_not_fit_is_refused_loudly_and_never_used(
    tmp_path, caplog, part, says
):
    key_file = call_key_file(tmp_path)
    async with (
        running_worker(Part("a", hello), key_file) as good,
        running_worker(part, key_file) as bad,
    ):
        wrong = WorkerEndpoint(name="b", role=Role.BOTH, url=bad.url)
        first = spec_of(tmp_path, (good.endpoint, wrong))
        async with running_router(first) as (url, router):
            await until(lambda: router.fleet["a"].ready and router.readiness.obstacle is None)
            await until(lambda: router.fleet["b"].info is not None or router.fleet["b"].ready)
            if router.fleet["b"].ready:  # it was met first: then the other one is refused
                assert says == "KV could not be shared"
                return
            assert says in router.fleet["b"].refusal
            assert any("worker refused" in record.message for record in caplog.records)
            async with aiohttp.ClientSession(url) as http:
                for _ in range(4):
                    async with http.post("/v1/chat/completions", json=ASK) as answer:
                        assert answer.status == 200
            assert bad.adapter.counters().finished.total() == 1  # its own readiness probe


async def test_a_router_waits_for_its_workers_and_is_ready_after_a_generation(tmp_path):
    key_file, port = call_key_file(tmp_path), free_port()
    late = WorkerEndpoint(name="w", role=Role.BOTH, url=f"http://127.0.0.1:{port}")
    async with (
        running_router(spec_of(tmp_path, (late,))) as (url, router),
        aiohttp.ClientSession(url) as http,
    ):
        async with http.get("/readyz") as answer:
            assert answer.status == 503
        async with http.get("/healthz") as answer:
            assert answer.status == 200
        async with http.post("/v1/chat/completions", json=ASK) as answer:
            assert answer.status == 503
            assert "no worker is known" in (await answer.json())["error"]["message"]
        async with running_worker(Part("w", hello, port=port), key_file):
            await until(lambda: router.readiness.obstacle is None)
            async with http.get("/readyz") as answer:
                assert answer.status == 200


async def test_a_restarted_worker_is_met_again_and_probed_again(tmp_path):
    key_file, port = call_key_file(tmp_path), free_port()
    endpoint = WorkerEndpoint(name="w", role=Role.BOTH, url=f"http://127.0.0.1:{port}")
    async with running_router(spec_of(tmp_path, (endpoint,))) as (_, router):
        for epoch in (1, 2):
            async with running_worker(Part("w", hello, port=port, info={"epoch": epoch}), key_file):
                await until(lambda: all_ready(router) and router.readiness.obstacle is None)
                await until(lambda e=epoch: router.fleet["w"].info.epoch == e)
                await until(lambda e=epoch: router.readiness.passed == e)
            await until(lambda: not all_ready(router))
            await until(lambda: router.readiness.obstacle is not None)
        assert router.ledger.total_in_flight == 0


@asynccontextmanager
async def hanging_between(folder, part):
    """A router whose one worker hangs once the event is set: connections open, nothing passes.

    As a process that is swapped out or stopped, or a host that is gone.
    """
    hang, handlers = asyncio.Event(), set()

    async def proxy(reader, writer):
        handlers.add(asyncio.current_task())
        upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", target)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(pump(reader, upstream))
                tasks.create_task(pump(upstream_reader, writer))
        except* ConnectionError:
            pass
        finally:
            writer.close()
            upstream.close()

    async def pump(source, sink):
        while data := await source.read(2**16):
            if hang.is_set():
                await asyncio.Event().wait()
            sink.write(data)
            await sink.drain()
        sink.close()

    async with running_worker(part, call_key_file(folder)) as worker:
        target = int(worker.url.rsplit(":", 1)[1])
        server = await asyncio.start_server(proxy, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        endpoint = WorkerEndpoint(name="w", role=Role.BOTH, url=f"http://127.0.0.1:{port}")
        async with running_router(spec_of(folder, (endpoint,))) as (url, router):
            await until(lambda: router.readiness.obstacle is None)
            async with aiohttp.ClientSession(url) as http:
                yield http, router, hang
        server.close()
        for handler in handlers:
            handler.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


async def test_a_worker_that_stops_answering_is_lost_and_its_streams_end(tmp_path):
    slow = Part("w", hello, pace=Pace(output_ids_per_s=4.0))
    async with hanging_between(tmp_path, slow) as (http, router, hang):
        async with http.post("/v1/chat/completions", json=ASK | {"stream": True}) as answer:
            await answer.content.readline()
            hang.set()
            async with asyncio.timeout(10):
                text = (await answer.content.read()).decode()
        assert "event: error" in text
        assert not router.fleet["w"].ready
        assert router.ledger.total_in_flight == 0


async def test_a_request_that_a_lost_worker_has_not_begun_to_answer_is_given_up(tmp_path):
    async with hanging_between(tmp_path, Part("w", hello)) as (http, router, hang):
        hang.set()
        async with asyncio.timeout(10), http.post("/v1/chat/completions", json=ASK) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
        assert not router.fleet["w"].ready
        assert router.ledger.total_in_flight == 0


async def test_the_feed_sends_the_next_turn_to_whoever_holds_the_prefix(tmp_path):
    parts = [Part(name, hello) for name in "abc"]
    async with running_stack(tmp_path, parts) as stack:
        router = stack.router
        await until(lambda: set(router.feeds.states().values()) == {FollowState.EXACT})
        chat = Chat(messages=(Message("user", "something long " * 30),), thinking=False)
        turn = router.sessions.begin("default", None, CODEC.render(chat))
        keys = router.sessions.keys(turn, next(iter(router.fleet.roster.geometries.values())))
        stack.workers["b"].adapter.feed.add(keys)  # as if it had served this prefix before
        await until(lambda: router.feeds.keys_held()["b"] >= len(keys))
        async with aiohttp.ClientSession(stack.url) as http:
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": "something long " * 30}],
            }
            async with http.post("/v1/chat/completions", json=body) as answer:
                assert answer.status == 200
        session = next(iter(router.sessions._sessions.values()))
        assert session.owners == ("b",)


async def test_a_pool_that_is_down_costs_nothing_but_its_hits(tmp_path, caplog):
    pool = PoolEndpoint(name="pool", url=f"http://127.0.0.1:{free_port()}")
    async with running_stack(tmp_path, [Part("w", hello)], pools=(pool,)) as stack:
        async with (
            aiohttp.ClientSession(stack.url) as http,
            http.post("/v1/chat/completions", json=ASK) as answer,
        ):
            assert answer.status == 200
        assert stack.router.feeds.states()["pool"] is FollowState.DEGRADED
    lost = [r for r in caplog.records if r.message == "feed lost" and r.fields["owner"] == "pool"]
    assert len(lost) == 1  # said once, not at every attempt


async def test_a_decision_is_logged_with_its_terms_and_without_content(tmp_path, caplog):
    caplog.set_level("INFO")
    async with running_stack(tmp_path, [Part("w", hello)]) as stack:
        async with aiohttp.ClientSession(stack.url) as http:
            body = ASK | {"messages": [{"role": "user", "content": "xyzzy secret"}]}
            headers = {"X-Request-ID": "trace-me"}
            async with http.post("/v1/chat/completions", json=body, headers=headers) as answer:
                assert answer.status == 200
        await until(lambda: stack.router.admission.in_flight == 0)
    lines = [
        record.fields
        for record in caplog.records
        if record.message == "request" and record.fields["request_id"] == "trace-me"
    ]
    assert len(lines) == 2  # one per hop
    front = next(line for line in lines if line["path"] == "/v1/chat/completions")
    assert front["workers"] == ["w"]
    assert "whole.compute" in front["terms"]
    assert all("xyzzy" not in json.dumps(record.__dict__, default=str) for record in caplog.records)
