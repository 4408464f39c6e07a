"""Workers that die, hang, refuse or shut down; clients that leave or do not read."""

import asyncio
import itertools
import json
from contextlib import asynccontextmanager

import aiohttp
import openai
import pytest

from kimi_runtime.engine.adapters.scripted import Pace
from kimi_runtime.engine.adapters.scripts import Reply
from kimi_runtime.errors import Overloaded, RequestError, Unavailable
from kimi_runtime.spec.worker import Role
from scripted_stack import (
    MODEL,
    VOCABULARY,
    Part,
    ids_of,
    running_stack,
    until,
)

ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}]}
CHAT = "/v1/chat/completions"
HELLO = ids_of("Hello from here.<|im_end|>")
LONGEST = max(range(VOCABULARY.rank_count), key=lambda n: len(VOCABULARY.token_bytes(n)))
SLOW = Pace(output_ids_per_s=100.0)


def hello(request):
    return Reply(HELLO)


def unless_probe(reply):
    """`reply()` for clients; the readiness probe always passes."""
    return lambda request: Reply(HELLO) if request.tenant == "readyz" else reply()


@asynccontextmanager
async def front_door(folder, parts, **options):
    async with (
        running_stack(folder, parts, **options) as stack,
        aiohttp.ClientSession(stack.url) as http,
    ):
        yield http, stack


async def ask(http, **fields):
    async with http.post(CHAT, json=ASK | fields) as answer:
        return answer.status, await answer.json(), answer.headers


async def events(http, **fields):
    """The data of every SSE event; a cut connection ends the list."""
    async with http.post(CHAT, json=ASK | fields | {"stream": True}) as answer:
        assert answer.status == 200
        return [
            json.loads(line[6:])
            async for line in answer.content
            if line.startswith(b"data: ") and b"[DONE]" not in line
        ]


def nothing_left(stack):
    """Every gauge is back at zero: nobody holds anything for a request that is gone."""
    counters = [worker.adapter.counters() for worker in stack.workers.values()]
    return (
        stack.router.admission.in_flight == 0
        and stack.router.ledger.total_in_flight == 0
        and all(one.running == 0 and one.waiting == 0 for one in counters)
        and all(not worker.adapter.load().in_flight for worker in stack.workers.values())
        and sum(one.hand_offs_offered - one.hand_offs_released for one in counters) == 0
    )


@pytest.mark.parametrize(
    "fault",
    [
        lambda: Reply(HELLO, cut_after=0),
        lambda: Reply(HELLO, error=Unavailable("the engine stopped")),
        lambda: Reply(HELLO, error=Overloaded("full", retry_after_s=9.0)),
    ],
    ids=["cut", "unavailable", "full"],
)
async def test_a_failure_before_the_first_token_is_retried_elsewhere(tmp_path, fault):
    parts = [Part("bad", unless_probe(fault)), Part("good", hello)]
    async with front_door(tmp_path, parts) as (http, stack):
        for number in range(8):
            content = f"question {number}"
            status, body, _ = await ask(http, messages=[{"role": "user", "content": content}])
            assert status == 200
            assert body["choices"][0]["message"]["content"] == "Hello from here."
        assert stack.workers["bad"].adapter.counters().finished.total() > 1
        await until(lambda: nothing_left(stack))


async def test_a_dead_decode_worker_is_replaced_and_the_first_hand_off_released(tmp_path):
    parts = [
        Part("p", hello, Role.PREFILL),
        Part("d1", unless_probe(lambda: Reply(HELLO, cut_after=0)), Role.DECODE),
        Part("d2", hello, Role.DECODE),
    ]
    async with front_door(tmp_path, parts) as (http, stack):
        for number in range(6):
            status, _, _ = await ask(http, messages=[{"role": "user", "content": f"q{number}"}])
            assert status == 200
        await until(lambda: nothing_left(stack))
        assert stack.workers["p"].adapter.counters().hand_offs_offered > 7


