"""Which of the pool's daemons is replaced next, and where each is reached, by what is observed."""

import json
from typing import Any

import pytest

from kimi_operator.daemons import (
    KNOWN_S,
    Turn,
    next_daemon,
    pool_peers,
    pool_urls,
    until_known_s,
)
from kimi_operator.observed import InstanceId, InstanceView, Manifest, NodeView, ObjectKey


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


def turn(*children: Manifest, engines=(), nodes=None) -> Turn:
    known = {ObjectKey.of(child): json.loads(json.dumps(child)) for child in children}
    return next_daemon(known, engines, nodes, "bbb")


def chosen(*children: Manifest, engines=(), nodes=None) -> str | None:
    pod, _ = turn(*children, engines=engines, nodes=nodes)
    return None if pod is None else pod.name


def test_what_holds_the_next_one_is_named():
    pool, b, c = daemon_set(), daemon("b"), daemon("c")
    old = [engine(node, "aaa") for node in "bc"]
    taint = {"key": "maintenance", "effect": "NoSchedule"}
    nodes = [NodeView(node, {}, (taint,), {}, ready=node != "c") for node in "abc"]
    fresh = daemon("a", "new")
    held = {
        turn(pool, b, c).waits_for: "the DaemonSet to have a pod on every node",
        turn(pool, fresh, b, c, routers(replicas=3)).waits_for: "the routers to be replaced",
        turn(pool, daemon("a", ends=True), b, c).waits_for: "the daemon of a to end",
        turn(pool, daemon("", ends=True), b, c).waits_for: "the daemon of a node to end",
        turn(pool, daemon("a", "new", ready=False), b, c).waits_for: (
            "the new daemon of a to be ready"
        ),
        turn(pool, fresh, b, c, engines=old).waits_for: "the engines of b to be replaced",
        turn(pool, fresh, b, c, nodes=nodes).waits_for: (
            "b, c to come back, or to let a new daemon in (see its taints)"
        ),
    }
    assert list(held) == list(held.values())
    many = [daemon(f"node-{number:02}") for number in range(40)]
    gone = [NodeView(pod["spec"]["nodeName"], {}, (), {}, ready=False) for pod in many]
    said = turn(daemon_set(), *many, nodes=gone).waits_for
    assert said.startswith("node-00, node-01 and 38 more to come back")
    assert turn(pool, fresh, b, c) == Turn(ObjectKey("v1", "Pod", "llm", "umbp-b"))
    assert turn(pool, *(daemon(node, "new") for node in "abc")) == Turn(None)


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
