"""Workers that leave under load: no request is lost, and none is planned onto who leaves."""

import asyncio

import aiohttp

from kimi_runtime.engine.adapters.scripted import Pace
from kimi_runtime.engine.adapters.scripts import Reply
from kimi_runtime.server.serve import bind
from kimi_runtime.spec.router import RouterSpec, WorkerEndpoint
from kimi_runtime.spec.worker import Role
from scripted_stack import (
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

HELLO = ids_of("Hello from here, and from there too.<|im_end|>")
CHAT = "/v1/chat/completions"
SLOW = Pace(output_ids_per_s=50.0)


def hello(request):
    return Reply(HELLO)


def body(number):
    return {"model": MODEL, "messages": [{"role": "user", "content": f"question {number}"}]}


def served(worker):
    return worker.adapter.counters().finished.total()


def spec_of(folder, endpoints, **options):
    return RouterSpec(
        port=0,
        model_name=MODEL,
        workers=endpoints,
        call_key=call_key_file(folder),
        load_interval=0.02,
        thinking=False,
        **options,
    )


async def test_routers_leave_a_worker_whose_drain_file_says_so_and_come_back(tmp_path):
    parts = [Part("a", hello), Part("b", hello)]
    async with running_stack(tmp_path, parts) as stack, aiohttp.ClientSession(stack.url) as http:
        a, file = stack.workers["a"], tmp_path / "draining"
        a.server.drain_file = file
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(a.server.watch_drain_file())
            file.write_text("true")
            await until(lambda: stack.router.fleet["a"].draining)
            before = served(a)
            for number in range(6):
                async with http.post(CHAT, json=body(number)) as answer:
                    assert answer.status == 200
            assert served(a) == before
            file.write_text("\n")
            await until(lambda: not stack.router.fleet["a"].draining)
            file.unlink()
            for number in range(20):
                async with http.post(CHAT, json=body(number)) as answer:
                    assert answer.status == 200
            assert served(a) > before
            watch.cancel()


async def test_a_worker_that_is_to_be_left_serves_what_it_is_still_sent(tmp_path):
    async with (
        running_stack(tmp_path, [Part("a", hello)], retry_window=5.0) as stack,
        aiohttp.ClientSession(stack.url) as http,
    ):
        a = stack.workers["a"]
        a.server.leaving = True  # no router has heard of it yet
        async with http.post(CHAT, json=body(0)) as answer:
            assert answer.status == 200


async def test_a_request_that_nobody_can_take_waits_for_the_worker_that_comes(tmp_path):
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    late = WorkerEndpoint(name="w", role=Role.BOTH, url=f"http://127.0.0.1:{port}")
    spec = spec_of(tmp_path, (late,), retry_window=20.0)
    async with (
        running_router(spec) as (url, router),
        aiohttp.ClientSession(url) as http,
        asyncio.TaskGroup() as tasks,
    ):
        waiting = tasks.create_task(http.post(CHAT, json=body(0)))
        await until(lambda: router.admission.in_flight == 1)
        async with (
            running_worker(Part("w", hello, port=port), spec.call_key),
            await waiting as answer,
        ):
            assert answer.status == 200


async def test_a_request_that_no_worker_will_ever_take_is_refused_at_once(tmp_path):
    small = Part("w", hello, info={"max_context_tokens": 64})
    async with (
        running_stack(tmp_path, [small], retry_window=3600.0) as stack,
        aiohttp.ClientSession(stack.url) as http,
    ):
        asked = body(0) | {"messages": [{"role": "user", "content": "long " * 500}]}
        async with asyncio.timeout(10), http.post(CHAT, json=asked) as answer:
            assert answer.status == 400


async def test_workers_that_are_replaced_in_turn_under_load_lose_no_request(tmp_path):
    """More workers go than a request has retries, each while others are sent to it."""
    names = ["a", "b", "c", "d", "e", "f"]
    parts = [Part(name, hello, pace=SLOW) for name in names]
    failures = []
    async with (
        running_stack(tmp_path, parts, retry_window=20.0, retries=1) as stack,
        aiohttp.ClientSession(stack.url) as http,
    ):
        over = asyncio.Event()

        async def load(client):
            number = 0
            while not over.is_set():
                number += 1
                async with http.post(CHAT, json=body(f"{client}.{number}")) as answer:
                    if answer.status != 200:
                        failures.append(await answer.text())
            return number

        async with asyncio.TaskGroup() as tasks:
            clients = [tasks.create_task(load(client)) for client in range(6)]
            for name in names:
                await until(lambda: stack.router.ledger.total_in_flight > 0)
                gone = stack.workers[name]
                await gone.server.drain(within_s=10.0)
                await gone.owned.aclose()
                async with asyncio.timeout(20):
                    again = Part(name, hello, pace=SLOW, port=int(gone.url.rpartition(":")[2]))
                    held = running_worker(again, stack.call_key)
                    stack.workers[name] = await gone.owned.enter_async_context(held)
                await until(lambda: all_ready(stack.router))
            over.set()
        assert failures == []
        assert all(client.result() > 0 for client in clients)


async def test_a_router_that_closes_answers_and_ends_the_connection(tmp_path):
    async with (
        running_stack(tmp_path, [Part("a", hello)]) as stack,
        aiohttp.ClientSession(stack.url) as http,
    ):
        async with http.post(CHAT, json=body(0)) as answer:
            assert answer.status == 200
            assert "Connection" not in answer.headers
        stack.router.admission.closing = True
        async with http.post(CHAT, json=body(1)) as answer:
            assert answer.status == 200
            assert answer.headers["Connection"] == "close"
        async with http.get("/readyz") as answer:
            assert answer.status == 503
