"""The pool's daemons while what they are made from changes: one node at a time, none unheard of."""

from typing import Any

import pytest

import ssa
from kimi_operator.daemons import KNOWN_S, outdated_daemons
from kimi_operator.desired.names import digest_of
from kimi_operator.fleet_marks import FLEET_ANNOTATION
from kimi_operator.observed import Manifest, ObjectKey
from kimi_operator.stamps import rfc3339
from kimi_runtime.errors import ClusterRefused
from kimi_runtime.spec.router import FleetSpec, RouterSpec
from operator_world import KEY, NODE, World, nano

NODES = ("node-1", "node-2", "node-3")
SECRET = {"tlsSecretName": "pool-tls"}

WHY = "Secret pool-tls of namespace llm lacks ca.crt; write a certificate"
LACKING = {
    "phase": "Pending",
    "conditions": [{"type": "Ready", "status": "False"}],
    "initContainerStatuses": [
        {
            "name": "certificates",
            "image": "i",
            "restartCount": 3,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": {"exitCode": 1, "reason": "Error", "message": f"{WHY}\n"}},
        }
    ],
}
"""What a pod says whose Secret is not complete."""


async def pooled(**spec: Any) -> World:
    world = World()
    for name in NODES[1:]:
        world.kube.put({**NODE, "metadata": {"name": name}}, "kubelet")
    world.controllers.daemon_nodes = NODES
    world.create(nano(**spec))
    await world.settle()
    world.kube.calls.clear()
    return world


def listed(world: World, name: str, file: str) -> dict[str, str]:
    config = world.child("ConfigMap", name)
    assert config is not None
    fleet = FleetSpec.model_validate_json(config["data"][file])
    return {pool.name: pool.url.partition(":")[0] for pool in fleet.pools}


def told(world: World) -> dict[str, str]:
    """The scheme by which routers reach each node's daemon; daemons are told the same."""
    routers = listed(world, "nano-router", "fleet.json")
    assert listed(world, "nano-umbp-peers", "peers.json") == routers
    return routers


def deleted_pods(world: World) -> list[str]:
    return [call.name for call in world.kube.calls if (call.verb, call.kind) == ("delete", "Pod")]


def message(world: World, kind: str) -> str:
    conditions = world.resource["status"]["conditions"]
    return str(next(one["message"] for one in conditions if one["type"] == kind))


def pods(world: World) -> dict[str, Manifest]:
    found = [pod for pod in world.kube.of_kind("Pod") if "umbp" in pod["metadata"]["name"]]
    return {pod["spec"]["nodeName"]: pod for pod in found}


@pytest.mark.parametrize(("before", "after"), [({}, SECRET), (SECRET, {"tlsSecretName": None})])
async def test_tls_comes_and_goes_node_by_node_and_every_daemon_is_reached_as_it_speaks(
    before: dict[str, Any], after: dict[str, Any]
):
    world = await pooled(security=before)
    old, new = ("https", "http") if before else ("http", "https")
    assert told(world) == dict.fromkeys(NODES, old)
    engines = {p["metadata"]["uid"] for p in world.kube.of_kind("Pod")} - {
        p["metadata"]["uid"] for p in pods(world).values()
    }
    seen = []
    world.edit(security=after)
    for _ in range(3 * len(NODES)):
        for _ in range(2):
            speaks = {node: _speaks(pod) for node, pod in pods(world).items()}
            await world.passes()
            assert told(world) == speaks
            seen.append(speaks)
        world.controllers.settle()
    counts = [list(now.values()).count(new) for now in seen]
    assert {len(now) for now in seen} == {2, 3}
    assert (counts, seen[-1]) == (sorted(counts), dict.fromkeys(NODES, new))
    assert set(counts) == {0, 1, 2, 3}
    assert len(deleted_pods(world)) == len(NODES)
    left = {pod["metadata"]["uid"] for pod in world.kube.of_kind("Pod")}
    assert engines <= left  # no engine restarts for it
    config = world.child("ConfigMap", "nano-router")
    assert config is not None
    router = RouterSpec.model_validate_json(config["data"]["router.json"])
    assert router.pools_name == (None if before else "nano-umbp.llm.svc")
    assert world.conditions["Ready"][0] == "True"


async def test_a_missing_secret_stops_the_routers_first_and_takes_no_daemon_away():
    world = await pooled()
    world.edit(security=SECRET)
    await world.passes()
    routers = ObjectKey("apps/v1", "Deployment", "llm", "nano-router")
    generation = world.kube.objects[routers]["metadata"]["generation"]
    rolling = {"observedGeneration": generation, "replicas": 2, "readyReplicas": 1}
    status = {"status": {**rolling, "updatedReplicas": 1}}
    world.kube.edit(routers, status, "controller", subresource="status")
    daemons = ObjectKey("apps/v1", "DaemonSet", "llm", "nano-umbp")
    generation = world.kube.objects[daemons]["metadata"]["generation"]
    seen = {"status": {"observedGeneration": generation}}
    world.kube.edit(daemons, seen, "controller", subresource="status")
    stuck = ssa.cloned(world.kube.objects[routers]["spec"]["template"])
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**stuck["metadata"], "name": "nano-router-new", "namespace": "llm"},
        "spec": {**stuck["spec"], "nodeName": "node-1"},
    }
    key = ObjectKey.of(world.kube.put(pod, "controller"))
    world.kube.edit(key, {"status": LACKING}, "kubelet", subresource="status")
    await world.passes(3)
    assert deleted_pods(world) == []
    assert told(world) == dict.fromkeys(NODES, "http")
    said = message(world, "KVPoolReady")
    assert "3 are of an earlier spec until the routers are replaced; CrashLoopBackOff" in said
    assert WHY in said
    done = {"status": {**rolling, "replicas": 1, "updatedReplicas": 1}}
    world.kube.edit(routers, done, "controller", subresource="status")
    await world.passes()
    assert len(deleted_pods(world)) == 1


