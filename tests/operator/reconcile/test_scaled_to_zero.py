"""Mode Managed from end to end: a real router, asked over HTTP, and the operator that asks it."""

import asyncio
import contextlib
import json
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

import aiohttp
import pytest

from kimi_operator.clock import now_s
from kimi_operator.observed import ObjectKey
from kimi_operator.routers import Routers
from kimi_runtime.engine.adapters.scripts import Reply
from kimi_runtime.spec.router import FleetSpec, RouterSpec, WorkerEndpoint
from operator_world import KEY, World, nano
from router_words import router_pod
from scripted_stack import (
    MODEL,
    Part,
    call_key_file,
    ids_of,
    running_router,
    running_worker,
    until,
)

ASK = {"model": MODEL, "messages": [{"role": "user", "content": "hello " * 20}]}
SCALING = {
    "mode": "Managed",
    "min": 0,
    "max": 2,
    "scaleDownDelay": "60s",
    "minReadyBeforeScaleDown": "0s",
}


class Cluster:
    """FakeKube, an operator that asks real routers, and real workers where it wants instances."""

    def __init__(self, folder, http, owned):
        self.world, self.folder, self.owned = World(), folder, owned
        self.key_file, self.fleet = call_key_file(folder), folder / "fleet.json"
        self.workers = {}
        self.woken = []
        self.routers = Routers(http, self.world.reconciler.cache, self.woken.append, now_s)
        self.world.reconciler.loads = self.routers

    async def sync(self):
        """What kubelets do: the file that the operator wrote, and a worker for each in it."""
        at = ObjectKey("v1", "ConfigMap", "llm", "nano-router")
        spec = FleetSpec.model_validate_json(self.world.kube.objects[at]["data"]["fleet.json"])
        endpoints = []
        for one in spec.workers:
            if one.name not in self.workers:
                part = Part(one.name, lambda _: Reply(ids_of("Hello.<|im_end|>")), one.role)
                self.workers[one.name] = await self.owned.enter_async_context(
                    running_worker(part, self.key_file)
                )
            url = self.workers[one.name].url
            endpoints.append(WorkerEndpoint(name=one.name, role=one.role, url=url))
        local = spec.model_copy(update={"workers": tuple(endpoints), "pools": ()})
        self.fleet.write_text(local.model_dump_json(exclude_none=True))
        return spec

    async def step(self, seconds=15.0):
        """A pass when the planner wants one, and what controllers and kubelets make of it."""
        self.world.now_s += seconds
        await self.world.passes()
        self.world.controllers.settle()
        return await self.sync()

    @property
    def replicas(self):
        return {w["spec"]["role"]: w["spec"]["replicas"] for w in self.of("KimiWorkers")}

    def of(self, kind):
        return self.world.kube.of_kind(kind)


@asynccontextmanager
async def cluster_at_work(tmp_path):
    async with AsyncExitStack() as owned, aiohttp.ClientSession() as http:
        cluster = Cluster(tmp_path, http, owned)
        document = nano()
        document["spec"] |= {"prefill": {"scaling": SCALING}, "decode": {"scaling": SCALING}}
        cluster.world.create(document)
        await cluster.step()
        router = RouterSpec(
            port=0,
            model_name=MODEL,
            workers=(),
            fleet=cluster.fleet,
            call_key=cluster.key_file,
            load_interval=0.05,
            thinking=False,
        )
        url, running = await owned.enter_async_context(running_router(router))
        port = urlsplit(url).port
        pod = router_pod("nano-router-1", on="node-1", address="127.0.0.1", port=port)
        cluster.world.kube.put(pod, "deployment-controller")
        cluster.url, cluster.router = url, running
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(cluster.routers.run())
            try:
                yield cluster
            finally:
                asking.cancel()


async def heard_anew(cluster):
    """Until the router was asked again: at least a second while something is due."""
    state = cluster.routers._deployments[KEY]
    await until(lambda: not state.asking)
    before = max((told.at_s for told in state.told.values()), default=0.0)
    state.due_s = 0.0
    await until(lambda: any(told.at_s > before for told in state.told.values()))


