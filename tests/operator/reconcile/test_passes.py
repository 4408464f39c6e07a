"""Passes over a deployment, from nothing to serving, and back after whatever happened to it."""

import copy
from typing import Any

import pytest

from fakekube import FakeKube
from kimi_operator.changes import HASH_ANNOTATION
from kimi_operator.observed import DRAINING_LABEL, K8S_1_20, Manifest, ObjectKey
from kimi_operator.revisions import FAILED
from operator_world import KEY, World, nano

pytestmark = pytest.mark.asyncio


async def serving(**spec: object) -> World:
    world = World()
    world.create(nano(**spec))
    await world.settle()
    world.kube.calls.clear()
    return world


async def test_a_new_deployment_comes_to_serve():
    world = await serving()
    assert world.conditions["Ready"] == ("True", "Serving")
    assert world.conditions["Reconciling"][0] == world.conditions["Stalled"][0] == "False"
    pools = world.resource["status"]["pools"]
    assert (pools["prefill"]["summary"], pools["decode"]["summary"]) == ("1/1", "1/1")
    assert world.resource["status"]["observedGeneration"] == 1


async def test_reconciling_is_said_before_anything_else_is_written():
    world = World()
    world.create(nano())
    await world.passes()
    first = world.kube.writes[0]
    assert (first.verb, first.kind) == ("patch", "KimiDeployment/status")
    assert world.conditions["Reconciling"][0] == "True"


async def test_a_quiet_deployment_costs_no_write_and_no_read_but_nodes():
    world = await serving()
    await world.passes(3)
    assert world.kube.writes == []
    assert {call.kind for call in world.kube.calls} <= {"v1/Node"}


async def test_a_restarted_operator_writes_nothing_to_a_quiet_deployment():
    world = await serving()
    world.restart()
    await world.passes(2)
    assert world.kube.writes == []


@pytest.mark.parametrize(
    "kind",
    [
        "ConfigMap",
        "ControllerRevision",
        "DaemonSet",
        "Deployment",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Service",
        "ServiceAccount",
        "StatefulSet",
    ],
)
async def test_a_child_that_somebody_deleted_comes_back(kind: str):
    world = await serving()
    before = world.shape()
    victims = world.kube.of_kind(kind)
    assert victims
    for victim in victims:
        world.kube.remove(ObjectKey.of(victim))
    world.controllers.settle()
    await world.settle()
    assert world.shape() == before
    assert world.conditions["Ready"][0] == "True"


async def test_a_changed_field_of_a_child_is_changed_back():
    world = await serving()
    before = world.shape()
    key = ObjectKey("apps/v1", "Deployment", "llm", "nano-router")
    world.kube.edit(key, {"spec": {"replicas": 7}})
    await world.settle()
    assert world.shape() == before


async def test_a_scale_of_which_the_server_keeps_no_manager_is_taken_back():
    world = await serving()
    router = ObjectKey("apps/v1", "Deployment", "llm", "nano-router")
    scaled = copy.deepcopy(world.kube.objects[router])
    scaled["spec"]["replicas"] = 5
    world.kube._store(router, scaled)
    await world.settle()
    assert world.kube.objects[router]["spec"]["replicas"] == 1


async def test_an_injected_sidecar_and_an_added_label_are_left_alone():
    world = await serving()
    key = ObjectKey("apps/v1", "Deployment", "llm", "nano-router")
    template = copy.deepcopy(world.kube.objects[key]["spec"]["template"])
    template["spec"]["containers"].append({"name": "sidecar", "image": "mesh"})
    template["metadata"]["labels"]["mesh"] = "on"
    world.kube.server_side_apply(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "nano-router", "namespace": "llm"},
            "spec": {
                "template": {
                    "metadata": {"labels": {"mesh": "on"}},
                    "spec": {"containers": [{"name": "sidecar", "image": "mesh"}]},
                }
            },
        },
        "mesh",
        force=False,
    )
    world.controllers.settle()
    world.kube.calls.clear()
    await world.settle()
    assert [call for call in world.kube.writes if call.kind == "Deployment"] == []
    containers = world.kube.objects[key]["spec"]["template"]["spec"]["containers"]
    assert [c["name"] for c in containers][-1] == "sidecar"


