"""`GET /signals` of a running router: what it measures, and what it does while nothing runs."""

import asyncio
import json

import aiohttp

from kimi_runtime import clock
from kimi_runtime.engine.adapters.scripted import Pace
from kimi_runtime.engine.adapters.scripts import Reply
from kimi_runtime.router.window import SLICES, Sum, Window
from kimi_runtime.spec.router import FleetSpec, RouterSpec
from kimi_runtime.spec.signals import RouterSignals
from kimi_runtime.spec.worker import Role
from scripted_stack import (
    MODEL,
    Part,
    call_key_file,
    ids_of,
    running_router,
    running_stack,
    running_worker,
    until,
)

SECRET = "the prompt that nobody may read"
ASK = {"model": MODEL, "messages": [{"role": "user", "content": SECRET * 10}]}


def hello(request):
    return Reply(ids_of("Hello.<|im_end|>"))


async def signals_of(http) -> RouterSignals:
    async with http.get("/signals") as answer:
        assert answer.status == 200
        return RouterSignals.model_validate_json(await answer.read())


def test_a_window_forgets_slice_by_slice_and_stays_small():
    window = Window(60.0)
    for second in range(10_000):
        window.add(0.5, now_s=float(second))
        assert len(window._slices) <= SLICES
    assert sum(window.counts(9_999.0).values()) in range(55, 61)
    assert window.counts(10_100.0) == {}


def test_a_sum_is_of_the_window_alone():
    total = Sum(60.0)
    for second in range(1000):
        total.add(2.0, now_s=float(second))
    assert total.total(999.0) in (110.0, 120.0)
    assert total.total(2000.0) == 0.0


async def test_signals_tell_of_times_and_workers_and_of_no_request(tmp_path):
    pace = Pace(prefill_tokens_per_s=500.0, output_ids_per_s=500.0)
    parts = [Part("p", hello, Role.PREFILL, pace), Part("d", hello, Role.DECODE, pace)]
    keys = tmp_path / "keys"
    keys.write_text("sk-0123456789abcdef tenant-a\n")
    keys.chmod(0o600)
    async with (
        running_stack(tmp_path, parts, api_keys=keys) as stack,
        aiohttp.ClientSession(stack.url) as http,
    ):
        head = {"Authorization": "Bearer sk-0123456789abcdef"}
        for _ in range(3):
            async with http.post("/v1/chat/completions", json=ASK, headers=head) as answer:
                assert answer.status == 200, await answer.text()
        async with http.get("/signals") as answer:  # the operator has no API key
            text = await answer.text()
        told = RouterSignals.model_validate_json(text)
    assert sum(told.ttft.counts.values()) == 3
    assert sum(told.hand_off.counts.values()) == 3
    assert told.itl.p95_s is not None
    rates = {one.name: one.tokens_per_s for one in told.workers}
    assert rates["p"] == 0.0
    assert rates["d"] > 0.0, "what came out, by the worker it came from"
    assert 0.0 < told.prefill_tokens_per_s < 500.0 * 1.06  # never more than the worker does
    assert {one.name: (one.role, one.ready, one.in_flight) for one in told.workers} == {
        "p": (Role.PREFILL, True, 0),
        "d": (Role.DECODE, True, 0),
    }
    assert all(one.silent_s is not None and one.silent_s < 5.0 for one in told.workers)
    assert told.fleet.queue_s == 0.0
    assert told.fleet.kv_use == 0.0
    assert told.fleet.transfer_backlog_s is not None
    for secret in (SECRET, "sk-0123456789abcdef", "tenant-a", "Hello", "127.0.0.1", "k" * 64):
        assert secret not in text


async def test_what_runs_at_a_worker_is_told_whichever_router_sent_it(tmp_path):
    key_file = call_key_file(tmp_path)
    stalled = Part("w", lambda _: Reply(ids_of("Hello."), stall_after=0))
    async with running_worker(stalled, key_file) as worker:
        common = {
            "port": 0,
            "model_name": MODEL,
            "workers": (worker.endpoint,),
            "call_key": key_file,
            "load_interval": 0.05,
            "thinking": False,
        }
        one, two = (RouterSpec(name=f"router-{n}", **common) for n in (1, 2))
        async with (
            running_router(one) as (url, router),
            running_router(two) as (other_url, other),
            aiohttp.ClientSession(url) as http,
            aiohttp.ClientSession(other_url) as other_http,
            asyncio.TaskGroup() as tasks,
        ):
            await until(lambda: router.fleet["w"].ready and other.fleet["w"].ready)
            asked = tasks.create_task(http.post("/v1/chat/completions", json=ASK))
            await until(lambda: router.ledger.in_flight("w") > 0)
            told = RouterSignals(**(await signals_of(other_http)).model_dump())
            end_s = clock.now_s() + 5
            while not told.workers[0].in_flight and clock.now_s() < end_s:
                told = await signals_of(other_http)
            assert told.workers[0].in_flight
            asked.cancel()


