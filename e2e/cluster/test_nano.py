"""A KimiDeployment on two real nodes: looked at, served, repaired, scaled."""

import time
from collections.abc import Callable
from statistics import median

import openai
import pytest

from kimi_operator.changes import FIELD_MANAGER
from kimi_operator.observed import REVISION_LABEL, ObjectKey
from kimi_operator.preflight.report import Report
from nano import (
    DEPLOYMENT,
    NAME,
    NAMESPACE,
    PREFLIGHTS,
    READY_S,
    ask,
    children,
    condition,
    engines,
    owned,
    ready,
    router_url,
    scale,
    serving,
)
from nodes import NODES, Manifest, Nodes, TookTooLong

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
REPAIR_S = 60.0
QUIET_S = 20.0
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
            "required": ["unit"],
        },
    },
}


def test_both_nodes_advertise_gpus(nodes: Nodes):
    found = [nodes.get(ObjectKey("v1", "Node", "", name)) for name in NODES]
    assert [node and node["status"]["capacity"]["amd.com/gpu"] for node in found] == ["8", "8"]


def test_the_example_is_ready_within_three_minutes(nodes: Nodes, deployment: Manifest):
    assert nodes.figures["kubectl apply to Ready"][0] <= READY_S
    assert serving(deployment, prefill=1, decode=1)
    printed = nodes.kubectl("get", "kimideployment", NAME, "-n", NAMESPACE)
    assert "1/1" in printed
    assert "True" in printed


def test_preflight_looked_at_both_nodes_before_an_engine_started(
    nodes: Nodes, deployment: Manifest
):
    passed = condition(deployment, "PreflightPassed")
    assert (passed["status"], passed["reason"]) == ("True", "Passed"), passed
    pods = nodes.list("v1/Pod", NAMESPACE, PREFLIGHTS)
    assert sorted(pod["spec"]["nodeName"] for pod in pods) == list(NODES)
    ended = [pod["status"]["containerStatuses"][0]["state"]["terminated"] for pod in pods]
    reports = [Report.model_validate_json(end["message"]) for end in ended]
    assert sorted(report.node for report in reports) == list(NODES)
    assert all(report.ok for report in reports)
    assert {finding.check for report in reports for finding in report.findings} >= {"gpu"}
    began = min(pod["metadata"]["creationTimestamp"] for pod in engines(nodes).values())
    assert max(end["finishedAt"] for end in ended) <= began


def test_a_client_outside_is_served_through_the_router_service(client: openai.OpenAI):
    answer = ask(client)
    assert answer.usage.completion_tokens > 0
    pieces = list(ask(client, "Hello again", stream=True))
    assert pieces[-1].choices[0].finish_reason in ("stop", "length")
    called = ask(
        client,
        "What is the weather?",
        max_tokens=256,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    )
    assert called.choices[0].message.tool_calls[0].function.name == "get_weather"


def test_prefill_and_decode_hold_gpus_of_different_nodes(nodes: Nodes, deployment: Manifest):
    pods = engines(nodes).values()
    held = [
        container["resources"].get("limits", {}).get("amd.com/gpu")
        for pod in pods
        for container in pod["spec"]["containers"]
    ]
    assert held == ["1", "1"]
    assert sorted(pod["spec"]["nodeName"] for pod in pods) == list(NODES)


def test_every_child_that_is_deleted_comes_back(nodes: Nodes, deployment: Manifest):
    took_s: dict[str, float] = {}
    current = (nodes.get(DEPLOYMENT) or {})["status"]["currentRevision"]
    for key, child in owned(nodes).items():
        revision = child["metadata"]["labels"].get(REVISION_LABEL, current)
        if key.kind == "ControllerRevision" and revision != current:
            continue  # memory of what was, which nothing can make again
        began = time.monotonic()
        nodes.delete(key)
        nodes.until(key, _another_than(child), REPAIR_S, "created again")
        took_s[str(key)] = time.monotonic() - began
    nodes.until(DEPLOYMENT, ready, READY_S, "Ready again")
    # a Service that is made again has another address
    with openai.OpenAI(base_url=router_url(nodes), api_key="none", max_retries=0) as client:
        assert ask(client).usage.completion_tokens > 0
    nodes.measured("deleted child created again, median", median(took_s.values()), "s")
    slowest = max(took_s, key=lambda key: took_s[key])
    nodes.measured(f"the same, slowest: {slowest}", took_s[slowest], "s")


def _another_than(child: Manifest) -> Callable[[Manifest | None], bool]:
    uid = child["metadata"]["uid"]
    return lambda now: now is not None and now["metadata"]["uid"] != uid


def test_a_quiet_operator_writes_nothing(nodes: Nodes, deployment: Manifest):
    nodes.until(DEPLOYMENT, ready, READY_S, "Ready")
    before = {key: without_status(obj) for key, obj in children(nodes).items()}
    status = nodes.get(DEPLOYMENT)
    assert status is not None
    version = status["metadata"]["resourceVersion"]
    with pytest.raises(TookTooLong):
        nodes.until(
            DEPLOYMENT,
            lambda now: now is None or now["metadata"]["resourceVersion"] != version,
            QUIET_S,
            "written again",
        )
    after = {key: without_status(obj) for key, obj in children(nodes).items()}
    assert after == before


def without_status(child: Manifest) -> Manifest:
    """Without what Kubernetes' own controllers write; when the operator last wrote stays in."""
    metadata = dict(child["metadata"])
    del metadata["resourceVersion"]
    ours = [one for one in metadata["managedFields"] if one["manager"] == FIELD_MANAGER]
    return {**child, "metadata": {**metadata, "managedFields": ours}, "status": None}


def test_kubectl_scales_both_roles(nodes: Nodes, client: openai.OpenAI):
    with nodes.timed("kubectl scale from 1+1 to 2+2"):
        scale(nodes, 2)
    by_node = sorted(p["spec"]["nodeName"] for p in engines(nodes).values())
    assert by_node == ["node-1", "node-1", "node-2", "node-2"]
    assert ask(client).usage.completion_tokens > 0
