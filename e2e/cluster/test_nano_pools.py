"""Two nodes' KV pools: engines find the other's blocks, a pool that goes leaves its own there."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from kimi_operator.desired.pods import CONFIG_DIR
from kimi_operator.desired.pool_files import POOL_FILE
from kimi_operator.observed import ROLE_LABEL, ObjectKey
from nano import DEPLOYMENT, NAMESPACE, POOLS, READY_S, ask, engines, router_url, scale, serving
from nodes import Manifest, Nodes
from samples import samples_of, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
HEARD_S = 150.0
"""A daemon hears of a new peer when its node's kubelet renews mounted ConfigMaps."""
STORIES = [f"Tell me about mountain {n} and all that goes with it. " * 60 for n in range(8)]
"""Long enough that a worker had rather fetch than compute."""
TAKEN = "kimistack_umbp_peer_taken_blocks_total"
KNOWN = "kimistack_umbp_peer_known_blocks"


@pytest.fixture(scope="module", autouse=True)
def on_both_nodes(nodes: Nodes, deployment: Manifest) -> None:
    """An engine of each role on each node."""
    scale(nodes, 2)


def by_node(pods: list[Manifest]) -> dict[str, Manifest]:
    return {pod["spec"]["nodeName"]: pod for pod in pods}


def prefills(nodes: Nodes) -> dict[str, Manifest]:
    """Pods that compute prompts, by node."""
    pods = engines(nodes).values()
    return by_node([pod for pod in pods if pod["metadata"]["labels"][ROLE_LABEL] == "prefill"])


def pools(nodes: Nodes) -> dict[str, Manifest]:
    """The daemons' pods, by node."""
    return by_node(nodes.list("v1/Pod", NAMESPACE, POOLS))


def name_of(pod: Manifest) -> str:
    return str(pod["metadata"]["name"])


def uid_of(pod: Manifest) -> str:
    return str(pod["metadata"]["uid"])


def told(nodes: Nodes) -> list[str]:
    """What is answered to each story, all asked at once, so that both nodes compute some."""
    with (
        openai.OpenAI(base_url=router_url(nodes), api_key="none", max_retries=0) as client,
        ThreadPoolExecutor(len(STORIES)) as askers,
    ):
        answers = askers.map(lambda story: ask(client, story, temperature=0), STORIES)
        messages = [answer.choices[0].message for answer in answers]
        return [f"{one.content}{getattr(one, 'reasoning_content', '')}" for one in messages]


def serves_again(nodes: Nodes) -> None:
    nodes.until(
        DEPLOYMENT, lambda now: serving(now, prefill=2, decode=2), READY_S, "2+2 and Ready again"
    )


def test_an_engine_finds_what_the_other_node_s_engine_computed(nodes: Nodes):
    computing, daemons = prefills(nodes), pools(nodes)
    assert sorted(computing) == sorted(daemons)
    gone, other = sorted(computing)
    said = told(nodes)
    until(
        lambda: samples_of(nodes, daemons[other]).total(KNOWN, gone) > 0,
        HEARD_S,
        f"the pool of {other} knows of blocks of {gone}",
    )
    key, uid = ObjectKey("v1", "Pod", NAMESPACE, name_of(computing[gone])), uid_of(computing[gone])
    nodes.delete(key)
    # it serves until it ends, and its successor has a model to load first
    nodes.until(key, lambda now: now is None or uid_of(now) != uid, READY_S, "ended")
    assert told(nodes) == said
    found = samples_of(nodes, computing[other])
    sources = found.by("kimistack_worker_prompt_tokens_total", "source")
    assert sources["pool"] > 0, sources
    serves_again(nodes)


def empty(nodes: Nodes, daemon: Manifest) -> None:
    """As a user would who looks into a pool's pod."""
    file = f"{CONFIG_DIR}/{POOL_FILE}"
    evict = ("kimistack", "umbp", "evict", "--spec", file, "--all")
    nodes.kubectl("exec", "-n", NAMESPACE, name_of(daemon), "--", *evict)


def test_a_pool_that_is_stopped_leaves_its_blocks_with_the_other(nodes: Nodes):
    told(nodes)
    daemons = pools(nodes)
    leaving, staying = sorted(daemons)
    empty(nodes, daemons[staying])  # hand-offs may have brought it all that the other has
    before = samples_of(nodes, daemons[staying]).total(TAKEN, "taken", "drain")
    key = ObjectKey("v1", "Pod", NAMESPACE, name_of(daemons[leaving]))
    with nodes.timed("delete of a pool's pod to its successor Ready, blocks moved"):
        nodes.delete(key)
        nodes.until(key, lambda now: now is None, READY_S, "gone")
        serves_again(nodes)
    moved = samples_of(nodes, daemons[staying]).total(TAKEN, "taken", "drain") - before
    nodes.measured("the same: blocks the other pool took", moved, "")
    assert moved > 0
    successor = pools(nodes)[leaving]
    assert successor["metadata"]["uid"] != daemons[leaving]["metadata"]["uid"]
    assert all(told(nodes))
