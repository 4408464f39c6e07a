"""A KimiDeployment on two real nodes: served, repaired, scaled, taken away."""

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from kimi_operator.kinds import CHILDREN
from kimi_operator.observed import DEPLOYMENT_LABEL, ObjectKey
from nodes import Manifest, Nodes, TookTooLong, example

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
READY_S = 180.0
REPAIR_S = 30.0
QUIET_S = 20.0
NAMESPACE = "kimistack"
NAME = "kimi-nano"
KEY = ObjectKey("kimistack.dev/v1alpha1", "KimiDeployment", NAMESPACE, NAME)
DECODE = ObjectKey("kimistack.dev/v1alpha1", "KimiWorkers", NAMESPACE, f"{NAME}-decode")
OWNED = f"{DEPLOYMENT_LABEL}%3D{NAME}"
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


def condition(obj: Manifest | None, name: str) -> bool:
    status = (obj or {}).get("status", {})
    return any(c["type"] == name and c["status"] == "True" for c in status.get("conditions", ()))


def ready(obj: Manifest | None) -> bool:
    seen = (obj or {}).get("status", {}).get("observedGeneration")
    return condition(obj, "Ready") and seen == (obj or {})["metadata"]["generation"]


def children(nodes: Nodes) -> dict[ObjectKey, Manifest]:
    found = (nodes.list(kind.id, NAMESPACE, OWNED) for kind in CHILDREN)
    return {ObjectKey.of(obj): obj for objects in found for obj in objects}


@pytest.fixture(scope="module")
def deployment(nodes: Nodes, operator: Manifest, image_names: dict[str, str]) -> Manifest:
    """The example, Ready."""
    # both nodes have the machine's one file system, and with it one folder for the pool's socket
    here = {"placement": {"nodeSelector": {"kubernetes.io/hostname": "node-2"}}}
    manifest = example(
        "kimi-nano-cluster.yaml",
        image=image_names["runtime"],
        imagePullPolicy="Never",
        prefill=here,
        decode=here,
    )
    nodes.apply(manifest)
    with nodes.timed("apply to Ready"):
        found = nodes.until(KEY, ready, READY_S, "Ready")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def client(nodes: Nodes, deployment: Manifest) -> Iterator[openai.OpenAI]:
    """An outside client of the router's Service."""
    service = nodes.get(ObjectKey("v1", "Service", NAMESPACE, f"{NAME}-router"))
    assert service is not None
    address = f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}/v1"
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client: openai.OpenAI, text: str = "Hello", **options: Any) -> Any:
    asked = {"model": NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 8}
    return client.chat.completions.create(**asked | options)


def test_both_nodes_advertise_gpus(nodes: Nodes):
    found = [nodes.get(ObjectKey("v1", "Node", "", name)) for name in ("node-1", "node-2")]
    assert [node and node["status"]["capacity"]["amd.com/gpu"] for node in found] == ["8", "8"]


def test_the_example_is_ready_within_three_minutes(nodes: Nodes, deployment: Manifest):
    assert nodes.timings["apply to Ready"] <= READY_S
    roles = deployment["status"]["pools"]
    assert {name: role["ready"] for name, role in roles.items()} == {"prefill": 1, "decode": 1}


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


def test_the_engines_hold_gpus(nodes: Nodes, deployment: Manifest):
    pods = nodes.list("v1/Pod", NAMESPACE, OWNED)
    held = [
        container["resources"].get("limits", {}).get("amd.com/gpu")
        for pod in pods
        for container in pod["spec"]["containers"]
    ]
    assert held.count("1") == 2


