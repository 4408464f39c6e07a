"""The pool's daemons while what they are made from changes: one node at a time, none unheard of."""

import json
from typing import Any

import pytest

import ssa
from kimi_operator.daemons import (
    KNOWN_S,
    next_daemon,
    outdated_daemons,
    pool_peers,
    pool_urls,
    until_known_s,
)
from kimi_operator.desired.names import digest_of
from kimi_operator.fleet_marks import FLEET_ANNOTATION
from kimi_operator.observed import InstanceId, InstanceView, Manifest, NodeView, ObjectKey
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


def daemon_set(mark: str = "new", *, generation: int = 2, wanted: int = 3) -> Manifest:
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {**_named("kimi-umbp"), "generation": generation},
        "spec": {"template": {"metadata": {"annotations": _mark(mark)}}},
        "status": {"observedGeneration": 2, "desiredNumberScheduled": wanted},
    }


def _named(name: str) -> Manifest:
    labels = {"app.kubernetes.io/component": "umbp"}
    return {"name": name, "namespace": "llm", "labels": labels, "uid": name}


def _mark(mark: str | None) -> dict[str, str]:
    return {} if mark is None else {"kimistack.dev/daemon": mark}


def daemon(node: str, mark: str | None = "old", *, ready: bool = True, ends: bool = False):
    ending = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if ends else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**_named(f"umbp-{node}"), "annotations": _mark(mark), **ending},
        "spec": {
            "nodeName": node,
            "containers": [{"ports": [{"name": "http", "containerPort": 8100}]}],
        },
        "status": {
            "podIP": "10.0.0.1",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


def engine(node: str, revision: str, **fields: Any) -> InstanceView:
    one = InstanceId("decode", revision, 0)
    return InstanceView(one, 1, 1, serving=True, nodes=(node,), **fields)


def chosen(*children: Manifest, engines=(), nodes=None) -> str | None:
    known = {ObjectKey.of(child): json.loads(json.dumps(child)) for child in children}
    key = next_daemon(known, engines, nodes, "bbb")
    return None if key is None else key.name


def test_one_goes_at_a_time_and_only_while_every_other_one_works():
    a, b, c = (daemon(node) for node in "abc")
    assert chosen(daemon_set(), a, b, c) == "umbp-a"
    assert chosen(daemon_set(), daemon("a", "new"), b, c) == "umbp-b"
    assert chosen(daemon_set(), daemon("a", "new", ready=False), b, c) is None
    assert chosen(daemon_set(), daemon("a", ends=True), b, c) is None
    assert chosen(daemon_set(), b, c) is None  # the one of a is not made yet
    assert chosen(daemon_set(generation=3), a, b, c) is None  # nor is that template known
    assert chosen(daemon_set("old"), a, b, c) is None
    assert chosen(a, b, c) is None


def test_one_that_stays_on_a_node_where_none_belongs_any_more_stands_in_for_no_other():
    # the node of c was tainted: its pod stays, and its DaemonSet wants those of a and b
    pool = daemon_set(wanted=2)
    pool["status"]["numberMisscheduled"] = 1
    b, c = daemon("b"), daemon("c")
    assert chosen(pool, daemon("a"), b, c) == "umbp-a"
    assert chosen(pool, b, c) is None  # the one of a is not made yet
    assert chosen(pool, daemon("a", "new"), b, c) == "umbp-b"


ROUTERS_DONE = {
    "observedGeneration": 2,
    "replicas": 2,
    "updatedReplicas": 2,
    "availableReplicas": 2,
}


def routers(**status: int) -> Manifest:
    labels = {"app.kubernetes.io/component": "router"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "kimi-router", "namespace": "llm", "labels": labels, "generation": 2},
        "spec": {"replicas": 2},
        "status": {**ROUTERS_DONE, **status},
    }


def test_daemons_wait_until_every_router_is_of_the_spec():
    pool = [daemon_set(), *(daemon(node) for node in "abc")]
    assert chosen(*pool, routers()) == "umbp-a"
    assert chosen(*pool, routers(replicas=3)) is None  # an old one is still there
    assert chosen(*pool, routers(updatedReplicas=1)) is None
    # the node of the old ones is gone, and what is wrong with the spec shows in the new ones
    assert chosen(*pool, routers(availableReplicas=0)) is None
    assert chosen(*pool, routers(availableReplicas=1)) == "umbp-a"
    assert chosen(*pool, routers(observedGeneration=1)) is None


def test_pods_and_sets_of_an_operator_that_marked_neither_are_alike():
    bare = daemon_set()
    bare["spec"]["template"]["metadata"]["annotations"] = {}
    assert chosen(bare, *(daemon(node, None) for node in "abc")) is None
    assert chosen(daemon_set(), *(daemon(node, None) for node in "abc")) == "umbp-a"


def test_one_that_does_not_work_goes_first_and_waits_for_no_engine():
    broken = daemon("c", ready=False)
    old = [engine(node, "aaa") for node in "abc"]
    assert chosen(daemon_set(), daemon("a"), daemon("b"), broken, engines=old) == "umbp-c"


