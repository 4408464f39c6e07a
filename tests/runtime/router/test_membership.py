"""Workers that come and go while a router runs."""

import json
from pathlib import Path

import aiohttp
import pytest

from kimi_runtime.engine.adapters.scripts import Reply
from kimi_runtime.spec.router import PoolEndpoint, RouterSpec
from scripted_stack import MODEL, Part, call_key_file, ids_of, running_router, running_worker, until

HELLO = ids_of("Hello.<|im_end|>")
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}]}


def hello(request):
    return Reply(HELLO)


def write(path: Path, workers, pools=()):
    data = {
        "workers": [one.endpoint.model_dump(mode="json") for one in workers],
        "pools": [one.model_dump(mode="json") for one in pools],
    }
    new = path.with_suffix(".new")
    new.write_text(json.dumps(data))
    new.rename(path)


def spec_of(folder: Path, **options):
    return RouterSpec(
        port=0,
        model_name=MODEL,
        workers=(),
        fleet=folder / "fleet.json",
        call_key=call_key_file(folder),
        load_interval=0.02,
        thinking=False,
        **({"request_deadline": 20.0, "retry_window": 0.0} | options),
    )


def planned(router):
    return {m.name for m in router.fleet.members if m.ready and m.left_s is None}


async def test_a_worker_that_is_added_serves_and_one_that_is_removed_gets_nothing(tmp_path):
    spec = spec_of(tmp_path)
    async with (
        running_worker(Part("a", hello), spec.call_key) as a,
        running_worker(Part("b", hello), spec.call_key) as b,
        running_router(spec) as (url, router),
        aiohttp.ClientSession() as http,
    ):
        # without a file the router waits
        assert router.fleet.members == []
        write(spec.fleet, [a])
        await until(lambda: planned(router) == {"a"})
        write(spec.fleet, [a, b])
        await until(lambda: planned(router) == {"a", "b"})
        write(spec.fleet, [b])
        await until(lambda: planned(router) == {"b"})
        before = a.adapter.counters().steps
        async with http.post(f"{url}/v1/chat/completions", json=ASK) as answer:
            assert answer.status == 200
        assert a.adapter.counters().steps == before
        write(spec.fleet, [a, b])
        await until(lambda: planned(router) == {"a", "b"})


async def test_a_worker_that_left_is_forgotten_once_nothing_can_need_it(tmp_path):
    spec = spec_of(tmp_path, request_deadline=0.2)
    async with (
        running_worker(Part("a", hello), spec.call_key) as a,
        running_worker(Part("b", hello), spec.call_key) as b,
        running_router(spec) as (_, router),
    ):
        write(spec.fleet, [a, b])
        await until(lambda: planned(router) == {"a", "b"})
        write(spec.fleet, [b])
        await until(lambda: [m.name for m in router.fleet.members] == ["b"])
        assert set(router.feeds.owners) == {"b"}


@pytest.mark.parametrize("text", ["{", '{"workers": [{"name": "x"}]}', '{"strangers": []}', None])
async def test_a_file_that_is_no_fleet_changes_nothing(tmp_path, caplog, text):
    spec = spec_of(tmp_path)
    async with (
        running_worker(Part("a", hello), spec.call_key) as a,
        running_router(spec) as (
            _,
            router,
        ),
    ):
        write(spec.fleet, [a])
        await until(lambda: planned(router) == {"a"})
        if text is None:
            spec.fleet.unlink()
        else:
            spec.fleet.write_text(text)
        caplog.clear()
        await until(lambda: "fleet unchanged" in caplog.text)
        assert planned(router) == {"a"}


async def test_pools_are_followed_where_they_are_now(tmp_path):
    spec = spec_of(tmp_path)
    async with (
        running_worker(Part("a", hello), spec.call_key) as a,
        running_router(spec) as (_, router),
    ):
        write(spec.fleet, [a], [PoolEndpoint(name="node-1", url="http://127.0.0.1:1")])
        await until(lambda: "node-1" in router.feeds.owners)
        # any feed will do: a worker's is one
        write(spec.fleet, [a], [PoolEndpoint(name="node-1", url=a.url)])
        await until(lambda: router.feeds.states()["node-1"].name == "EXACT")
        write(spec.fleet, [a])
        await until(lambda: set(router.feeds.owners) == {"a"})
