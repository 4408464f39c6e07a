"""A router's policy is changed by the spec, and its pods tell why requests went where they went."""

import json

import pytest

from load import Load
from nano import DEPLOYMENT, NAME, NAMESPACE, READY_S, ROUTERS, engines, ready, router_url, staying
from nodes import Manifest, Nodes
from samples import samples_of, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
WRITTEN_S = 60.0


def serving_routers(nodes: Nodes) -> dict[str, Manifest]:
    """Pods of routers that are ready, by uid."""
    return {
        uid: pod
        for uid, pod in staying(nodes, ROUTERS).items()
        if any(one["ready"] for one in pod["status"].get("containerStatuses", ()))
    }


def recording(nodes: Nodes) -> list[str]:
    """Routers' pods that have written a decision."""
    return [
        pod["metadata"]["name"]
        for pod in serving_routers(nodes).values()
        if samples_of(nodes, pod).total("kimistack_router_explained_total", "written")
    ]


def test_routing_by_cost_rolls_out_without_a_failed_request_and_routers_tell_why(
    nodes: Nodes, deployment: Manifest
):
    before, old = engines(nodes), staying(nodes, ROUTERS).keys()
    with Load(router_url(nodes), NAME) as load:
        with nodes.timed("spec.router.policy: cost, to both routers replaced, under load"):
            nodes.merge(DEPLOYMENT, {"spec": {"router": {"policy": "cost"}}})
            until(
                lambda: (
                    len(serving_routers(nodes)) == 2 and not old & staying(nodes, ROUTERS).keys()
                ),
                READY_S,
                "both routers replaced",
            )
        nodes.until(DEPLOYMENT, ready, READY_S, "Ready with them")
        until(lambda: bool(recording(nodes)), WRITTEN_S, "a decision written")
    assert load.failures == []
    assert load.served > 0
    assert engines(nodes).keys() == before.keys(), "only routers change"
    for pod in recording(nodes):
        explain = ("kimistack", "explain", "-o", "json")
        told = json.loads(nodes.kubectl("exec", pod, "-n", NAMESPACE, "--", *explain))
        assert told["modes"]["pd"]["decisions"] > 0