def test_one_that_no_node_has_room_for_is_replaced_by_one_that_may_fit():
    pending = daemon("c", ready=False)
    del pending["spec"]["nodeName"]
    del pending["status"]["podIP"]
    assert chosen(daemon_set(), daemon("a"), daemon("b"), pending) == "umbp-c"
    assert pool_urls({ObjectKey.of(pending): pending}) == {}


def test_a_node_s_daemon_goes_with_the_last_engine_there_that_is_to_be_replaced():
    three = [daemon_set(), *(daemon(node) for node in "abc")]
    assert chosen(*three, engines=[engine("a", "aaa"), engine("b", "bbb")]) == "umbp-b"
    assert chosen(*three, engines=[engine("a", "aaa", draining=True)]) == "umbp-a"
    both = [engine("a", "aaa", draining=True), engine("a", "aaa")]
    assert chosen(*three, engines=both) == "umbp-b"
    assert chosen(*three, engines=[engine(node, "aaa") for node in "abc"]) is None


def test_daemons_of_lost_nodes_are_neither_waited_for_nor_replaced():
    nodes = [NodeView(node, {}, (), {}, ready=node != "a") for node in "abc"]
    gone = daemon("a", ready=False)
    assert chosen(daemon_set(), gone, daemon("b"), daemon("c"), nodes=nodes) == "umbp-b"
    ending = daemon("a", ends=True)
    assert chosen(daemon_set(), ending, daemon("b", "new"), daemon("c"), nodes=nodes) == "umbp-c"
    assert chosen(daemon_set(), gone, daemon("b", "new"), daemon("c", "new"), nodes=nodes) is None


@pytest.mark.parametrize(
    ("taint", "tolerations", "goes"),
    [
        ({"key": "maintenance", "effect": "NoSchedule"}, [], False),
        ({"key": "maintenance", "effect": "PreferNoSchedule"}, [], True),
        ({"key": "maintenance", "value": "y", "effect": "NoSchedule"}, [{"key": "other"}], False),
        (
            {"key": "maintenance", "value": "y", "effect": "NoSchedule"},
            [{"key": "maintenance", "value": "y"}],
            True,
        ),
        (
            {"key": "maintenance", "value": "n", "effect": "NoSchedule"},
            [{"key": "maintenance", "value": "y", "effect": "NoSchedule"}],
            False,
        ),
        (
            {"key": "maintenance", "effect": "NoSchedule"},
            [{"operator": "Exists", "effect": "NoExecute"}],
            False,
        ),
        ({"key": "maintenance", "effect": "NoSchedule"}, [{"operator": "Exists"}], True),
        # a DaemonSet's pods go there all the same
        ({"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}, [], True),
    ],
)
@pytest.mark.parametrize("ready", [True, False])
def test_a_daemon_stays_where_its_successor_would_not_be_let_in(
    taint: dict[str, str], tolerations: list[dict[str, str]], goes: bool, ready: bool
):
    pool = daemon_set(wanted=1)
    pool["spec"]["template"]["spec"] = {"tolerations": tolerations}
    nodes = [NodeView("a", {}, (taint,), {}, ready=True), NodeView("b", {}, (), {}, ready=True)]
    there = daemon("a", ready=ready)
    assert chosen(pool, there, daemon("b", "new"), nodes=nodes) == ("umbp-a" if goes else None)


def test_each_is_reached_by_the_scheme_and_the_address_of_its_own_pod():
    a, b = daemon("a"), daemon("b")
    b["spec"]["containers"][0]["ports"][0]["name"] = "https"
    b["status"]["podIP"] = "fd00::2"
    known = {ObjectKey.of(child): child for child in (a, b)}
    assert pool_urls(known) == {"a": "http://10.0.0.1:8100", "b": "https://[fd00::2]:8100"}
    b["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert pool_urls(known) == {"a": "http://10.0.0.1:8100"}
    assert pool_peers(known) == {"a": "http://10.0.0.1:8100", "b": "https://[fd00::2]:8100"}


def test_a_port_of_a_sidecar_does_not_say_what_the_daemon_speaks():
    pod = daemon("a")
    pod["spec"]["containers"].append({"ports": [{"name": "https", "containerPort": 8443}]})
    assert pool_urls({ObjectKey.of(pod): pod}) == {"a": "http://10.0.0.1:8100"}


def test_the_newest_ready_daemon_is_given_time_to_be_known():
    old, new, ends = daemon("a"), daemon("b", "new"), daemon("c", "new", ends=True)
    for pod, since in ((old, "2030-01-01T00:00:00Z"), (new, "2030-01-01T01:00:00Z")):
        pod["status"]["conditions"][0]["lastTransitionTime"] = since
    ends["status"]["conditions"][0]["lastTransitionTime"] = "2030-01-01T02:00:00Z"
    known = {ObjectKey.of(child): child for child in (daemon_set(), old, new, ends)}
    ready_s = 1893459600.0
    assert until_known_s(known, ready_s) == KNOWN_S
    assert until_known_s(known, ready_s + KNOWN_S - 1) == 1
    assert until_known_s(known, ready_s + KNOWN_S) == 0
    # a kubelet whose clock is far ahead holds nothing up
    assert until_known_s(known, ready_s - 1800) == 0
    assert until_known_s({}, ready_s) == 0
