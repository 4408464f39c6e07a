"""What people ask of a running deployment: `kubectl kimi status`, `top` and `drain`."""

import json
import time

import pytest

from load import Load
from nano import DEPLOYMENT, NAME, READY_S, engines, kimi, router_url, serving
from nodes import NODES, Manifest, Nodes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
HEARD_S = 30.0


def test_status_names_every_instance_and_its_node(nodes: Nodes, deployment: Manifest):
    told = json.loads(kimi(nodes, "status", "-o", "json"))
    assert told["ready"]
    assert [one["state"] for one in told["instances"]] == ["serving"] * 4
    assert {one["inFlight"] for one in told["instances"]} == {0}, "as routers say"
    pods = [pod for one in told["instances"] for pod in one["pods"]]
    assert sorted(pod["node"] for pod in pods) == sorted(2 * NODES)
    printed = kimi(nodes, "status")
    assert all(one["instance"] in printed for one in told["instances"])


def test_top_shows_what_routers_say_of_workers_under_load(nodes: Nodes, deployment: Manifest):
    """Through the API server, as a laptop that reaches no pod."""
    until_s = time.monotonic() + HEARD_S
    with Load(router_url(nodes), NAME):
        while True:
            told = json.loads(kimi(nodes, "top", "-o", "json"))
            decode = [one for one in told["workers"] if one["role"] == "decode"]
            if all(one["tokensPerS"] for one in decode) and told["fleet"]["itlP90S"]:
                break
            assert time.monotonic() < until_s, told
        printed = kimi(nodes, "top")
    assert told["silent"] == []
    assert told["fleet"]["routers"] == 2
    assert len(decode) == 2
    assert len(told["workers"]) == 4
    assert all(one["ready"] and one["silentS"] < HEARD_S for one in told["workers"])
    assert all(one["pod"] in printed for one in told["workers"])


def test_a_drained_instance_is_replaced_without_a_failed_request(
    nodes: Nodes, deployment: Manifest
):
    told = json.loads(kimi(nodes, "status", "-o", "json"))
    victim = next(one for one in told["instances"] if one["role"] == "decode")
    before = engines(nodes)
    with Load(router_url(nodes), NAME) as load:
        with nodes.timed("kubectl kimi drain --wait of an instance under load"):
            printed = kimi(
                nodes, "drain", victim["instance"], "--wait", "--timeout", "3m", within_s=240
            )
        nodes.until(
            DEPLOYMENT, lambda now: serving(now, prefill=2, decode=2), READY_S, "2+2 and Ready"
        )
    nodes.measured("the same: requests served until 2+2 again", load.served, "")
    nodes.measured("the same: requests failed until then", len(load.failures), "")
    assert f"{victim['instance']}: it drains, and a new instance takes its place" in printed
    assert load.failures == []
    gone = [pod for uid, pod in before.items() if uid not in engines(nodes)]
    assert [pod["metadata"]["name"] for pod in gone] == [pod["pod"] for pod in victim["pods"]]