async def test_a_prefill_worker_that_fails_is_replaced(tmp_path):
    bad = unless_probe(lambda: Reply(HELLO, error=Unavailable("out of order")))
    parts = [
        Part("p1", bad, Role.PREFILL),
        Part("p2", hello, Role.PREFILL),
        Part("d", hello, Role.DECODE),
    ]
    async with front_door(tmp_path, parts) as (http, stack):
        for number in range(6):
            status, _, _ = await ask(http, messages=[{"role": "user", "content": f"q{number}"}])
            assert status == 200
        await until(lambda: nothing_left(stack))
        assert stack.workers["p1"].adapter.counters().finished["failed"] > 0


@pytest.mark.parametrize("gone", ["p", "d"])
async def test_one_side_serves_alone_when_the_other_is_gone(tmp_path, gone):
    parts = [Part("p", hello, Role.PREFILL), Part("d", hello, Role.DECODE)]
    async with front_door(tmp_path, parts) as (http, stack):
        await stack.workers[gone].server.drain(within_s=0.0)
        await until(lambda: stack.router.ledger.loads([gone], now_s=0.0)[gone].draining)
        status, body, _ = await ask(http)
        assert status == 200
        assert body["choices"][0]["message"]["content"] == "Hello from here."
        text = await (await http.get("/metrics")).text()
        (left,) = {"p", "d"} - {gone}
        plan = f'kimistack_router_plans_total{{leg="whole",mode="extend",worker="{left}"}} 1.0'
        assert plan in text
        await until(lambda: nothing_left(stack))


async def test_a_failure_after_the_first_token_is_an_error_event_and_the_end(tmp_path):
    bad = unless_probe(lambda: Reply(HELLO, cut_after=3))
    async with front_door(tmp_path, [Part("bad", bad)]) as (http, stack):
        found = await events(http)
        assert found[0]["choices"][0]["delta"]["content"]
        assert found[-1]["error"]["type"] == "service_unavailable"
        assert "bad broke off" in found[-1]["error"]["message"]
        async with openai.AsyncOpenAI(
            base_url=f"{stack.url}/v1", api_key="x", max_retries=0
        ) as client:
            stream = await client.chat.completions.create(**ASK, stream=True)
            with pytest.raises(openai.APIError, match="broke off"):
                [chunk async for chunk in stream]
        status, body, _ = await ask(http)  # not streamed: the client has seen nothing yet
        assert status == 503
        assert "broke off" in body["error"]["message"]
        await until(lambda: nothing_left(stack))


async def test_when_nobody_is_left_the_answer_is_503_with_retry_after(tmp_path):
    async with front_door(tmp_path, [Part("w", hello)]) as (http, stack):
        await stack.workers["w"].server.drain(within_s=0.0)
        await until(lambda: stack.router.ledger.loads(["w"], now_s=0.0)["w"].draining)
        status, body, headers = await ask(http)
        assert status == 503
        assert body["error"]["type"] == "service_unavailable"
        assert "w is draining" in body["error"]["message"]
        assert int(headers["Retry-After"]) >= 1


async def test_full_workers_mean_429_with_their_own_retry_after(tmp_path):
    full = unless_probe(lambda: Reply(HELLO, error=Overloaded("full", retry_after_s=7.0)))
    async with front_door(tmp_path, [Part("a", full), Part("b", full)]) as (http, stack):
        status, body, headers = await ask(http)
        assert (status, headers["Retry-After"]) == (429, "7")
        assert body["error"]["type"] == "rate_limit_error"
        await until(lambda: nothing_left(stack))


async def test_a_request_the_worker_refuses_is_not_retried(tmp_path):
    calls = itertools.count()

    def refusing():
        next(calls)
        return Reply(HELLO, error=RequestError("no such thing", param="ids"))

    parts = [Part(name, unless_probe(refusing)) for name in "ab"]
    async with front_door(tmp_path, parts) as (http, _):
        status, body, _ = await ask(http)
        assert (status, body["error"]["message"]) == (400, "no such thing")
        assert next(calls) == 1


