"""Owners of hand-offs are told, by signed calls, off the critical path."""

import asyncio
import random

from aiohttp import web

from hash_engine import Setup, hash_engine, request
from kimi_runtime import auth, clock
from kimi_runtime.spec.request import KvPlan
from kimi_runtime.transfer.loopback import Fabric, LoopbackTransport

CALL_KEY = b"0" * 64


def prompt(size: int) -> list[int]:
    return random.Random(1).choices(range(500), k=size)


async def test_decode_releases_the_offer_with_a_signed_call():
    fabric = Fabric()
    released = asyncio.Event()

    async def release(call: web.Request) -> web.Response:
        auth.verify(
            [CALL_KEY],
            call.headers.get(auth.HEADER),
            "POST",
            call.path_qs,
            await call.read(),
            unix_s=clock.unix_s(),
        )
        assert await prefill.engine.release(call.match_info["ticket"])
        released.set()
        return web.Response()

    app = web.Application()
    app.router.add_post("/handoff/{ticket}/release", release)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    prefill_setup = Setup(
        transport=LoopbackTransport("p", fabric),
        release_url=lambda ticket: f"http://127.0.0.1:{port}/handoff/{ticket}/release",
    )
    decode_setup = Setup(transport=LoopbackTransport("d", fabric), call_key=CALL_KEY)
    async with hash_engine(prefill_setup) as prefill, hash_engine(decode_setup) as decode:
        offered = await prefill.generate(request(prompt(23), kv=KvPlan(offer=True)))
        await decode.generate(request(prompt(23), kv=KvPlan(take=offered.hand_off)))
        async with asyncio.timeout(5.0):
            await released.wait()
        prefill.assert_all_free()
        assert decode.engine.counters().release_failures == 0
    await runner.cleanup()


async def test_an_owner_that_is_gone_is_counted_and_disturbs_nobody():
    fabric = Fabric()
    prefill_setup = Setup(transport=LoopbackTransport("p", fabric))
    decode_setup = Setup(transport=LoopbackTransport("d", fabric), call_key=CALL_KEY)
    async with hash_engine(prefill_setup) as prefill, hash_engine(decode_setup) as decode:
        offered = await prefill.generate(request(prompt(23), kv=KvPlan(offer=True)))
        answer = await decode.generate(request(prompt(23), kv=KvPlan(take=offered.hand_off)))
        assert answer.usage.computed_tokens == 1
        async with asyncio.timeout(5.0):
            while not decode.engine.counters().release_failures:
                await asyncio.sleep(0.005)