async def test_what_is_idle_goes_to_zero_and_a_request_wakes_it_and_is_answered(tmp_path):
    async with cluster_at_work(tmp_path) as cluster, aiohttp.ClientSession(cluster.url) as http:
        world = cluster.world
        await until(lambda: cluster.router.readiness.obstacle is None)
        async with http.post("/v1/chat/completions", json=ASK) as answer:
            assert answer.status == 200
        for _ in range(12):
            await heard_anew(cluster)
            spec = await cluster.step(30.0)
            if not spec.workers and not cluster.of("StatefulSet"):
                break
        assert cluster.replicas == {"prefill": 0, "decode": 0}
        assert cluster.of("StatefulSet") == []
        assert world.conditions["ScalingReady"] == ("True", "Scaling")
        await until(lambda: cluster.router.parking.asleep)
        await heard_anew(cluster)
        cluster.woken.clear()
        async with asyncio.TaskGroup() as tasks:

            async def ask():
                async with http.post("/v1/chat/completions", json=ASK) as answer:
                    return answer.status, await answer.text()

            asked = tasks.create_task(ask())
            # without any event of the API server
            await until(lambda: cluster.routers._deployments[KEY].news.asked_at_zero)
            assert KEY in cluster.woken
            assert not asked.done()
            await cluster.step(1.0)
            await cluster.step(1.0)
            assert cluster.replicas == {"prefill": 1, "decode": 1}
            status, text = await asked
        assert status == 200, text
        assert json.loads(text)["choices"][0]["message"]["content"] == "Hello."


async def test_without_routers_that_answer_the_counts_stay_and_the_condition_says_so(tmp_path):
    async with cluster_at_work(tmp_path) as cluster:
        await until(lambda: cluster.router.readiness.obstacle is None)
        await heard_anew(cluster)
        await cluster.step()
        assert cluster.world.conditions["ScalingReady"] == ("True", "Scaling")
        at = ObjectKey("v1", "Pod", "llm", "nano-router-1")
        cluster.world.kube.edit(at, {"status": {"podIP": "127.0.0.9"}}, subresource="status")
        cluster.routers._deployments[KEY].told.clear()
        before = cluster.replicas
        await cluster.step()
        assert cluster.world.conditions["ScalingReady"] == ("False", "MetricsStale")
        assert cluster.replicas == before


async def test_quiet_polling_asks_the_api_server_nothing_and_wakes_nobody(tmp_path):
    async with cluster_at_work(tmp_path) as cluster:
        await until(lambda: cluster.router.readiness.obstacle is None)
        await heard_anew(cluster)
        await cluster.step()
        await heard_anew(cluster)
        cluster.woken.clear()
        calls = len(cluster.world.kube.calls)
        for _ in range(3):
            await heard_anew(cluster)
        assert cluster.woken == []
        assert len(cluster.world.kube.calls) == calls


@asynccontextmanager
async def socket_that(answers):
    """A port whose connections `answers(reader, writer)` serves; all closed at the end."""
    stop, busy = asyncio.Event(), set()

    async def served(reader, writer):
        busy.add(asyncio.current_task())
        try:
            await answers(reader, writer, stop)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            busy.discard(asyncio.current_task())

    server = await asyncio.start_server(served, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        stop.set()
        server.close()
        await until(lambda: not busy)


async def test_a_router_that_never_answers_slows_no_pass_and_no_other_router(tmp_path):
    async def silent(reader, writer, stop):
        await stop.wait()

    async with socket_that(silent) as port, cluster_at_work(tmp_path) as cluster:
        dead = router_pod("nano-router-2", on="node-1", address="127.0.0.1", port=port)
        cluster.world.kube.put(dead, "deployment-controller")
        await heard_anew(cluster)
        state = cluster.routers._deployments[KEY]
        assert {told.pod.name for told in state.told.values()} == {"nano-router-1"}
        # a pass reads what there is: nothing in it can wait
        assert not asyncio.iscoroutinefunction(cluster.routers.read)
        await until(lambda: not state.asking)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"router": 1}', b"x" * (2**20 + 10)],
    ids=["empty", "cut", "list", "other", "huge"],
)
async def test_an_answer_that_is_no_document_is_no_answer(tmp_path, body):
    async def answers(reader, writer, stop):
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        with contextlib.suppress(ConnectionError):
            writer.write(head.encode() + body)
            await writer.drain()

    async with socket_that(answers) as port, aiohttp.ClientSession() as http:
        world = World()
        world.create(nano())
        routers = Routers(http, world.reconciler.cache, lambda key: None, now_s)
        pod = router_pod("nano-router-1", address="127.0.0.1", port=port)
        world.kube.put(pod, "deployment-controller")
        state = routers._state(KEY, 0.0)
        await routers._ask(KEY, state)
        assert state.told == {}
        assert routers.read(KEY, world.reconciler.cache.children(KEY)).answers == ()
