"""Real operator processes behind a proxy that fails: in front of a fake API server, and a real one.

The same promises hold for all faults: the same objects in the end, nothing written twice for ever,
never two writers, and no more requests than a bounded number a second.
"""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from cluster import Cluster
from fakekube import FakeKube
from fault_proxy import Answer, FaultProxy, Passed, Schedule, Stall, kubeconfig, sound
from http_kube import HttpKube
from kimi_operator.api.base import API_VERSION
from kimi_operator.clock import now_s
from kimi_operator.kinds import watched_kinds
from kimi_operator.kube import ApiKube, TokenBucket, open_kube
from kimi_operator.observed import Manifest, ObjectKey
from operator_process import OperatorProcess, kept_running
from operator_world import nano

pytestmark = pytest.mark.asyncio
NAMESPACE = "faults"
KEY = ObjectKey(API_VERSION, "KimiDeployment", NAMESPACE, "nano")
SOON_S = 150.0
QUIET_S = 1.5
MOST_REQUESTS_A_SECOND = 80.0
SERVERS = [pytest.param("fake"), pytest.param("api", marks=pytest.mark.cluster)]


@dataclass
class Site:
    """An API server with one deployment asked for, and what there is when it is settled."""

    url: str
    kube: ApiKube
    folder: Path
    operators: list[OperatorProcess] = field(default_factory=list)

    def operator(self, url: str, identity: str = "one", **options: float) -> OperatorProcess:
        """An operator that knows the server by this address."""
        config = kubeconfig(self.folder / f"{identity}.yaml", url)
        found = OperatorProcess(
            config, NAMESPACE, identity, self.folder / f"{identity}.log", **options
        )
        self.operators.append(found)
        return found

    async def children(self) -> set[ObjectKey]:
        """Everything that carries the deployment's label, but pods."""
        found: set[ObjectKey] = set()
        served = await self.kube.capabilities()
        for kind in watched_kinds(served):
            if kind.kind != "Pod":
                listed = await self.kube.list(kind.id, NAMESPACE, "kimistack.dev/deployment=nano")
                found |= {ObjectKey.of(manifest) for manifest in listed}
        return found

    async def applied(self) -> bool:
        """Whether a pass went through to its status."""
        resource = await self.kube.get(KEY)
        return "pools" in ((resource or {}).get("status") or {})

    async def call_key(self) -> str:
        """The one secret there is."""
        secret = await self.kube.get(ObjectKey("v1", "Secret", NAMESPACE, "nano-call-key"))
        assert secret is not None
        return json.dumps(secret.get("stringData") or secret["data"])


async def holds(what: Callable[[], Awaitable[bool]], name: str) -> None:
    """Ask until it holds; an API call between two looks is the pause."""
    deadline_s = now_s() + SOON_S
    while not await what():
        assert now_s() < deadline_s, f"not within {SOON_S}s: {name}"
        await asyncio.wait({asyncio.ensure_future(asyncio.Event().wait())}, timeout=0.1)


async def settled(site: Site, proxy: FaultProxy) -> None:
    """Until a pass went through and nothing has been written for a while."""
    await holds(site.applied, "a status with pools")
    await proxy.quiet(QUIET_S, within_s=SOON_S)


@pytest.fixture(params=SERVERS)
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    if request.param == "fake":
        async with HttpKube(FakeKube()).served() as url, opened(url, tmp_path) as site:
            yield site
        return
    cluster: Cluster = request.getfixturevalue("cluster")
    cluster.main.install_crds()
    cluster.main.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    async with opened(cluster.main.url, tmp_path) as site:
        yield site
        await removed(site)


@asynccontextmanager
async def opened(url: str, folder: Path) -> AsyncIterator[Site]:
    async with FaultProxy(url).running() as plain:
        config = kubeconfig(folder / "direct.yaml", plain)
        writes = TokenBucket(1000, 1000, now_s, asyncio.sleep)
        async with open_kube(writes, kubeconfig=str(config)) as kube:
            await kube.create(document())
            site = Site(url, kube, folder)
            try:
                yield site
            finally:
                for operator in site.operators:
                    await operator.aclose()


async def removed(site: Site) -> None:
    """Nothing is left for the next test."""
    resource = await site.kube.get(KEY)
    if resource is not None:
        await site.kube.delete(KEY, uid=resource["metadata"]["uid"])
        await site.kube.merge(KEY, {"metadata": {"finalizers": None}})
    for name in ("nano-call-key",):
        key = ObjectKey("v1", "Secret", NAMESPACE, name)
        secret = await site.kube.get(key)
        if secret is not None:
            await site.kube.delete(key, uid=secret["metadata"]["uid"])

    async def gone() -> bool:
        return not await site.children() and await site.kube.get(KEY) is None

    await holds(gone, "nothing is left")


def document() -> Manifest:
    found = nano()
    found["metadata"] = {"name": "nano", "namespace": NAMESPACE}
    return found


