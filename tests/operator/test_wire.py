"""Writes end with leadership; a watch that tells nothing is noticed; what cannot be changed."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fakekube import FakeKube
from fault_proxy import Answer, FaultProxy, Watch, kubeconfig
from http_kube import HttpKube
from kimi_operator.cache import Cache, Key
from kimi_operator.clock import now_s
from kimi_operator.kinds import BY_ID
from kimi_operator.kube import TokenBucket, open_kube
from kimi_operator.observed import Manifest, ObjectKey
from kimi_operator.reflect import Reflector
from kimi_operator.relist import DEAF_S, RELIST_S, SILENT_S, Relist
from kimi_operator.repairs import (
    FREE_REPAIRS,
    MOST_PAUSE_S,
    Repairs,
    cannot_change,
    may_replace,
    rivals,
)
from kimi_operator.wire import Tenure, Watches
from kimi_runtime.errors import ClusterBusy, ClusterRefused

SERVICES = BY_ID["v1/Service"]
OWNER = {"kimistack.dev/deployment": "nano"}
NANO = Key("llm", "nano")


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def service(name: str, **spec: str) -> Manifest:
    metadata = {"name": name, "namespace": "llm", "labels": OWNER}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


@pytest.fixture
async def server() -> AsyncIterator[tuple[HttpKube, FaultProxy, str]]:
    http = HttpKube(FakeKube())
    async with http.served() as upstream:
        proxy = FaultProxy(upstream)
        async with proxy.running() as url:
            yield http, proxy, url


def writes() -> TokenBucket:
    return TokenBucket(1000, 1000, now_s, asyncio.sleep)


async def test_no_write_leaves_the_process_once_the_tenure_is_over(
    server: tuple[HttpKube, FaultProxy, str], tmp_path: Path
):
    _, proxy, url = server
    tenure = Tenure(clock := Clock(), until_s=110.0, late_s=4.0)
    config = str(kubeconfig(tmp_path / "k.yaml", url))
    async with open_kube(writes(), kubeconfig=config, tenure=tenure) as kube:
        await kube.apply(service("before"))
        clock.now_s = 110.0
        for write in (
            kube.apply(service("after")),
            kube.create(service("after")),
            kube.merge(ObjectKey.of(service("before")), {"spec": {"a": "b"}}),
            kube.delete(ObjectKey.of(service("before")), uid="u"),
        ):
            with pytest.raises(ClusterBusy, match="leads no longer"):
                await write
        assert await kube.get(ObjectKey.of(service("before"))) is not None, "reads go on"
    assert len(proxy.writes()) == 1


async def test_a_silent_watch_is_asked_for_anew(
    server: tuple[HttpKube, FaultProxy, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    http, proxy, url = server
    monkeypatch.setattr("kimi_operator.kube.SILENT_S", 0.3)
    silent = itertools.chain([Watch("silent"), Watch("silent")], itertools.repeat(None))
    proxy.fault = lambda passed: next(silent) if passed.watches else None
    cache = Cache()
    told = asyncio.Event()
    async with (
        open_kube(writes(), kubeconfig=str(kubeconfig(tmp_path / "k.yaml", url))) as kube,
        asyncio.TaskGroup() as tasks,
    ):
        reflector = Reflector(kube, cache, SERVICES, "llm", "", lambda _: told.set())
        keeper = tasks.create_task(reflector.keep())
        async with asyncio.timeout(20):
            await reflector.listed.wait()
            http.kube.put(service("new"), "somebody")
            await told.wait()
        keeper.cancel()
    assert [key.name for key in cache.children(NANO)] == ["new"]
    assert sum(passed.watches for passed in proxy.passed) == 3


@pytest.mark.parametrize("how", ["gone", "jumbled", "broken"])
async def test_a_watch_that_goes_wrong_loses_nothing(
    server: tuple[HttpKube, FaultProxy, str], tmp_path: Path, how: str
):
    http, proxy, url = server
    wrong = itertools.chain([Watch(how)] * 2, itertools.repeat(None))  # type: ignore[arg-type]
    proxy.fault = lambda passed: next(wrong) if passed.watches else None
    cache = Cache()
    heard = asyncio.Event()

    async def no_wait(_: float) -> None:
        return

    async with (
        open_kube(writes(), kubeconfig=str(kubeconfig(tmp_path / "k.yaml", url))) as kube,
        asyncio.TaskGroup() as tasks,
    ):
        reflector = Reflector(
            kube, cache, SERVICES, "llm", "", lambda _: heard.set(), sleep=no_wait
        )
        keeper = tasks.create_task(reflector.keep())
        async with asyncio.timeout(20):
            await reflector.listed.wait()
            for number in range(6):
                http.kube.put(service(f"s{number}"), "somebody")
            http.kube.remove(ObjectKey.of(service("s0")))
            http.kube.put(service("s1", last="word"), "somebody")
            while not _as_served(cache, http):
                heard.clear()
                await heard.wait()
        keeper.cancel()


def _as_served(cache: Cache, http: HttpKube) -> bool:
    return cache.children(NANO) == {ObjectKey.of(o): o for o in http.kube.of_kind("Service")}


async def test_pages_that_run_out_of_date_are_asked_for_at_once(
    server: tuple[HttpKube, FaultProxy, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    http, proxy, url = server
    monkeypatch.setattr("kimi_operator.kube.PAGE", 2)
    for number in range(5):
        http.kube.put(service(f"s{number}"), "somebody")
    async with open_kube(writes(), kubeconfig=str(kubeconfig(tmp_path / "k.yaml", url))) as kube:
        assert len(await kube.list("v1/Service", "llm")) == 5
        assert len(proxy.passed) == 3
        proxy.fault = lambda passed: Answer(410) if "continue" in passed.query else None
        assert len(await kube.list("v1/Service", "llm")) == 5


@dataclass
class Lister(FakeKube):
    """Has what no watch tells."""

    found: list[Manifest] = field(default_factory=list)
    listings: int = 0

    async def list(self, kind: str, namespace: str | None, labels: str = "") -> list[Manifest]:
        self.listings += 1
        return self.found


def relist(kube: FakeKube, clock: Clock, watches: Watches, missed: list[Key]) -> Relist:
    return Relist(kube, Cache(), watches, [SERVICES], ["llm"], "", clock, missed.append)


def seen(name: str, version: str = "1") -> Manifest:
    found = service(name)
    found["metadata"] |= {"uid": f"uid-{name}", "resourceVersion": version}
    return found


async def test_a_watch_that_tells_nothing_while_a_listing_does_is_deaf():
    kube, clock, missed = Lister(), Clock(), []
    watches = Watches(clock)
    listing = relist(kube, clock, watches, missed)
    path = "/prefix/api/v1/namespaces/llm/services"
    watches.opened(path)
    clock.now_s += SILENT_S + 1
    kube.found = [seen("new")]
    assert not await listing.once()
    assert missed == [NANO]
    assert listing.deaf is None, "it may be late"
    clock.now_s += DEAF_S + 1
    assert listing.deaf == "the watch of services in llm has told nothing for 332s"
    watches.heard(path)
    assert listing.deaf is None


async def test_a_watch_that_only_has_nothing_to_tell_is_not_deaf():
    kube, clock, missed = Lister(), Clock(), []
    watches = Watches(clock)
    listing = relist(kube, clock, watches, missed)
    watches.opened("/api/v1/namespaces/llm/services")
    for _ in range(30):
        clock.now_s += 15
        await listing.once()
        assert listing.deaf is None
    assert kube.listings == 1, "a silent watch is looked after rarely"
    clock.now_s += RELIST_S
    assert await listing.once()


def test_all_watches_silent_is_known_with_no_listing():
    watches = Watches(clock := Clock())
    assert watches.all_silent_s == 0
    watches.opened("/api/v1/pods")
    clock.now_s += 700
    assert watches.all_silent_s == 700


@pytest.mark.parametrize(
    "message",
    [
        'Deployment.apps "a" is invalid: spec.selector: Invalid value: …: field is immutable',
        "spec: Forbidden: updates to statefulset spec for fields other than 'replicas' are",
        "roleRef: Invalid value: …: cannot change roleRef",
        "spec.clusterIPs[0]: Invalid value: …: may not change once set",
    ],
)
def test_a_change_of_what_nobody_may_change_is_told_from_other_refusals(message: str):
    assert cannot_change(ClusterRefused(message, code=422))
    assert not cannot_change(ClusterRefused(message, code=403))
    assert not cannot_change(ClusterRefused("spec.replicas: Invalid value: -1", code=422))


def test_only_what_holds_no_pods_and_no_address_is_replaced():
    assert may_replace({"kind": "Job"})
    assert may_replace(service("headless", clusterIP="None"))
    assert not may_replace(service("router"))
    kept: Sequence[str] = ("Deployment", "StatefulSet", "DaemonSet", "ControllerRevision")
    assert not any(may_replace({"kind": kind}) for kind in kept)


def test_a_child_that_somebody_keeps_changing_is_repaired_ever_more_rarely():
    repairs, at, now = Repairs(), ObjectKey.of(service("a")), 0.0
    gaps = []
    for _ in range(FREE_REPAIRS + 8):
        gaps.append(repairs.wait_s(at, now))
        now += gaps[-1]
        repairs.made(at, now)
    assert gaps[:FREE_REPAIRS] == [0.0] * FREE_REPAIRS
    assert gaps[FREE_REPAIRS:] == [60, 120, 240, 480, *[MOST_PAUSE_S] * 4]
    assert repairs.wait_s(ObjectKey.of(service("b")), now) == 0


def test_who_changes_a_field_of_ours_is_named_and_who_adds_one_is_not():
    wanted = service("a", type="ClusterIP")
    entries = [
        {"manager": "kimi-operator", "operation": "Apply", "fieldsV1": {"f:spec": {}}},
        {"manager": "rival", "operation": "Update", "fieldsV1": {"f:spec": {"f:type": {}}}},
        {"manager": "mesh", "operation": "Update", "fieldsV1": {"f:spec": {"f:extra": {}}}},
    ]
    child = {**wanted, "metadata": {**wanted["metadata"], "managedFields": entries}}
    assert rivals(wanted, child) == ("rival",)
