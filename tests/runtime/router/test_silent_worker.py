"""A worker whose host is gone: it neither answers nor resets, and the router leaves it at once."""

import asyncio

import aiohttp

from freezing_proxy import freezing
from kimi_runtime.engine.adapters.scripted import Pace
from kimi_runtime.engine.adapters.scripts import Reply
from kimi_runtime.spec.router import FleetSpec, RouterSpec, WorkerEndpoint
from kimi_runtime.spec.worker import Role
from scripted_stack import (
    MODEL,
    Part,
    call_key_file,
    ids_of,
    running_router,
    running_worker,
    until,
)

LEFT_WITHIN_S = 10.0
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello, " * 10}]}


def hello(request):
    return Reply(ids_of("Hello.<|im_end|>"))


async def test_a_worker_that_falls_silent_is_left_within_ten_seconds_and_its_requests_end(tmp_path):
    key_file = call_key_file(tmp_path)
    slow = Pace(output_ids_per_s=20.0, ids_per_chunk=1)
    async with (
        running_worker(Part("a", lambda _: Reply([9] * 4000), pace=slow), key_file) as going,
        running_worker(Part("b", hello), key_file) as staying,
        freezing(going.url) as proxy,
    ):
        lost = WorkerEndpoint(name="a", role=Role.BOTH, url=proxy.url)
        spec = RouterSpec(
            port=0,
            model_name=MODEL,
            workers=(lost,),
            call_key=key_file,
            thinking=False,
            fleet=tmp_path / "fleet.json",
        )
        (tmp_path / "fleet.json").write_text("{}")
        async with running_router(spec) as (url, router), aiohttp.ClientSession(url) as http:
            await until(lambda: router.readiness.obstacle is None)
            ask = {**ASK, "stream": True, "max_tokens": 3000}
            async with http.post("/v1/chat/completions", json=ask) as answer:
                assert answer.status == 200
                await answer.content.readany()
                proxy.freeze()
                fleet = FleetSpec(workers=(staying.endpoint,))
                (tmp_path / "fleet.json").write_text(fleet.model_dump_json(exclude_unset=True))
                await until(lambda: not router.fleet["a"].ready, within_s=LEFT_WITHIN_S)
                rest = await asyncio.wait_for(answer.content.read(), LEFT_WITHIN_S)
                assert b"event: error" in rest
            await until(lambda: router.fleet["b"].ready)
            for _ in range(3):
                async with http.post("/v1/chat/completions", json=ASK) as answer:
                    assert answer.status == 200
            told = {one.name: one for one in router.signals().workers}
            assert (told["a"].ready, told["b"].ready) == (False, True)
            silent_s = told["a"].silent_s
            await until(lambda: router.signals().workers[0].silent_s > silent_s)
            proxy.thaw()
            await until(lambda: router.fleet["a"].ready)
