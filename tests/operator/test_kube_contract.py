"""What every `Kube` promises: the fake of the tests and a real API server alike."""

from collections.abc import AsyncIterator

import pytest

from cluster import Cluster
from fakekube import FakeKube
from kimi_operator.changes import changes, stamped
from kimi_operator.clock import now_s
from kimi_operator.kube import Kube, TokenBucket, open_kube
from kimi_operator.observed import Manifest, ObjectKey
from kimi_runtime.errors import ClusterConflict

KINDS = [pytest.param("fake"), pytest.param("api", marks=pytest.mark.cluster)]
NAMESPACE = "default"


@pytest.fixture(params=KINDS)
async def kube(request: pytest.FixtureRequest) -> AsyncIterator[Kube]:
    if request.param == "fake":
        yield FakeKube()
        return
    cluster: Cluster = request.getfixturevalue("cluster")

    async def no_wait(_: float) -> None:
        return

    writes = TokenBucket(1000, 1000, now_s, no_wait)
    async with open_kube(writes, kubeconfig=str(cluster.main.kubeconfig)) as found:
        yield found


def config(name: str, **data: str) -> Manifest:
    labels = {"app": "contract"}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels},
        "data": data,
    }


def workload(name: str, *, replicas: int | None = 1) -> Manifest:
    container = {"name": "engine", "image": "none", "ports": [{"containerPort": 8000}]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"app": name}},
        "spec": {
            **({} if replicas is None else {"replicas": replicas}),
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": {"app": name}},
                "spec": {"containers": [container], "volumes": [{"name": "v", "emptyDir": {}}]},
            },
        },
    }


async def remove(kube: Kube, manifest: Manifest) -> None:
    key = ObjectKey.of(manifest)
    found = await kube.get(key)
    if found is not None:
        await kube.delete(key, uid=found["metadata"]["uid"])


async def test_what_is_not_there_is_none(kube: Kube):
    key = ObjectKey.of(config("nothing"))
    assert await kube.get(key) is None
    assert await kube.merge(key, {"data": {"a": "b"}}) is None
    await kube.delete(key, uid="whatever")


async def test_an_apply_creates_and_then_changes(kube: Kube):
    await remove(kube, config("applied"))
    first = await kube.apply(config("applied", a="1"))
    second = await kube.apply(config("applied", a="2"))
    assert first["metadata"]["uid"] == second["metadata"]["uid"]
    assert (first["data"], second["data"]) == ({"a": "1"}, {"a": "2"})


async def test_the_same_apply_twice_changes_no_version(kube: Kube):
    first = await kube.apply(workload("same"))
    second = await kube.apply(workload("same"))
    assert first["metadata"]["generation"] == second["metadata"]["generation"]
    await remove(kube, workload("same"))


async def test_a_field_that_is_no_longer_applied_goes(kube: Kube):
    await kube.apply(config("shrinking", a="1", b="2"))
    assert (await kube.apply(config("shrinking", a="1")))["data"] == {"a": "1"}


async def test_an_apply_takes_back_what_others_changed_and_leaves_what_they_added(kube: Kube):
    await kube.apply(config("shared", ours="1"))
    key = ObjectKey.of(config("shared"))
    await kube.merge(key, {"data": {"ours": "2", "theirs": "3"}})
    assert (await kube.apply(config("shared", ours="1")))["data"] == {"ours": "1", "theirs": "3"}
    await remove(kube, config("shared"))


async def test_a_number_that_is_released_stays_with_who_wrote_it(kube: Kube):
    await remove(kube, workload("released"))
    await kube.create(workload("released", replicas=3))
    answer = await kube.apply(workload("released", replicas=None))
    assert answer["spec"]["replicas"] == 3
    await remove(kube, workload("released"))


async def test_what_was_applied_is_recognised_as_settled_and_a_change_of_it_as_drift(kube: Kube):
    owner = await kube.apply(config("owner"))
    uid = owner["metadata"]["uid"]
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": uid}
    wanted = workload("drifting")
    wanted["metadata"]["ownerReferences"] = [{**reference, "controller": True}]
    key = ObjectKey.of(wanted)
    child = await kube.apply(stamped(wanted))
    assert changes([wanted], {key: child}, uid).applies == ()
    changed = await kube.merge(key, {"spec": {"replicas": 5}})
    assert changed is not None
    (found,) = changes([wanted], {key: changed}, uid).applies
    assert found.reason == "drift"
    await remove(kube, wanted)


async def test_a_create_of_a_taken_name_says_so(kube: Kube):
    await remove(kube, config("once"))
    assert await kube.create(config("once", a="1")) is not None
    assert await kube.create(config("once", a="2")) is None
    found = await kube.get(ObjectKey.of(config("once")))
    assert found is not None
    assert found["data"] == {"a": "1"}


async def test_a_replacement_of_an_old_version_is_a_conflict(kube: Kube):
    await remove(kube, config("replaced"))
    old = await kube.create(config("replaced", a="1"))
    assert old is not None
    await kube.update({**old, "data": {"a": "2"}})
    with pytest.raises(ClusterConflict):
        await kube.update({**old, "data": {"a": "3"}})


async def test_a_deletion_spares_a_namesake_with_another_uid(kube: Kube):
    await kube.apply(config("spared", a="1"))
    key = ObjectKey.of(config("spared"))
    await kube.delete(key, uid="00000000-0000-4000-8000-000000000000")
    assert await kube.get(key) is not None


async def test_a_listing_selects_by_label(kube: Kube):
    await kube.apply(config("listed", a="1"))
    found = await kube.list("v1/ConfigMap", NAMESPACE, "app=contract")
    assert "listed" in {obj["metadata"]["name"] for obj in found}
    assert {obj["kind"] for obj in found} == {"ConfigMap"}
    assert await kube.list("v1/ConfigMap", NAMESPACE, "app=nobody") == []


async def test_a_status_is_written_apart_from_the_spec(kube: Kube):
    await remove(kube, workload("reported"))
    made = await kube.apply(workload("reported"))
    key = ObjectKey.of(made)
    answer = await kube.patch_status(key, {"replicas": 7, "observedGeneration": 1})
    assert answer is not None
    assert answer["metadata"]["generation"] == made["metadata"]["generation"]
    assert answer["spec"] == made["spec"]
    await remove(kube, workload("reported"))
