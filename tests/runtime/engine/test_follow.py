"""Following a hand-off over real HTTP when its owner ends."""

import asyncio

import pytest
from aiohttp import web

from kimi_runtime.engine.follow import HttpProgress, followed
from kimi_runtime.errors import RegionGone
from kimi_runtime.spec.request import HandOff, HandOffProgress, RegionRef

REGION = RegionRef(transport="tcp", peer="p", address="p:1", key=1, size_bytes=1, epoch=7)
LONG_S = 3600.0


async def test_an_owner_whose_process_has_ended_is_not_waited_for():
    async def progress(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(HandOffProgress(epoch=7, first=0).model_dump_json().encode() + b"\n")
        return answer

    app = web.Application()
    app.router.add_get("/progress", progress)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/progress"
    take = HandOff(
        ticket="t",
        worker="p",
        release_url=url,
        layout="l",
        region=REGION,
        tokens=1,
        blocks=(),
        lease_s=1.0,
        progress_url=url,
    )
    source = HttpProgress(b"k" * 32, silence_s=LONG_S)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(source.run())
        await asyncio.sleep(0)
        lines = followed(source, take, silence_s=LONG_S)
        assert (await anext(lines)).parts == ()
        await runner.cleanup()
        with pytest.raises(RegionGone, match="nobody listens"):
            _ = [line async for line in lines]
        running.cancel()
