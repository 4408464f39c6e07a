"""A node that is gone from one moment to the next, with everything on it."""

import time

import openai
import pytest

from load import Load
from nano import (
    DEPLOYMENT,
    ENGINES,
    NAME,
    NAMESPACE,
    READY_S,
    ROUTERS,
    ask,
    condition,
    engines,
    scale,
    serving,
)
from nodes import Manifest, Nodes
from router_metrics import planned_onto

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
LOST = "node-2"
LEFT_S = 10.0
NOTICED_S = 120.0


def test_routers_leave_a_lost_node_within_ten_seconds_and_requests_go_on(
    nodes: Nodes, deployment: Manifest, client: openai.OpenAI
):
    pods = engines(nodes).values()
    gone = {p["metadata"]["name"] for p in pods if p["spec"]["nodeName"] == LOST}
    left = {p["metadata"]["name"] for p in pods} - gone
    assert len(gone) == len(left) == 2, "a pair on each node"
    routers = [
        f"http://{router['status']['podIP']}:8000"
        for router in nodes.list("v1/Pod", NAMESPACE, ROUTERS)
    ]
    with Load(f"{routers[0]}/v1", NAME) as load:
        while load.served < 4:
            time.sleep(0.05)
        nodes.kill(LOST)
        killed_s = nodes.killed_s[LOST]
        while any(planned_onto(router) & gone for router in routers):
            assert time.monotonic() - killed_s < LEFT_S, "routers still plan onto the lost node"
            time.sleep(0.1)
        nodes.measured("node killed to routers having left it", time.monotonic() - killed_s, "s")
        after = load.served
        while load.served < after + 8:
            assert time.monotonic() - killed_s < 60, "requests do not go on"
            time.sleep(0.05)
    # what a lost worker had begun to answer is cut; everything else is served by the others
    cut = [failure for failure in load.failures if failure.after_tokens]
    assert [failure for failure in load.failures if not failure.after_tokens] == []
    assert all(failure.began_s < killed_s for failure in cut)
    nodes.measured("the same: streams cut after their first token", len(cut), "")


def test_a_lost_node_is_named_and_its_instances_run_elsewhere(nodes: Nodes, client: openai.OpenAI):
    nodes.until(
        DEPLOYMENT,
        lambda now: (
            condition(now, "Degraded").get("reason") == "NodeLost"
            and LOST in condition(now, "Degraded")["message"]
        ),
        NOTICED_S,
        "said that the node is lost",
    )
    since_s = nodes.killed_s[LOST]
    nodes.measured("node killed to NodeLost in the status", time.monotonic() - since_s, "s")
    nodes.until(DEPLOYMENT, lambda now: serving(now, prefill=2, decode=2), READY_S, "2+2 and Ready")
    nodes.measured("node killed to 2+2 on the other node", time.monotonic() - since_s, "s")
    assert {pod["spec"]["nodeName"] for pod in engines(nodes).values()} == {"node-1"}
    assert ask(client).usage.completion_tokens > 0


def test_a_node_that_is_back_is_used_again(nodes: Nodes, client: openai.OpenAI):
    nodes.revive(LOST)
    with nodes.timed("kubectl scale from 2+2 to 1+1"):
        scale(nodes, 1)
    assert len(nodes.list("v1/Pod", NAMESPACE, ENGINES)) == 2
    assert ask(client).usage.completion_tokens > 0
