"""The operator as it runs, kopf included, against a real API server (Kubernetes 1.20)."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from cluster import MERGE, Cluster, Server
from kimi_operator.cache import Key
from kimi_operator.changes import is_owned
from kimi_operator.clock import now_s
from kimi_operator.kinds import watched_kinds
from kimi_operator.kube import ApiKube
from kimi_operator.main import Operator
from kimi_operator.observed import FIELDS, Manifest, ObjectKey
from kimi_operator.teardown import FINALIZER
from kimi_runtime.errors import ClusterRefused
from live_operator import SOON_S, opened, operating, prepared
from operator_world import nano

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio]
NAMESPACE = "kimi-test"
OURS = f"/apis/kimistack.dev/v1alpha1/namespaces/{NAMESPACE}/kimideployments"


@pytest.fixture(scope="session")
def server(cluster: Cluster) -> Server:
    """With our CRDs and an empty namespace of the tests' own."""
    return prepared(cluster.main, NAMESPACE)


@dataclass
class Running:
    """An operator at work, and the API beside it."""

    server: Server
    kube: ApiKube
    operator: Operator

    async def call(self, method: str, path: str, body: Any = None, kind: str = MERGE) -> Any:
        """A request of a user's."""
        return await asyncio.to_thread(self.server.call, method, path, body, kind)

    async def resource(self, name: str) -> Manifest | None:
        status, answer = await self.call("GET", f"{OURS}/{name}")
        return answer if status == 200 else None

    async def until(self, holds: Callable[[Manifest], bool], name: str) -> Manifest:
        """The resource, once it is as wanted; woken by its watch."""
        query = f"watch=true&timeoutSeconds={SOON_S:.0f}&fieldSelector=metadata.name%3D{name}"
        return await asyncio.to_thread(self._watched, f"{OURS}?{query}", holds)

    def _watched(self, path: str, holds: Callable[[Manifest], bool]) -> Manifest:
        last: Any = None
        with self.server.open("GET", path) as events:
            for line in events:
                last = json.loads(line)["object"]
                if holds(last):
                    found: Manifest = last
                    return found
        raise AssertionError(f"not within {SOON_S}s; last: {last}")

    async def children(self, uid: str) -> dict[ObjectKey, Manifest]:
        """All objects the deployment controls, as the API has them."""
        found = {}
        for kind in watched_kinds(await self.kube.capabilities()):
            for obj in await self.kube.list(kind.id, NAMESPACE):
                if is_owned(obj, uid):
                    found[ObjectKey.of(obj)] = obj
        return found

    async def gone(self, key: ObjectKey, uid: str) -> bool:
        """Whether that very object is no more."""
        obj = await self.kube.get(key)
        return obj is None or obj["metadata"]["uid"] != uid

    async def soon(self, holds: Callable[[], Any], what: str) -> None:
        """Ask until it holds; an API call between two looks is the pause."""
        deadline_s = now_s() + SOON_S
        while not await holds():
            assert now_s() < deadline_s, f"not within {SOON_S}s: {what}"


@asynccontextmanager
async def running(server: Server, identity: str = "one") -> AsyncIterator[Running]:
    async with operating(server, NAMESPACE, identity) as (kube, operator):
        yield Running(server, kube, operator)


def condition(resource: Manifest, kind: str) -> tuple[str, str] | None:
    conditions = resource.get("status", {}).get("conditions", [])
    return next(((c["status"], c["reason"]) for c in conditions if c["type"] == kind), None)


def applied(resource: Manifest) -> bool:
    return "pools" in resource.get("status", {})


def document(name: str, **spec: Any) -> Manifest:
    found = nano(**spec)
    found["metadata"] = {"name": name, "namespace": NAMESPACE}
    return found


async def test_the_servers_kinds_and_fields_are_found(server: Server):
    async with opened(server) as kube:
        served = await kube.capabilities()
    assert served.version >= (1, 20)
    assert served.serves("apps/v1/StatefulSet")
    assert served.serves("kimistack.dev/v1alpha1/KimiDeployment")
    assert not served.serves("keda.sh/v1alpha1/ScaledObject")
    assert served.fields <= FIELDS
    if served.version == (1, 20):
        assert not served.has_field("StatefulSet.spec.minReadySeconds")
        assert not served.serves("policy/v1/PodDisruptionBudget")


async def test_a_field_the_server_lacks_is_a_refusal_not_a_failure_to_try_again(server: Server):
    workload = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "odd", "namespace": NAMESPACE},
        "spec": {"noSuchField": 1},
    }
    async with opened(server) as kube:
        with pytest.raises(ClusterRefused, match="noSuchField"):
            await kube.apply(workload)


async def test_a_deployment_becomes_its_children_and_goes_with_them(server: Server):
    async with running(server) as world:
        status, answer = await world.call("POST", OURS, document("whole"), "application/json")
        assert status == 201, answer
        first = await world.until(lambda r: bool(r.get("status")), "whole")
        assert condition(first, "Reconciling") == ("True", "Reconciling")
        resource = await world.until(applied, "whole")
        assert resource["metadata"]["finalizers"] == [FINALIZER]
        assert condition(resource, "Ready") is not None
        uid = resource["metadata"]["uid"]
        kinds = {key.kind for key in await world.children(uid)}
        assert {"ConfigMap", "ControllerRevision", "Deployment", "Service", "StatefulSet"} <= kinds
        assert await world.kube.get(ObjectKey("v1", "Secret", NAMESPACE, "whole-call-key"))

        await settled(world, "whole")
        before = world.operator.metrics.text()
        await quiet(world, "whole")
        assert writes(world.operator.metrics.text()) == writes(before), (
            "a settled one is left alone"
        )

        await every_child_comes_back(world, uid)

        status, _ = await world.call("DELETE", f"{OURS}/whole")
        assert status == 200

        async def all_gone() -> bool:
            return await world.resource("whole") is None and not await world.children(uid)

        await world.soon(all_gone, "nothing is left")


