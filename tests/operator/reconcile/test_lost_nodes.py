"""A node that falls silent under real passes: what is said of it, and what is done when."""

from copy import deepcopy

import pytest

from kimi_operator.heard import Heard
from kimi_operator.observed import ObjectKey
from kimi_operator.stamps import rfc3339
from operator_world import KEY, NODE, World, nano
from router_words import Words, router_pod, word, worker

BOUND_S = 45.0


def decode_pod(world):
    return next(
        pod
        for pod in world.kube.of_kind("Pod")
        if pod["metadata"]["labels"].get("kimistack.dev/role") == "decode"
    )


@pytest.fixture
async def world():
    """Two nodes; the workers on the first, the router on the second."""
    world = World()
    other = deepcopy(NODE)
    other["metadata"]["name"] = "node-2"
    world.kube.put(other, "kubelet")
    world.create(nano())
    world.words = Words()
    world.reconciler.loads = world.words
    await world.settle()
    world.kube.put(router_pod("nano-router-1", on="node-2"), "deployment-controller")
    say(world, 0.1)
    world.now_s += 100
    await world.passes()
    assert world.conditions["Ready"] == ("True", "Serving")
    return world


def say(world, silent_s):
    names = [
        pod["metadata"]["name"]
        for pod in world.kube.of_kind("Pod")
        if "router" not in pod["metadata"]["name"]
    ]
    workers = [worker(name, silent_s=silent_s, ready=silent_s < 3) for name in names]
    world.words.told["nano-router-1"] = word(*workers)


def lose(world, status="Unknown"):
    """As the node controller does it: the node's condition, then its pods' readiness."""
    since = rfc3339(world.now_s)
    condition = {"type": "Ready", "status": status, "lastTransitionTime": since}
    node = ObjectKey("v1", "Node", "", "node-1")
    world.kube.edit(node, {"status": {"conditions": [condition]}}, "kcm", subresource="status")
    for pod in world.kube.of_kind("Pod"):
        if pod["spec"].get("nodeName") == "node-1":
            unready = {**condition, "status": "False"}
            containers = [{"name": c["name"], "ready": True} for c in pod["spec"]["containers"]]
            world.kube.edit(
                ObjectKey.of(pod),
                {"status": {"conditions": [unready], "containerStatuses": containers}},
                "kcm",
                subresource="status",
            )


def deletions(world):
    return [call for call in world.kube.calls if call.verb == "delete" and call.kind == "Pod"]


async def test_a_lost_node_is_told_of_at_once_with_since_when_and_what_comes_next(world):
    world.now_s += 6
    lose(world)
    await world.passes()
    assert world.conditions["Degraded"] == ("True", "NodeLost")
    assert world.conditions["DecodeReady"] == ("False", "NodeLost")
    message = next(
        c["message"] for c in world.resource["status"]["conditions"] if c["type"] == "Degraded"
    )
    assert f"node node-1 is not ready since {rfc3339(world.now_s)}" in message
    assert decode_pod(world)["metadata"]["name"] in message
    assert f"lease ends by {rfc3339(world.now_s + BOUND_S)}" in message
    told = [e for e in world.kube.of_kind("Event") if e["reason"] == "NodeLost"]
    assert {event["type"] for event in told} == {"Warning"}


async def test_its_pods_are_given_up_after_the_lease_and_made_again_elsewhere(world):
    old = decode_pod(world)["metadata"]["uid"]
    lose(world)
    for second in range(int(BOUND_S)):
        say(world, float(second))
        await world.passes()
        assert not deletions(world)
        world.now_s += 1
    say(world, BOUND_S)
    await world.passes()
    assert len(deletions(world)) == 2
    world.controllers.node = "node-2"
    world.controllers.settle()
    say(world, 0.1)
    await world.settle()
    assert decode_pod(world)["metadata"]["uid"] != old
    assert world.conditions["Degraded"] == ("False", "AsWanted")
    assert world.conditions["Ready"] == ("True", "Serving")


async def test_a_quiet_wait_writes_nothing_after_it_has_been_said(world):
    world.now_s += 6
    lose(world)
    await world.passes(2)
    before = len(world.kube.writes)
    for second in range(0, 40, 3):
        say(world, float(second))
        world.now_s += 3
        await world.passes()
    assert world.kube.writes[before:] == []


async def test_a_worker_that_a_router_still_hears_is_left_alone_for_ever(world):
    lose(world)
    for _ in range(50):
        world.now_s += 60
        say(world, 0.2)
        await world.passes()
    assert not deletions(world)


async def test_a_restarted_operator_first_watches(world):
    lose(world)
    world.now_s += 500
    say(world, 500.0)
    world.restart()
    world.words.watched_s = 3.0
    world.reconciler.loads = world.words
    await world.passes()
    assert not deletions(world)
    world.words.watched_s = BOUND_S
    world.now_s += BOUND_S
    await world.passes()
    assert len(deletions(world)) == 2


async def test_what_is_heard_while_the_pass_waits_for_the_api_server_stops_it(world):
    lose(world)
    world.now_s += 500
    say(world, 500.0)

    class Changes:
        count = 0

        def read(self, key, children) -> Heard:
            self.count += 1
            if self.count > 1:
                say(world, 0.1)
            return world.words.read(key, children)

    world.reconciler.loads = Changes()
    await world.passes()
    assert not deletions(world)


async def test_a_loss_right_after_nodes_were_listed_is_seen_five_seconds_later(world):
    lose(world)
    assert await world.reconciler.run_pass(KEY) == 5.0
    world.now_s += 5
    await world.passes()
    assert world.conditions["Degraded"] == ("True", "NodeLost")


async def test_a_node_that_comes_back_is_forgotten(world):
    world.now_s += 6
    lose(world)
    await world.passes()
    condition = {"type": "Ready", "status": "True", "lastTransitionTime": rfc3339(world.now_s)}
    node = ObjectKey("v1", "Node", "", "node-1")
    world.kube.edit(node, {"status": {"conditions": [condition]}}, "kubelet", subresource="status")
    world.controllers.settle()
    say(world, 0.1)
    world.now_s += 61
    await world.passes()
    assert world.conditions["Degraded"] == ("False", "AsWanted")
    assert not deletions(world)


async def test_whoever_lists_other_nodes_than_before_wakes_the_deployments(world):
    woken = []
    world.reconciler.nodes_changed = lambda: woken.append(world.now_s)
    world.now_s += 61
    await world.reconciler.look_at_nodes()
    assert woken == []
    node = ObjectKey("v1", "Node", "", "node-2")
    world.kube.edit(node, {"spec": {"unschedulable": True}}, "kubectl")
    await world.reconciler.look_at_nodes()
    assert woken == []  # the last listing is new enough
    world.now_s += 61
    await world.reconciler.look_at_nodes()
    assert woken == [world.now_s]
    world.now_s += 61
    await world.reconciler.look_at_nodes()
    assert len(woken) == 1


async def test_nodes_are_listed_once_a_minute_while_all_is_well(world):
    before = sum(call.kind == "v1/Node" for call in world.kube.calls)
    for _ in range(60):
        world.now_s += 1
        await world.passes()
    listed = sum(call.kind == "v1/Node" for call in world.kube.calls) - before
    assert listed <= 2
    assert KEY in world.reconciler.cache.deployments()