async def test_through_a_storm_of_faults_it_ends_at_the_same_objects(site: Site):
    proxy = FaultProxy(site.url, Schedule(seed=1))
    async with proxy.running() as url, kept_running(site.operator(url)) as operator:
        began_s = now_s()
        await settled(site, proxy)
        took_s = now_s() - began_s
        assert proxy.faults.total() > 10, "the storm took place"
        assert proxy.count(began_s, now_s()) < MOST_REQUESTS_A_SECOND * took_s + 100
        found = await site.children()
        proxy.fault = sound
        starts, since = operator.starts, now_s()
        operator.signalled(signal.SIGKILL)

        async def passed_anew() -> bool:
            return operator.starts > starts and await passes(operator) > 0

        await holds(passed_anew, "a pass of the next process")
        await proxy.quiet(QUIET_S, within_s=SOON_S)
        assert await site.children() == found
        assert proxy.writes(since) == [], "a start without faults finds all as it is to be"
    assert no_secrets(operator.log, await site.call_key())


async def passes(operator: OperatorProcess) -> int:
    """How many passes it says it has made; none while it does not answer."""
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{operator.port}/metrics") as answer,
        ):
            lines = (await answer.text()).splitlines()
    except aiohttp.ClientError:
        return 0
    return sum('pass_seconds_count{outcome="ok"}' in line for line in lines)


def no_secrets(log: Path, call_key: str) -> bool:
    """Whether every line is JSON, and none has the call key or the token in it."""
    values = [v.strip() for v in json.loads(call_key).values()]
    for line in log.read_text().splitlines():
        assert isinstance(json.loads(line), dict)
        assert not any(value in line for value in values)
        assert "admin-token" not in line
    return True


async def test_killed_after_every_few_writes_the_next_start_goes_on_to_the_same_end(site: Site):
    proxy = FaultProxy(site.url)
    operator = site.operator("")
    killed = 0

    async def kill(passed: Passed) -> None:
        nonlocal killed
        if passed.write % 8 == 0 and passed.write < 30:
            killed += 1
            operator.signalled(signal.SIGKILL)

    proxy.after_write = kill
    async with proxy.running() as url:
        kubeconfig(operator.kubeconfig, url)
        async with kept_running(operator):
            await settled(site, proxy)
            found = await site.children()
    assert killed >= 3
    assert operator.starts == killed + 1, "it ends by being killed alone"
    assert len({key.name for key in found if key.kind == "StatefulSet"}) == 2


async def test_one_that_was_stopped_past_its_lease_never_writes_beside_the_next(site: Site):
    first_proxy, second_proxy = FaultProxy(site.url), FaultProxy(site.url)
    async with first_proxy.running() as one, second_proxy.running() as two:
        first, second = site.operator(one, "first"), site.operator(two, "second")
        await first.start()
        await first_proxy.wrote(5, within_s=SOON_S)  # in the middle of its first pass
        first.signalled(signal.SIGSTOP)
        await second.start()
        await second_proxy.wrote(1, within_s=SOON_S)
        taken_s = second_proxy.writes()[0].at_s
        first.signalled(signal.SIGCONT)
        async with asyncio.timeout(SOON_S):
            assert await first.ended() == 1, "it ends, to begin as a candidate"
        assert first_proxy.writes(taken_s) == []
        await settled(site, second_proxy)


async def test_one_cut_off_from_the_server_ends_before_the_next_begins(site: Site):
    first_proxy, second_proxy = FaultProxy(site.url), FaultProxy(site.url)
    async with first_proxy.running() as one, second_proxy.running() as two:
        first, second = site.operator(one, "first"), site.operator(two, "second")
        await first.start()
        await first_proxy.wrote(5, within_s=SOON_S)
        first_proxy.fault = lambda _: Stall()
        cut_s = now_s()
        await second.start()
        async with asyncio.timeout(SOON_S):
            assert await first.ended() == 1
        await second_proxy.wrote(1, within_s=SOON_S)
        last_s = max((p.at_s for p in first_proxy.writes()), default=cut_s)
        assert second_proxy.writes()[0].at_s > last_s
        await settled(site, second_proxy)


async def test_a_child_that_is_refused_for_ever_is_not_tried_for_ever(site: Site):
    def refused(passed: Passed) -> Answer | None:
        wanted = passed.method == "PATCH" and passed.path.endswith("/services/nano-router")
        return Answer(422) if wanted else None

    proxy = FaultProxy(site.url, refused)
    async with proxy.running() as url, kept_running(site.operator(url)) as operator:
        await settled(site, proxy)
        resource = await site.kube.get(KEY)
        assert resource is not None
        stalled = {c["type"]: c for c in resource["status"]["conditions"]}["Stalled"]
        assert (stalled["status"], stalled["reason"]) == ("True", "Rejected")
        since_s = now_s()
        await proxy.quiet(QUIET_S, within_s=SOON_S)
        assert proxy.count(since_s, now_s()) < 20
        async with aiohttp.ClientSession() as session:
            for probe in ("healthz", "readyz"):
                async with session.get(f"http://127.0.0.1:{operator.port}/{probe}") as answer:
                    assert (answer.status, await answer.text()) == (200, "ok")