def test_every_child_that_is_deleted_comes_back(nodes: Nodes, client: openai.OpenAI):
    slowest = 0.0
    for key, before in children(nodes).items():
        uid = before["metadata"]["uid"]
        began = time.monotonic()
        nodes.delete(key)
        nodes.until(
            key,
            lambda now, uid=uid: now is not None and now["metadata"]["uid"] != uid,  # type: ignore[misc]
            REPAIR_S,
            "created again",
        )
        slowest = max(slowest, time.monotonic() - began)
    nodes.timings["slowest repair of a deleted child"] = round(slowest, 1)
    nodes.until(KEY, ready, READY_S, "Ready again")
    assert ask(client).usage.completion_tokens > 0


def test_a_quiet_operator_writes_nothing(nodes: Nodes, deployment: Manifest):
    before = {key: obj["metadata"]["resourceVersion"] for key, obj in children(nodes).items()}
    status = nodes.get(KEY)
    assert status is not None
    version = status["metadata"]["resourceVersion"]
    with pytest.raises(TookTooLong):
        nodes.until(
            KEY,
            lambda now: now is None or now["metadata"]["resourceVersion"] != version,
            QUIET_S,
            "written again",
        )
    after = {key: obj["metadata"]["resourceVersion"] for key, obj in children(nodes).items()}
    assert after == before


class Load:
    """Requests one after another from a thread, and how each of them ended."""

    def __init__(self, client: openai.OpenAI) -> None:
        self.client = client
        self.served = 0
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(120)

    def _run(self) -> None:
        for number in itertools.count():
            if self._stop.wait(0.2):
                return
            try:
                ask(self.client, f"Question {number}")
                self.served += 1
            except openai.OpenAIError as exc:
                self.failures.append(f"{type(exc).__name__}: {exc}")


def test_a_template_change_rolls_out_without_a_failed_request(nodes: Nodes, client: openai.OpenAI):
    two = {"prefill": {"replicas": 2}, "decode": {"replicas": 2}}
    nodes.merge(KEY, {"spec": two})
    nodes.until(KEY, ready, READY_S, "Ready with two of each")
    before = nodes.get(KEY)
    assert before is not None
    revision = before["status"]["currentRevision"]
    with Load(client) as load, nodes.timed("2+2 paired rollout"):
        nodes.merge(KEY, {"spec": {"restartToken": "once"}})
        nodes.until(
            KEY,
            lambda now: ready(now) and (now or {})["status"]["currentRevision"] != revision,
            2 * READY_S,
            "rolled out",
        )
    assert load.served > 0
    assert load.failures == []


def test_a_restarted_operator_restarts_no_pod(nodes: Nodes, client: openai.OpenAI):
    before = {pod["metadata"]["uid"] for pod in nodes.list("v1/Pod", NAMESPACE, OWNED)}
    (old,) = nodes.list("v1/Pod", NAMESPACE, "app.kubernetes.io/name%3Dkimistack-operator")
    nodes.delete(ObjectKey.of(old))
    nodes.until(ObjectKey.of(old), lambda now: now is None, 60, "gone")
    lease = ObjectKey("coordination.k8s.io/v1", "Lease", NAMESPACE, "kimi-operator")
    nodes.until(
        lease,
        lambda now: (
            (now or {}).get("spec", {}).get("holderIdentity")
            not in ("", None, old["metadata"]["name"])
        ),
        90,
        "held by another operator",
    )
    nodes.until(KEY, ready, READY_S, "Ready")
    assert {pod["metadata"]["uid"] for pod in nodes.list("v1/Pod", NAMESPACE, OWNED)} == before
    assert ask(client).usage.completion_tokens > 0


def test_nothing_is_left_of_a_deleted_deployment(nodes: Nodes, deployment: Manifest):
    with nodes.timed("delete to nothing left"):
        nodes.delete(KEY)
        nodes.until(KEY, lambda now: now is None, READY_S, "gone")
        for kind in (*(kind.id for kind in CHILDREN), "v1/Pod"):
            for obj in nodes.list(kind, NAMESPACE, OWNED):
                nodes.until(ObjectKey.of(obj), lambda now: now is None, 120, "gone")
    assert children(nodes) == {}