async def test_beyond_max_in_flight_requests_get_429(tmp_path):
    parts = [Part("w", unless_probe(lambda: Reply(HELLO, stall_after=2)))]
    async with front_door(tmp_path, parts, max_in_flight=2, request_deadline=2.0) as (http, stack):
        async with asyncio.TaskGroup() as tasks:
            held = [tasks.create_task(events(http)) for _ in range(2)]
            await until(lambda: stack.router.admission.in_flight == 2)
            status, body, headers = await ask(http)
            assert status == 429
            assert "2 of 2" in body["error"]["message"]
            assert int(headers["Retry-After"]) >= 1
        for task in held:
            assert task.result()[-1]["error"]["type"] == "timeout"
        await until(lambda: nothing_left(stack))


async def test_a_worker_that_hangs_is_given_up_at_the_deadline(tmp_path):
    parts = [Part("w", unless_probe(lambda: Reply(HELLO, stall_after=0)))]
    async with front_door(tmp_path, parts, request_deadline=0.5) as (http, stack):
        status, body, _ = await ask(http)
        assert (status, body["error"]["type"]) == (504, "timeout")
        await until(lambda: nothing_left(stack))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("roles", [(Role.BOTH,), (Role.PREFILL, Role.DECODE)])
async def test_a_client_that_leaves_frees_everything_at_once(tmp_path, stream, roles):
    endless = unless_probe(lambda: Reply(itertools.repeat(5)))
    parts = [Part(role.value, endless, role, SLOW) for role in roles]
    async with front_door(tmp_path, parts) as (http, stack):
        async with (
            http.post(CHAT, json=ASK | {"stream": stream})
            if stream
            else _leaving(stack, http) as answer
        ):
            if stream:
                await answer.content.readline()
                answer.close()
        await until(lambda: nothing_left(stack), within_s=2.0)
        last = stack.workers[roles[-1].value].adapter.counters()
        assert last.output_tokens < 200


@asynccontextmanager
async def _leaving(stack, http):
    """A client that does not stream and hangs up while the answer is made."""
    task = asyncio.ensure_future(ask(http))
    await until(lambda: sum(w.adapter.counters().running for w in stack.workers.values()) > 0)
    task.cancel()
    yield None


async def test_a_client_that_leaves_during_prefill_frees_the_prefill_worker(tmp_path):
    pace = Pace(prefill_tokens_per_s=20.0)
    parts = [Part("p", hello, Role.PREFILL, pace), Part("d", hello, Role.DECODE)]
    async with front_door(tmp_path, parts) as (http, stack):
        async with _leaving(stack, http):
            pass
        await until(lambda: nothing_left(stack), within_s=2.0)
        assert stack.workers["d"].adapter.counters().hand_offs_taken == 1  # the probe's


async def test_a_client_that_does_not_read_is_dropped_and_freed(tmp_path):
    endless = unless_probe(lambda: Reply(itertools.repeat(LONGEST)))
    info = {"max_context_tokens": 10**9}
    parts = [Part("w", endless, pace=Pace(ids_per_chunk=8192), info=info)]
    options = {"send_stall": 0.3, "default_max_tokens": 10**8}
    async with front_door(tmp_path, parts, **options) as (http, stack):
        host, port = stack.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = json.dumps(ASK | {"stream": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await until(lambda: stack.router.admission.in_flight == 1)
        async with asyncio.timeout(10):
            async for _ in _other_answers(http):
                if nothing_left(stack):
                    break
        try:
            async with asyncio.timeout(30):
                tail = (await reader.read())[-64:]  # what was under way, and it is closed
        finally:
            writer.close()
        assert b"[DONE]" not in tail
        assert not tail.endswith(b"0\r\n\r\n")
        await writer.wait_closed()


async def _other_answers(http):
    """Others are served while one does not read."""
    while True:
        status, _, _ = await ask(http, max_tokens=3)
        assert status == 200
        yield
        await asyncio.sleep(0.02)
