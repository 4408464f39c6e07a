"""A router, a prefill and a decode worker over real sockets, which hand KV over while computing."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from hash_engine import Running, Setup, hash_engine
from kimi_runtime.auth import read_call_keys
from kimi_runtime.engine.plan import StepPlan
from kimi_runtime.server.serve import bind, listening
from kimi_runtime.server.worker_app import serving, worker_app
from kimi_runtime.spec.router import RouterSpec, WorkerEndpoint
from kimi_runtime.spec.worker import Role
from kimi_runtime.transfer.loopback import Fabric, LoopbackTransport
from scripted_stack import CALL_KEY, MODEL, call_key_file, running_router

CHAT = "/v1/chat/completions"


@dataclass
class Stack:
    url: str
    prefill: Running
    decode: Running
    go_on: threading.Semaphore

    async def asked(self, http: aiohttp.ClientSession, text: str) -> dict:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_completion_tokens": 4,
            "temperature": 0,
        }
        async with http.post(f"{self.url}{CHAT}", json=body) as answer:
            assert answer.status == 200, await answer.text()
            told: dict = await answer.json()
            return told

    async def settled(self) -> None:
        async with asyncio.timeout(10.0):
            for side in (self.prefill, self.decode):
                while side.engine.load().free_blocks < side.setup.blocks:
                    await asyncio.sleep(0.005)
        self.prefill.assert_all_free()
        self.decode.assert_all_free()


@contextlib.asynccontextmanager
async def stack(folder: Path) -> AsyncIterator[Stack]:
    """The prefill engine takes a step of a prompt of more than 8 tokens when it is let."""
    key, fabric, go_on = call_key_file(folder), Fabric(), threading.Semaphore(0)

    def before_step(plan: StepPlan) -> None:
        if any(len(row.ids) == 8 or row.start for row in plan.rows):
            assert go_on.acquire(timeout=20)

    async with contextlib.AsyncExitStack() as owned:
        owned.callback(go_on.release, 1000)
        sides = []
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
            listener = owned.enter_context(bind("127.0.0.1", 0))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/handoff"
            setup = Setup(
                name=name,
                role=role,
                transport=LoopbackTransport(name, fabric),
                call_key=CALL_KEY.encode(),
                step_tokens=8 if name == "p" else 128,
                release_url=lambda ticket, url=url: f"{url}/{ticket}/release",
                progress_url=lambda ticket, url=url: f"{url}/{ticket}/progress",
                before_step=before_step if name == "p" else lambda plan: None,
            )
            side = await owned.enter_async_context(hash_engine(setup))
            server = await owned.enter_async_context(serving(side.engine, read_call_keys(key)))
            at = await owned.enter_async_context(listening(worker_app(server), listener))
            owned.push_async_callback(server.drain, within_s=0.0)
            sides.append((side, WorkerEndpoint(name=name, role=role, url=at)))
        spec = RouterSpec(
            port=0,
            model_name=MODEL,
            workers=tuple(endpoint for _, endpoint in sides),
            call_key=key,
            thinking=False,
            load_interval=0.05,
            request_deadline=20.0,
            retry_window=10.0,
        )
        router_url, _ = await owned.enter_async_context(running_router(spec))
        go_on.release(1000)
        async with aiohttp.ClientSession() as http, asyncio.timeout(20.0):
            while (await http.get(f"{router_url}/readyz")).status != 200:  # by a whole generation
                await asyncio.sleep(0.02)
        while go_on.acquire(blocking=False):
            pass
        yield Stack(router_url, sides[0][0], sides[1][0], go_on)


async def test_decode_has_most_of_the_prompt_when_prefill_ends(tmp_path: Path):
    async with stack(tmp_path) as one, aiohttp.ClientSession() as http:
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(one.asked(http, "a question of some length " * 3))
            async with asyncio.timeout(20.0):
                while not one.decode.engine.load().waiting:  # it follows, and prefill has begun
                    await asyncio.sleep(0.005)
            assert one.prefill.engine.load().in_flight
            one.go_on.release(1000)
        assert asking.result()["choices"][0]["finish_reason"] == "length"
        counters = one.decode.engine.counters()
        assert counters.hand_off_failures == {}
        # the last token of each prompt, and the worker's own readiness probe of three
        assert counters.prompt_tokens["computed"] == counters.hand_offs_taken + 3
        assert counters.hand_off_early_bytes > 0
        assert asking.result()["usage"]["completion_tokens"] == 4
        await one.settled()


@pytest.mark.parametrize("steps", [0, 1, 3])
async def test_a_client_that_leaves_ends_both_legs(tmp_path: Path, steps: int):
    async with stack(tmp_path) as one, aiohttp.ClientSession() as http:
        asking = asyncio.ensure_future(one.asked(http, "a question of some length " * 3))
        async with asyncio.timeout(20.0):
            while not one.decode.engine.load().waiting:
                await asyncio.sleep(0.005)
        for _ in range(steps):
            one.go_on.release()
        asking.cancel()
        await asyncio.wait([asking])
        async with asyncio.timeout(10.0):
            while one.prefill.engine.load().in_flight or one.decode.engine.load().in_flight:
                await asyncio.sleep(0.005)
        one.go_on.release(1000)
        await one.settled()


async def test_a_prefill_that_breaks_midway_costs_only_time(tmp_path: Path):
    async with stack(tmp_path) as one, aiohttp.ClientSession() as http:
        asking = asyncio.ensure_future(one.asked(http, "a question of some length " * 3))
        async with asyncio.timeout(20.0):
            while not one.decode.engine.load().waiting:
                await asyncio.sleep(0.005)
        one.go_on.release(1)
        await one.prefill.engine.drain(within_s=0.0)
        one.go_on.release(1000)
        assert (await asking)["choices"][0]["finish_reason"] == "length"
        assert one.decode.engine.counters().hand_off_failures.total() == 1
        await one.settled()