async def test_an_object_of_somebody_else_with_our_name_is_not_taken_over():
    world = World()
    theirs: Manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "nano-router", "namespace": "llm"},
        "spec": {"selector": {"app": "theirs"}},
    }
    world.kube.put(theirs, "somebody")
    world.create(nano())
    await world.settle()
    front = world.child("Service", "nano-router")
    assert front is not None
    assert front["spec"] == theirs["spec"]
    assert world.conditions["Stalled"] == ("True", "Rejected")
    stalled = [c for c in world.resource["status"]["conditions"] if c["type"] == "Stalled"]
    assert "Service llm/nano-router" in stalled[0]["message"]


async def test_a_spec_that_cannot_run_stalls_and_leaves_what_serves_alone():
    world = await serving()
    before = world.shape()
    world.edit(preset="no-such/preset")
    await world.settle()
    assert world.shape() == before
    assert world.conditions["Ready"] == ("False", "InvalidSpec")
    assert world.conditions["Stalled"] == ("True", "InvalidSpec")
    assert world.conditions["Reconciling"][0] == "False"
    world.edit(preset="kimi-nano/cpu")
    await world.settle()
    assert world.conditions["Ready"] == ("True", "Serving")


async def test_a_suspended_deployment_is_not_changed():
    world = await serving()
    before = world.shape()
    world.edit(suspend="Reconcile", decode={"replicas": 3})
    await world.settle()
    assert world.shape() == before
    assert world.conditions["Degraded"] == ("True", "Suspended")


async def test_more_replicas_add_instances_and_restart_none():
    world = await serving()
    old = {obj["metadata"]["uid"] for obj in world.kube.of_kind("Pod")}
    world.edit(decode={"replicas": 3})
    await world.settle()
    assert world.resource["status"]["pools"]["decode"]["summary"] == "3/3"
    assert old <= {obj["metadata"]["uid"] for obj in world.kube.of_kind("Pod")}


async def test_fewer_replicas_mark_the_pods_before_they_are_deleted():
    world = await serving(decode={"replicas": 2})
    world.edit(decode={"replicas": 1})
    marked = False

    def watch(change: str, obj: Manifest) -> None:
        nonlocal marked
        draining = obj["metadata"].get("labels", {}).get(DRAINING_LABEL) == "true"
        marked = marked or (obj["kind"] == "Pod" and draining)
        if change == "DELETED" and obj["kind"] == "StatefulSet":
            assert marked, "deleted before the router could leave it"

    world.kube.subscribe(watch)
    await world.settle()
    assert marked
    assert world.resource["status"]["pools"]["decode"]["summary"] == "1/1"


async def test_another_template_rolls_out_pair_by_pair_to_one_revision():
    world = await serving(prefill={"replicas": 2}, decode={"replicas": 2})
    before = world.resource["status"]["currentRevision"]
    world.edit(restartToken="again")
    least = 2

    def watch(_: str, obj: Manifest) -> None:
        nonlocal least
        if obj["kind"] == "KimiDeployment":
            pools = obj["status"]["pools"]
            least = min(least, pools["prefill"]["serving"], pools["decode"]["serving"])

    world.kube.subscribe(watch)
    await world.settle()
    status = world.resource["status"]
    assert status["currentRevision"] == status["updateRevision"] != before
    assert {pod["metadata"]["labels"]["kimistack.dev/revision"] for pod in engines(world)} == {
        status["currentRevision"]
    }
    assert least >= 1
    assert world.conditions["Ready"][0] == "True"


def engines(world: World) -> list[Manifest]:
    pods = world.kube.of_kind("Pod")
    return [pod for pod in pods if "kimistack.dev/revision" in pod["metadata"]["labels"]]


async def test_ready_is_not_said_of_a_new_generation_by_an_old_status():
    world = await serving()
    world.edit(router={"replicas": 2})
    await world.passes()
    assert world.resource["status"]["observedGeneration"] == 2
    assert world.conditions["Ready"] == ("False", "RouterNotReady")


