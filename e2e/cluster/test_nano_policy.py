"""A router's policy is changed by the spec, and its pods tell why requests went where they went."""

import json

import pytest

from load import Load
from nano import (
    DEPLOYMENT,
    NAME,
    NAMESPACE,
    READY_S,
    ROUTERS,
    engines,
    router_url,
    serving,
    staying,
)
from nodes import Manifest, Nodes
from samples import samples_of, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
WRITTEN_S = 60.0


def recording(nodes: Nodes) -> list[str]:
    """Routers' pods that have written a decision."""
    return [
        pod["metadata"]["name"]
        for pod in staying(nodes, ROUTERS).values()
        if samples_of(nodes, pod).total("kimistack_router_explained_total", "written")
    ]


def test_routing_by_cost_rolls_out_without_a_failed_request_and_routers_tell_why(
    nodes: Nodes, deployment: Manifest
):
    before = engines(nodes)
    with Load(router_url(nodes), NAME) as load:
        with nodes.timed("spec.router.policy: cost, to both routers deciding by it, under load"):
            nodes.merge(DEPLOYMENT, {"spec": {"router": {"policy": "cost"}}})
            nodes.until(
                DEPLOYMENT, lambda now: serving(now, prefill=2, decode=2), READY_S, "2+2 and Ready"
            )
        until(lambda: bool(recording(nodes)), WRITTEN_S, "a decision written")
    assert load.failures == []
    assert load.served > 0
    assert engines(nodes).keys() == before.keys(), "only routers change"
    for pod in recording(nodes):
        explain = ("kimistack", "explain", "-o", "json")
        told = json.loads(nodes.kubectl("exec", pod, "-n", NAMESPACE, "--", *explain))
        assert told["modes"]["pd"]["decisions"] > 0
