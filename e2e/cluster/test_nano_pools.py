"""Two nodes' KV pools: engines find the other's blocks, a pool that goes leaves its own there."""

import time
from collections.abc import Callable

import openai
import pytest

from kimi_operator.observed import ObjectKey
from nano import DEPLOYMENT, NAMESPACE, POOLS, READY_S, ask, engines, router_url, serving
from nodes import Manifest, Nodes
from samples import Samples

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
HEARD_S = 30.0
STEPS = "kimistack_worker_steps_total"


def by_node(pods: list[Manifest]) -> dict[str, Manifest]:
    return {pod["spec"]["nodeName"]: pod for pod in pods}


def prefills(nodes: Nodes) -> dict[str, Manifest]:
    """Pods that compute prompts, by node."""
    return by_node([pod for pod in engines(nodes).values() if "-prefill-" in name_of(pod)])


def pools(nodes: Nodes) -> dict[str, Manifest]:
    """The daemons' pods, by node."""
    return by_node(nodes.list("v1/Pod", NAMESPACE, POOLS))


def name_of(pod: Manifest) -> str:
    return str(pod["metadata"]["name"])


def samples(nodes: Nodes, pod: Manifest) -> Samples:
    """A pod's metrics, through the API server."""
    ports = pod["spec"]["containers"][0]["ports"]
    port = next(one["containerPort"] for one in ports if one["name"] == "http")
    at = f"/api/v1/namespaces/{NAMESPACE}/pods/{name_of(pod)}:{port}/proxy/metrics"
    return Samples(nodes.kubectl("get", "--raw", at))


def until(heard: Callable[[], bool], what: str) -> None:
    """Ask again for HEARD_S; it fails when that was not so by then."""
    end_s = time.monotonic() + HEARD_S
    while not heard():
        assert time.monotonic() < end_s, what


def test_an_engine_finds_what_the_other_node_s_engine_computed(nodes: Nodes, deployment: Manifest):
    computing, daemons = prefills(nodes), pools(nodes)
    assert sorted(computing) == sorted(daemons)
    assert len(computing) == 2
    story = "Tell me about mountains and about all that goes with them. " * 20
    before = {node: samples(nodes, pod).total(STEPS) for node, pod in computing.items()}
    with openai.OpenAI(base_url=router_url(nodes), api_key="none", max_retries=0) as client:
        said = ask(client, story).choices[0].message
        (first,) = (
            node
            for node, pod in computing.items()
            if samples(nodes, pod).total(STEPS) > before[node]
        )
        (other,) = computing.keys() - {first}
        until(
            lambda: (
                samples(nodes, daemons[other]).total("kimistack_umbp_peer_known_blocks", first) > 0
            ),
            f"the pool of {other} knows of no blocks of {first}",
        )
        nodes.delete(ObjectKey("v1", "Pod", NAMESPACE, name_of(computing[first])))
        again = ask(client, story).choices[0].message
    assert again.content == said.content
    found = samples(nodes, computing[other])
    assert found.total("kimistack_worker_prompt_tokens_total", "pool") > 0
    fetched = samples(nodes, daemons[other])
    assert fetched.total("kimistack_umbp_peer_blocks_total", "fetched", first) > 0
    nodes.until(
        DEPLOYMENT, lambda now: serving(now, prefill=2, decode=2), READY_S, "2+2 and Ready again"
    )


def test_a_pool_that_is_stopped_leaves_its_blocks_with_the_other(
    nodes: Nodes, deployment: Manifest
):
    daemons = pools(nodes)
    leaving, staying = sorted(daemons)
    taken = "kimistack_umbp_peer_taken_blocks_total"
    before = samples(nodes, daemons[staying]).total(taken, "taken", "drain")
    key = ObjectKey("v1", "Pod", NAMESPACE, name_of(daemons[leaving]))
    with nodes.timed("delete of a pool's pod to its successor Ready, blocks moved"):
        nodes.delete(key)
        nodes.until(key, lambda now: now is None, READY_S, "gone")
        nodes.until(
            DEPLOYMENT, lambda now: serving(now, prefill=2, decode=2), READY_S, "2+2 and Ready"
        )
    moved = samples(nodes, daemons[staying]).total(taken, "taken", "drain") - before
    nodes.measured("the same: blocks the other pool took", moved, "")
    assert moved > 0
    successor = pools(nodes)[leaving]
    assert successor["metadata"]["uid"] != daemons[leaving]["metadata"]["uid"]
    with openai.OpenAI(base_url=router_url(nodes), api_key="none", max_retries=0) as client:
        assert ask(client).usage.completion_tokens > 0