async def test_a_scale_that_somebody_else_writes_is_never_written_by_us():
    world = World()
    external = {"scaling": {"mode": "External", "max": 8}}
    world.create(nano(prefill={}, decode=external))
    del world.kube.objects[KEY.object]["spec"]["prefill"]["replicas"]
    del world.kube.objects[KEY.object]["spec"]["decode"]["replicas"]
    world.restart()
    await world.settle()
    workers = ObjectKey("kimistack.dev/v1alpha1", "KimiWorkers", "llm", "nano-decode")
    assert world.kube.objects[workers]["spec"]["replicas"] == 1
    world.kube.edit(workers, {"spec": {"replicas": 3}}, "horizontal-pod-autoscaler")
    await world.settle()
    assert world.kube.objects[workers]["spec"]["replicas"] == 3
    assert world.kube.objects[workers]["status"]["replicas"] == 3
    assert world.resource["status"]["pools"]["decode"]["summary"] == "3/3"
    assert world.resource["status"]["pools"]["decode"]["owner"] == "External"


async def test_what_the_cluster_does_not_serve_is_left_out_and_said():
    world = World(FakeKube(served=K8S_1_20))
    world.create(nano())
    await world.settle()
    assert world.conditions["Ready"][0] == "True"
    assert world.conditions["FullySupported"] == ("False", "NotServed")
    budgets = world.kube.of_kind("PodDisruptionBudget")
    assert {budget["apiVersion"] for budget in budgets} == {"policy/v1beta1"}


async def starting(**container: Any) -> World:
    """A deployment whose first decode pod has a container in that state."""
    world = World()
    world.create(nano())
    world.controllers.ready = False
    await world.passes()
    world.controllers.settle()
    decode_container(world, **container)
    await world.passes(2)
    return world


def decode_container(world: World, **container: Any) -> None:
    (pod, *_) = world.kube.of_kind("Pod")
    status = {"containerStatuses": [{"name": "engine", "image": "a/b:1", **container}]}
    world.kube.edit(ObjectKey.of(pod), {"status": status}, "kubelet", subresource="status")


def blocked(world: World) -> str:
    return str(world.resource["status"]["pools"]["decode"]["blocked"])


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


async def test_pods_that_cannot_start_degrade_and_say_why():
    world = await starting(state=waiting("InvalidImageName", "no such image"))
    assert world.conditions["Degraded"] == ("True", "InstancesFail")
    assert blocked(world).startswith("InvalidImageName")
    assert "no such image" in blocked(world)


CRASHED = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}


@pytest.mark.parametrize(
    ("says", "tries"),
    [
        (
            "ImagePullBackOff",
            [
                {"state": waiting("ErrImagePull", "rpc error: not found")},
                {"state": waiting("ImagePullBackOff", "Back-off pulling image")},
            ],
        ),
        (
            "CrashLoopBackOff",
            [
                {"restartCount": 1, "state": waiting("CrashLoopBackOff", "back-off 10s")},
                {"restartCount": 2, "state": {"running": {}}},
                {"restartCount": 2, "state": CRASHED},
                {"restartCount": 2, "state": waiting("CrashLoopBackOff", "back-off 20s")},
            ],
        ),
    ],
)
async def test_a_container_tried_again_and_again_is_one_condition_and_no_flapping(says, tries):
    tries = [{"ready": False, "lastState": CRASHED, **one} for one in tries]
    world = await starting(**tries[0])
    assert blocked(world).startswith(says)
    before = len(world.kube.writes)
    for container in tries[1:] * 2:
        decode_container(world, **container)
        await world.passes(2)
    assert world.kube.writes[before:] == []


async def test_a_container_that_the_kubelet_does_not_begin_is_not_said_to_load():
    world = await starting(state=waiting("ContainerCreating"))
    assert blocked(world).startswith("Starting")
    decode_container(world, state={"running": {}})
    await world.passes()
    assert blocked(world).startswith("Loading")


async def test_pods_that_are_not_made_are_told_apart_from_pods_without_a_node():
    world = World()
    world.create(nano())
    await world.passes(2)
    assert "1 pods, since" in blocked(world)
    assert "quota" in blocked(world)