async def settled(world: Running, name: str) -> None:
    """Until a pass has nothing to write."""

    async def same() -> bool:
        before = world.operator.metrics.text()
        await quiet(world, name)
        return writes(before) == writes(world.operator.metrics.text())

    await world.soon(same, "settled")


async def quiet(world: Running, name: str) -> None:
    """Touch the resource, and wait for the pass that this wakes."""
    passes = count(world.operator.metrics.text(), "kimi_operator_pass_seconds_count")
    annotations = {"metadata": {"annotations": {"touched": f"{now_s()}"}}}
    await world.call("PATCH", f"{OURS}/{name}", annotations)

    async def passed() -> bool:
        await world.resource(name)
        text = world.operator.metrics.text()
        return count(text, "kimi_operator_pass_seconds_count") > passes

    await world.soon(passed, "a pass")


def writes(text: bytes) -> float:
    return sum(
        count(text, f"kimi_operator_{name}_total")
        for name in ("applies", "deletes", "status_patches")
    )


def count(text: bytes, name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in lines_of(text, name))


def lines_of(text: bytes, name: str) -> list[str]:
    return [line for line in text.decode().splitlines() if line.startswith(name)]


async def every_child_comes_back(world: Running, uid: str) -> None:
    victims = {key: child["metadata"]["uid"] for key, child in (await world.children(uid)).items()}
    for key, old in victims.items():
        await world.kube.delete(key, uid=old)

    async def back() -> bool:
        children = await world.children(uid)
        return all(
            key in children and children[key]["metadata"]["uid"] != old
            for key, old in victims.items()
        )

    await world.soon(back, "every child is there again")


async def test_a_spec_that_cannot_run_is_a_condition_and_can_be_corrected(server: Server):
    async with running(server) as world:
        await world.call("POST", OURS, document("wrong", preset="no/such"), "application/json")
        stalled = await world.until(lambda r: condition(r, "Stalled") is not None, "wrong")
        stalled = await world.until(
            lambda r: condition(r, "Stalled") == ("True", "InvalidSpec"), "wrong"
        )
        assert condition(stalled, "Reconciling") == ("False", "InvalidSpec")
        fixed = {"spec": {"preset": "kimi-nano/cpu"}}
        await world.call("PATCH", f"{OURS}/wrong", fixed)
        resource = await world.until(applied, "wrong")
        assert condition(resource, "Stalled") == ("False", "Moving")
        await world.call("DELETE", f"{OURS}/wrong")

        async def gone() -> bool:
            return await world.resource("wrong") is None

        await world.soon(gone, "deleted")


async def test_a_second_operator_waits_and_takes_over_what_the_first_left(server: Server):
    async with running(server, "first") as world:
        await world.call("POST", OURS, document("handed"), "application/json")
        resource = await world.until(applied, "handed")
        uid = resource["metadata"]["uid"]
        await settled(world, "handed")
        pods = {key: c["metadata"]["uid"] for key, c in (await world.children(uid)).items()}
        rival = Operator(world.operator.settings, world.kube, world.kube.credentials)
        rival.leadership.identity = "second"
        assert not await rival.leadership.attempt()
    async with running(server, "second") as world:
        await settled(world, "handed")
        after = {key: c["metadata"]["uid"] for key, c in (await world.children(uid)).items()}
        assert after == pods, "nothing was replaced"
        text = world.operator.metrics.text()
        assert lines_of(text, "kimi_operator_applies_total") == [], "nothing was written again"
        await world.call("DELETE", f"{OURS}/handed")

        async def gone() -> bool:
            return await world.resource("handed") is None

        await world.soon(gone, "deleted")


async def test_an_operator_that_starts_amid_a_teardown_goes_on_with_it_in_order(server: Server):
    router = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/late-router"
    async with running(server, "first") as world:
        await world.call("POST", OURS, document("late"), "application/json")
        uid = (await world.until(applied, "late"))["metadata"]["uid"]
        await world.call("PATCH", router, {"metadata": {"finalizers": ["example.com/held"]}})
        await world.call("DELETE", f"{OURS}/late")

        async def begun() -> bool:
            _, answer = await world.call("GET", router)
            return "deletionTimestamp" in answer["metadata"]

        await world.soon(begun, "the router is taken down")
    async with running(server, "second") as world:

        async def goes_on() -> bool:
            await world.resource("late")
            return Key(NAMESPACE, "late") in world.operator.wakes.in_teardown()

        await world.soon(goes_on, "the second operator has seen it")
        children = await world.children(uid)
        engines = [child for key, child in children.items() if key.kind == "StatefulSet"]
        assert engines, "engines stay until the router has ended"
        assert not any("deletionTimestamp" in child["metadata"] for child in engines)
        await world.call("PATCH", router, {"metadata": {"finalizers": []}})

        async def gone() -> bool:
            return await world.resource("late") is None

        await world.soon(gone, "deleted")