def fleet_file(path, *endpoints, wake=None):
    spec = FleetSpec(workers=endpoints, **({} if wake is None else {"wake": wake}))
    path.write_text(spec.model_dump_json(exclude_unset=True))


def sleepy_router(tmp_path, key_file, fleet):
    return running_router(
        RouterSpec(
            port=0,
            model_name=MODEL,
            workers=(),
            fleet=fleet,
            call_key=key_file,
            load_interval=0.05,
            retry_window=0.0,
            thinking=False,
        )
    )


async def test_a_request_to_a_deployment_at_zero_waits_is_told_of_and_is_served_after_the_wake(
    tmp_path,
):
    key_file, fleet = call_key_file(tmp_path), tmp_path / "fleet.json"
    fleet_file(fleet, wake=20.0)
    async with (
        sleepy_router(tmp_path, key_file, fleet) as (url, router),
        aiohttp.ClientSession(url) as http,
        asyncio.TaskGroup() as tasks,
    ):
        await until(lambda: router.parking.asleep)
        async with http.get("/readyz") as answer:  # or the Service would send it nothing
            assert (answer.status, (await answer.json())["status"]) == (200, "asleep")

        async def ask():
            async with http.post("/v1/chat/completions", json=ASK) as answer:
                return answer.status, await answer.json()

        asked = tasks.create_task(ask())
        await until(lambda: router.parking.requests == 1)
        told = await signals_of(http)
        assert (told.parked_requests, told.fleet.waiting_requests) == (1, 1)
        assert told.parked_tokens > 10
        async with http.get("/metrics") as answer:
            assert "kimistack_router_parked_requests 1.0" in await answer.text()
        async with running_worker(Part("w", hello), key_file) as worker:
            fleet_file(fleet, worker.endpoint, wake=20.0)
            status, body = await asked
            assert status == 200, body
            told = await signals_of(http)
            assert told.parked_requests == 0
            assert not router.parking.asleep
            # the wake was no slow first token: it would look like a shortage
            assert told.fleet.ttft_p95_s < 5.0


async def test_a_request_that_nothing_wakes_for_is_refused_in_time_with_when_to_try_again(tmp_path):
    key_file, fleet = call_key_file(tmp_path), tmp_path / "fleet.json"
    fleet_file(fleet, wake=0.2)
    async with (
        sleepy_router(tmp_path, key_file, fleet) as (url, router),
        aiohttp.ClientSession(url) as http,
    ):
        await until(lambda: router.parking.asleep)
        async with http.post("/v1/chat/completions", json=ASK) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "10")
            assert "none got ready within" in (await answer.json())["error"]["message"]
        assert (await signals_of(http)).parked_requests == 0


async def test_a_client_that_leaves_waits_no_more(tmp_path):
    key_file, fleet = call_key_file(tmp_path), tmp_path / "fleet.json"
    fleet_file(fleet, wake=20.0)
    async with (
        sleepy_router(tmp_path, key_file, fleet) as (url, router),
        aiohttp.ClientSession(url) as http,
        asyncio.TaskGroup() as tasks,
    ):
        await until(lambda: router.parking.asleep)
        asked = tasks.create_task(http.post("/v1/chat/completions", json=ASK))
        await until(lambda: router.parking.requests == 1)
        asked.cancel()
        await until(lambda: router.parking.requests == 0)


async def test_without_somebody_to_wake_it_nothing_waits(tmp_path):
    key_file, fleet = call_key_file(tmp_path), tmp_path / "fleet.json"
    fleet_file(fleet)
    async with (
        sleepy_router(tmp_path, key_file, fleet) as (url, router),
        aiohttp.ClientSession(url) as http,
    ):
        async with http.get("/readyz") as answer:
            assert answer.status == 503
        async with http.post("/v1/chat/completions", json=ASK) as answer:
            assert answer.status == 503
            assert "no worker" in json.dumps(await answer.json())
        assert not router.parking.asleep