async def test_the_router_and_the_pool_say_what_keeps_them():
    world = World()
    world.create(nano())
    await world.passes()
    quota = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: small"}
    router = ObjectKey("apps/v1", "Deployment", "llm", "nano-router")
    world.kube.edit(router, {"status": {"conditions": [quota]}}, "kcm", subresource="status")
    await world.passes()
    messages = {c["type"]: c["message"] for c in world.resource["status"]["conditions"]}
    assert "exceeded quota: small" in messages["RouterReady"]
    assert "feature.node.kubernetes.io/amd-gpu" in messages["KVPoolReady"]


@pytest.mark.parametrize("suspend", ["Reconcile", "Scale"])
async def test_what_is_suspended_is_not_said_to_be_under_way(suspend: str):
    world = await serving()
    if suspend == "Reconcile":
        world.edit(suspend=suspend, decode={"replicas": 2})
        await world.passes(2)
    else:
        world.edit(suspend=suspend)
        await world.settle()
    assert world.conditions["Ready"] == ("False", "Suspended")
    assert world.conditions["Reconciling"][0] == "False"


async def another_revision(world: World) -> str:
    """A changed template whose rollout waits; the revision that serves meanwhile."""
    old = world.resource["status"]["currentRevision"]
    world.edit(rollout={"paused": True}, decode={"env": [{"name": "A", "value": "1"}]})
    await world.settle()
    assert world.resource["status"]["updateRevision"] != old
    return str(old)


async def test_a_spec_that_was_rolled_back_stalls_until_it_is_corrected():
    world = await serving(rollout={"onFailure": "Rollback"})
    old = await another_revision(world)
    new = world.resource["status"]["updateRevision"]
    (failed,) = (
        ObjectKey.of(r)
        for r in world.kube.of_kind("ControllerRevision")
        if r.get("data", {}).get("name") == new
    )
    world.kube.edit(failed, {"metadata": {"annotations": {FAILED: "true"}}}, "kubectl")
    world.edit(rollout={"paused": False})
    await world.settle()
    assert world.conditions["Stalled"] == ("True", "RolledBack")
    assert world.conditions["Ready"] == ("False", "RolledBack")
    assert world.conditions["Available"][0] == "True"
    assert world.resource["status"]["currentRevision"] == old
    world.edit(decode={"env": None})
    await world.settle()
    assert world.conditions["Ready"] == ("True", "Serving")


async def test_an_undone_rollout_names_both_revisions():
    world = await serving()
    old = await another_revision(world)
    world.edit(rollout={"paused": False, "toRevision": old})
    await world.settle()
    assert world.conditions["Ready"] == ("True", "Serving")
    messages = {c["type"]: c["message"] for c in world.resource["status"]["conditions"]}
    new = world.resource["status"]["updateRevision"]
    assert messages["Progressing"].startswith(f"revision {old} instead of {new}")


async def test_events_are_written_on_transitions_only():
    world = await serving()
    assert world.kube.of_kind("Event")
    before = len(world.kube.of_kind("Event"))
    await world.passes(5)
    assert len(world.kube.of_kind("Event")) == before


async def test_a_deployment_that_is_being_deleted_is_not_written_to():
    world = await serving()
    world.kube.edit(KEY.object, {"metadata": {"finalizers": ["foregroundDeletion"]}})
    world.kube.remove(KEY.object)
    world.kube.remove(ObjectKey("apps/v1", "Deployment", "llm", "nano-router"))
    world.kube.calls.clear()
    await world.passes(3)
    assert world.kube.writes == []


async def test_every_child_says_what_was_applied_and_whose_it_is():
    world = await serving()
    for key, obj in world.kube.objects.items():
        if key.kind in ("Event", "KimiDeployment", "Node", "Pod", "Secret"):
            continue
        assert HASH_ANNOTATION in obj["metadata"]["annotations"], key
        (owner,) = obj["metadata"]["ownerReferences"]
        assert owner["uid"] == world.resource["metadata"]["uid"]
        assert owner["controller"]
        assert owner["blockOwnerDeletion"]


async def test_the_call_key_is_made_once_and_differs_between_deployments():
    world = await serving()
    key = world.child("Secret", "nano-call-key")["stringData"]["call-key"]
    assert len(bytes.fromhex(key)) == 32
    world.restart()
    await world.passes(2)
    assert world.child("Secret", "nano-call-key")["stringData"]["call-key"] == key
    other = await serving()
    assert other.child("Secret", "nano-call-key")["stringData"]["call-key"] != key