async def test_a_daemon_that_does_not_come_back_holds_the_others_and_says_why():
    world = await pooled()
    world.edit(security=SECRET)
    await world.settle(until=lambda: bool(deleted_pods(world)))
    (fresh,) = [key for key in map(ObjectKey.of, pods(world).values()) if key not in _old(world)]
    daemons = ObjectKey("apps/v1", "DaemonSet", "llm", "nano-umbp")
    world.kube.edit(fresh, {"status": LACKING}, "kubelet", subresource="status")
    world.kube.edit(daemons, {"status": {"numberReady": 2}}, "controller", subresource="status")
    for _ in range(3):
        await world.passes()
    assert len(deleted_pods(world)) == 1
    assert world.conditions["KVPoolReady"][0] == "False"
    said = message(world, "KVPoolReady")
    assert "2 of 3 nodes have the pool; 2 are of an earlier spec" in said
    assert "the next waits for the new daemon of node-" in said
    assert WHY in said
    assert sorted(told(world).values()) == ["http", "http"]


async def test_a_daemon_goes_once_its_peers_have_had_time_to_follow_the_newest_one():
    world = await pooled()
    world.edit(security=SECRET)
    await world.settle(until=lambda: bool(deleted_pods(world)))
    (fresh,) = [key for key in map(ObjectKey.of, pods(world).values()) if key not in _old(world)]
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": rfc3339(world.now_s)}
    world.kube.edit(fresh, {"status": {"conditions": [ready]}}, "kubelet", subresource="status")
    wait_s = await world.reconciler.run_pass(KEY)
    assert wait_s is not None
    assert 0 < wait_s <= KNOWN_S
    assert len(deleted_pods(world)) == 1
    config = world.child("ConfigMap", "nano-umbp-peers")
    assert config is not None
    mark = digest_of(config["data"]["peers.json"])[:16]
    # the kubelet of each looks at the list now, not when it next comes by
    assert [p["metadata"]["annotations"][FLEET_ANNOTATION] for p in pods(world).values()] == [
        mark
    ] * len(NODES)
    world.now_s += wait_s
    await world.passes()
    assert len(deleted_pods(world)) == 2


async def test_no_daemon_goes_while_the_routers_of_the_spec_are_refused():
    world = await pooled()

    def refuses(call: Any) -> None:
        if (call.verb, call.kind) == ("apply", "Deployment"):
            raise ClusterRefused("a webhook says no")

    world.kube.before = refuses
    world.edit(security=SECRET)
    await world.settle()
    assert deleted_pods(world) == []
    assert set(told(world).values()) == {"http"}


async def test_no_daemon_goes_in_the_pass_that_changes_what_it_would_be_made_from():
    world = await pooled()
    world.edit(kvPool={"dram": "256MiB"})
    await world.passes(2)  # applied, and seen
    daemons = ObjectKey("apps/v1", "DaemonSet", "llm", "nano-umbp")
    world.edit(security=SECRET)
    world.kube.edit(
        daemons,
        {"status": {"observedGeneration": world.kube.objects[daemons]["metadata"]["generation"]}},
        "controller",
        subresource="status",
    )
    await world.passes()
    assert deleted_pods(world) == []


def _speaks(pod: Manifest) -> str:
    return str(pod["spec"]["containers"][0]["ports"][0]["name"])


def _old(world: World) -> set[ObjectKey]:
    return set(outdated_daemons(world.kube.objects))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"kvPool": {"updateStrategy": "OnDelete"}}, "until their pods are deleted"),
        ({"rollout": {"paused": True}}, "while spec.rollout.paused holds them"),
    ],
)
async def test_daemons_stay_where_their_user_replaces_them_or_a_pause_holds(
    spec: dict[str, Any], says: str
):
    world = await pooled(**spec)
    world.edit(security=SECRET)
    await world.settle()
    assert deleted_pods(world) == []
    assert told(world) == dict.fromkeys(NODES, "http")
    assert world.conditions["KVPoolReady"][0] == "True"
    assert says in message(world, "KVPoolReady")
    world.kube.remove(ObjectKey.of(pods(world)["node-2"]))
    world.controllers.settle()
    await world.settle()
    assert told(world) == {"node-1": "http", "node-2": "https", "node-3": "http"}


async def test_a_deployment_that_is_suspended_midway_says_that_its_daemons_wait_for_that():
    world = await pooled()
    world.edit(security=SECRET)
    await world.settle(until=lambda: len(deleted_pods(world)) == 1)
    world.edit(suspend="Reconcile")
    await world.settle()
    assert len(deleted_pods(world)) == 1
    assert "2 are of an earlier spec while spec.suspend holds them" in message(world, "KVPoolReady")


async def test_an_unchanged_spec_and_a_change_of_engines_alone_leave_daemons_where_they_are():
    world = await pooled()
    world.restart()
    await world.settle()
    world.edit(restartToken="again")
    await world.settle()
    assert not {name for name in deleted_pods(world) if "umbp" in name}
