"""The small parts a pass is made of: nodes, instances, conditions, discovery, settings, waiting."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_operator.api.load import validated
from kimi_operator.cache import Key
from kimi_operator.conditions import Condition, stamped, transitions
from kimi_operator.discovery import fields_in, served_kinds, server_version
from kimi_operator.eligibility import nodes_eligible
from kimi_operator.events import event_of
from kimi_operator.handlers import MOST_BACKOFF_S, backoff_s, first_of, spread_s
from kimi_operator.instances import drain_patches, instance_views, pod_failures
from kimi_operator.kinds import KINDS, watched_kinds
from kimi_operator.kube import TokenBucket
from kimi_operator.nodes import node_view, quantity
from kimi_operator.observed import (
    K8S_1_20,
    K8S_CURRENT,
    InstanceId,
    Manifest,
    NodeView,
    ObjectKey,
)
from kimi_operator.settings import operator_settings
from kimi_runtime.errors import ConfigError
from operator_world import nano

NOW, LATER = "2030-01-01T00:00:00Z", "2030-01-01T00:00:05Z"


def test_a_condition_keeps_its_time_until_its_status_flips():
    first = stamped([Condition("Ready", False, "Loading", "a")], (), 1, NOW)
    same = stamped([Condition("Ready", False, "Scheduling", "b")], first, 2, LATER)
    flipped = stamped([Condition("Ready", True, "Serving")], same, 2, LATER)
    assert [c[0]["lastTransitionTime"] for c in (first, same, flipped)] == [NOW, NOW, LATER]
    assert same[0]["observedGeneration"] == 2
    assert flipped[0]["message"], "1.20 stores an empty text as null"


def test_only_another_status_or_reason_is_a_transition():
    before = stamped([Condition("Ready", False, "Loading", "a")], (), 1, NOW)
    same = stamped([Condition("Ready", False, "Loading", "other words")], before, 1, LATER)
    other = stamped([Condition("Ready", False, "Scheduling")], before, 1, LATER)
    assert transitions(before, same) == ()
    assert [t.reason for t in transitions(before, other)] == ["Scheduling"]


def test_an_event_of_the_same_transition_has_the_same_name():
    resource = {
        "apiVersion": "kimistack.dev/v1alpha1",
        "kind": "KimiDeployment",
        "metadata": {"name": "nano", "namespace": "llm", "uid": "u", "resourceVersion": "7"},
    }
    (change,) = transitions((), stamped([Condition("Ready", True, "Serving", "x")], (), 1, NOW))
    one, two = event_of(resource, change, NOW), event_of(resource, change, LATER)
    assert one is not None
    assert two is not None
    assert one["metadata"] == two["metadata"]
    assert one["type"] == "Normal"


@pytest.mark.parametrize(
    ("text", "number"),
    [("8", 8), ("7500m", 7.5), ("64Gi", 64 * 2**30), ("1.5Ti", 1.5 * 2**40), ("1e3", 1e3)],
)
def test_quantities_are_numbers(text: str, number: float):
    assert quantity(text) == number


def node(name: str, gpus: int = 8, **changes: Any) -> NodeView:
    found = {
        "name": name,
        "labels": {},
        "taints": (),
        "allocatable": {"amd.com/gpu": gpus, "memory": 2.0**40, "pods": 110},
        "ready": True,
    }
    return NodeView(**{**found, **changes})


SPEC = validated(
    {
        **nano(engine="kimistack"),
        "spec": {
            "model": {"source": "hostPath", "path": "/models/k"},
            "decode": {
                "replicas": 2,
                "parallelism": {"tp": 8},
                "placement": {"requireLabels": ["amd.com/rail-bandwidth"]},
            },
        },
    },
    "test",
).spec
PASSED = {"amd.com/rail-bandwidth": "passed"}


def test_enough_nodes_are_eligible():
    found = nodes_eligible(
        SPEC, {"decode": 2}, (node("a", labels=PASSED), node("b", labels=PASSED))
    )
    assert (found.status, found.reason) == ("True", "Eligible")


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (node("b", gpus=4, labels=PASSED), "it has 4 amd.com/gpu, a decode pod takes 8"),
        (node("b"), "amd.com/rail-bandwidth is missing, not passed"),
        (node("b", labels={**PASSED, "amd.com/nic-health": "failed"}), "nic-health is failed"),
        (node("b", labels=PASSED, ready=False), "not Ready"),
        (node("b", labels=PASSED, unschedulable=True), "cordoned"),
        (
            node("b", labels=PASSED, taints=({"key": "amd-dcm", "effect": "NoExecute"},)),
            "taint amd-dcm",
        ),
    ],
)
def test_a_node_that_does_not_fit_is_named_with_the_numbers(bad: NodeView, why: str):
    found = nodes_eligible(SPEC, {"decode": 2}, (node("a", labels=PASSED), bad))
    assert (found.status, found.reason) == ("False", "TooFewNodes")
    assert why in found.message
    assert "b: " in found.message


def pooled(**pool: Any) -> Any:
    """A deployment of one decode pod of 8 GPUs and 256 GiB, beside a pool."""
    spec = {
        "model": {"source": "hostPath", "path": "/models/k"},
        "decode": {"replicas": 1, "parallelism": {"tp": 8}, "resources": {"memory": "256Gi"}},
        "kvPool": {"enabled": True, "roles": ["decode"], "dram": "512GiB", **pool},
    }
    return validated({**nano(engine="kimistack"), "spec": spec}, "test").spec


def test_the_memory_of_several_deployments_on_a_node_is_added_up():
    free = node("a", gpus=16)
    assert nodes_eligible(pooled(), {"decode": 1}, (free,)).status == "True"
    others = {"llm/one": {"memory": 200 * 2.0**30}, "llm/two": {"memory": 100 * 2.0**30}}
    found = nodes_eligible(pooled(), {"decode": 1}, (replace(free, taken=others),))
    assert (found.status, found.reason) == ("False", "TooFewNodes")
    assert (
        "a: it has 1024.0 GiB of memory (llm/one takes 200, llm/two takes 100), a decode pod takes "
        "256.0 GiB and the pool 513.0 GiB"
    ) in found.message


def test_gpus_that_another_deployment_has_are_not_free():
    taken = {"llm/one": {"amd.com/gpu": 4.0}}
    found = nodes_eligible(pooled(), {"decode": 1}, (node("a", taken=taken),))
    assert "a: it has 8 amd.com/gpu (llm/one takes 4), a decode pod takes 8" in found.message


def test_missing_huge_pages_are_named_with_the_numbers():
    spec, bare = pooled(hugepages="1Gi"), node("a")
    found = nodes_eligible(spec, {"decode": 1}, (bare,))
    assert (
        "a: it has 0.0 GiB of hugepages-1Gi, a decode pod takes 0.0 GiB and the pool 512.0 GiB"
    ) in found.message
    room = {**bare.allocatable, "hugepages-1Gi": 512 * 2.0**30}
    assert nodes_eligible(spec, {"decode": 1}, (replace(bare, allocatable=room),)).status == "True"


def test_nodes_nobody_may_list_are_unknown():
    assert nodes_eligible(SPEC, {"decode": 2}, None).status == "Unknown"


def test_a_node_is_read_in_whole_units():
    view = node_view(
        {
            "metadata": {"name": "a"},
            "spec": {"unschedulable": True},
            "status": {
                "allocatable": {"cpu": "7500m", "memory": "1Gi"},
                "conditions": [{"type": "Ready", "status": "Unknown"}],
            },
        }
    )
    assert (view.allocatable["cpu"], view.allocatable["memory"]) == (7.5, 2**30)
    assert (view.ready, view.unschedulable) == (False, True)


LABELS = {
    "kimistack.dev/role": "decode",
    "kimistack.dev/revision": "abc123",
    "kimistack.dev/instance": "0",
}
DECODE_0 = InstanceId("decode", "abc123", 0)


def instance(*, ready: tuple[bool, ...], **pod: Any) -> dict[ObjectKey, Manifest]:
    owner = {"uid": "deployment", "controller": True}
    workload = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {
            "name": "s",
            "namespace": "llm",
            "uid": "set",
            "labels": LABELS,
            "ownerReferences": [owner],
            "creationTimestamp": NOW,
        },
        "spec": {"replicas": len(ready)},
    }
    objects = [workload]
    for ordinal, is_ready in enumerate(ready):
        condition = {"type": "Ready", "status": str(is_ready), "lastTransitionTime": LATER}
        metadata = {"name": f"s-{ordinal}", "namespace": "llm", "labels": dict(LABELS)}
        metadata["ownerReferences"] = [{"uid": "set", "controller": True}]
        metadata |= pod
        objects.append(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": metadata,
                "spec": {"nodeName": f"node-{ordinal}"},
                "status": {"conditions": [condition]},
            }
        )
    return {ObjectKey.of(obj): obj for obj in objects}


def test_an_instance_serves_when_all_its_pods_are_ready():
    (whole,) = instance_views(instance(ready=(True, True)), "deployment", {})
    (half,) = instance_views(instance(ready=(True, False)), "deployment", {})
    assert (whole.serving, half.serving, half.pods_ready) == (True, False, 1)
    assert whole.ready_since_s == whole.created_s + 5
    assert whole.nodes == ("node-0", "node-1")


def test_a_marked_instance_drains_and_serves_no_more():
    marked = {**LABELS, "kimistack.dev/draining": "true"}
    since = {"kimistack.dev/draining-since": "1900000000"}
    children = instance(ready=(True,), labels=marked, annotations=since)
    (view,) = instance_views(children, "deployment", {})
    assert (view.draining, view.serving, view.draining_since_s) == (True, False, 1.9e9)


def test_a_pod_being_deleted_is_ready_for_nothing():
    (view,) = instance_views(instance(ready=(True,), deletionTimestamp=NOW), "deployment", {})
    assert (view.pods_ready, view.serving) == (0, False)


def test_pods_are_marked_once_and_keep_the_mark_to_their_end():
    children = instance(ready=(True,))
    none: frozenset[InstanceId] = frozenset()
    here = frozenset({DECODE_0})
    assert drain_patches(children, none, here, 5.0) == {}
    (patch,) = drain_patches(children, here, here, 5.0).values()
    assert patch["metadata"]["labels"] == {"kimistack.dev/draining": "true"}
    marked = instance(ready=(True,), labels={**LABELS, "kimistack.dev/draining": "true"})
    assert drain_patches(marked, here, here, 9.0) == {}
    assert drain_patches(marked, none, none, 9.0) == {}, "it is about to be deleted"
    (patch,) = drain_patches(marked, none, here, 9.0).values()
    assert patch["metadata"]["labels"] == {"kimistack.dev/draining": None}


def test_what_waiting_does_not_cure_is_a_failure_of_the_pod():
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off 5m"}
    pod = {
        "metadata": {"name": "p"},
        "status": {
            "conditions": [
                {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": "m",
                }
            ],
            "containerStatuses": [{"name": "engine", "state": {"waiting": waiting}}],
        },
    }
    assert [line.partition(":")[0] for line in pod_failures(pod)] == [
        "Unschedulable",
        "CrashLoopBackOff",
    ]
    starting = {"name": "engine", "state": {"waiting": {"reason": "ContainerCreating"}}}
    assert pod_failures({**pod, "status": {"containerStatuses": [starting]}}) == ()


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        ({"exitCode": 1, "reason": "Error", "message": "no key\n"}, "exit code 1; no key"),
        ({"exitCode": 1, "message": "no key"}, "exit code 1; no key"),
        ({"exitCode": 1, "reason": "Error"}, "exit code 1; kubectl logs --previous"),
        (
            {"exitCode": 128, "reason": "StartError", "message": "task 3f2a"},
            "exit code 128 (StartError); kubectl logs --previous",
        ),
    ],
)
def test_the_last_words_of_a_container_are_told_and_not_what_differs_from_try_to_try(
    ended: dict[str, Any], told: str
):
    state = {
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": ended},
    }
    pod = {"metadata": {"name": "p"}, "status": {"containerStatuses": [{"name": "e", **state}]}}
    (failure,) = pod_failures(pod)
    assert f"CrashLoopBackOff: p/e: it ends with {told}" in failure


OPENAPI_2: dict[str, Any] = {
    "definitions": {
        "Set": {
            "properties": {"spec": {"$ref": "#/definitions/SetSpec"}},
            "x-kubernetes-group-version-kind": [{"kind": "StatefulSet"}],
        },
        "SetSpec": {
            "properties": {
                "minReadySeconds": {"type": "integer"},
                "volumes": {"type": "array", "items": {"$ref": "#/definitions/Volume"}},
            }
        },
        "Volume": {"properties": {"image": {"type": "object"}}},
    }
}
OPENAPI_3: dict[str, Any] = {
    "components": {
        "schemas": {
            "Set": {
                "properties": {"spec": {"allOf": [{"$ref": "#/components/schemas/SetSpec"}]}},
                "x-kubernetes-group-version-kind": [{"kind": "StatefulSet"}],
            },
            "SetSpec": OPENAPI_2["definitions"]["SetSpec"]
            | {
                "properties": {
                    "minReadySeconds": {"type": "integer"},
                    "volumes": {"items": {"allOf": [{"$ref": "#/components/schemas/Volume"}]}},
                }
            },
            "Volume": OPENAPI_2["definitions"]["Volume"],
        }
    }
}


@pytest.mark.parametrize("document", [OPENAPI_2, OPENAPI_3], ids=["v2", "v3"])
def test_fields_are_found_through_references_and_lists(document: dict[str, Any]):
    there = {"StatefulSet.spec.minReadySeconds", "StatefulSet.spec.volumes.image"}
    asked = there | {"StatefulSet.spec.ordinals", "Service.spec.ports"}
    assert fields_in(document, asked) == there


def test_discovery_names_kinds_and_not_their_subresources():
    resources = [{"name": "pods", "kind": "Pod"}, {"name": "pods/eviction", "kind": "Eviction"}]
    assert served_kinds("v1", {"resources": resources}) == {"v1/Pod"}
    assert server_version({"major": "1", "minor": "27+"}) == (1, 27)


def test_of_a_kind_in_two_versions_the_newest_served_is_watched():
    def versions(served: Any) -> set[str]:
        kinds = watched_kinds(served)
        return {kind.api_version for kind in kinds if kind.kind == "PodDisruptionBudget"}

    assert versions(K8S_1_20) == {"policy/v1beta1"}
    assert versions(K8S_CURRENT) == {"policy/v1"}


def test_the_operator_may_never_read_a_secret_or_use_a_wildcard():
    (secret,) = [kind for kind in KINDS if kind.kind == "Secret"]
    assert secret.verbs == ("create",)
    assert not any("*" in kind.verbs for kind in KINDS)


async def test_writes_are_held_to_their_rate_after_the_burst():
    now, waited = 0.0, []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    bucket = TokenBucket(rate=10.0, burst=3.0, now_s=lambda: now, sleep=sleep)
    for _ in range(5):
        await bucket.take()
    assert waited == pytest.approx([0.1, 0.2])
    now = 10.0
    waited.clear()
    for _ in range(3):
        await bucket.take()
    assert waited == []


async def test_a_wait_ends_by_the_wake_the_stop_or_the_time():
    async def outcome(*, wake: bool, stop: bool) -> None:
        woken, stopped = asyncio.Event(), asyncio.Event()
        if wake:
            woken.set()
        if stop:
            stopped.set()

        async def wait(within_s: float | None) -> None:
            try:
                async with asyncio.timeout(within_s):
                    await stopped.wait()
            except TimeoutError:
                return

        async with asyncio.timeout(5):
            await first_of(woken, SimpleNamespace(wait=wait), 0.01 if not (wake or stop) else 60)

    await outcome(wake=True, stop=False)
    await outcome(wake=False, stop=True)
    await outcome(wake=False, stop=False)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 60))
def test_backing_off_grows_to_a_cap(failures: int):
    assert 1 <= backoff_s(failures) <= backoff_s(failures + 1) <= MOST_BACKOFF_S


def test_many_deployments_do_not_begin_at_once():
    starts = {round(spread_s(Key("llm", f"model-{n}")), 3) for n in range(100)}
    assert len(starts) > 15
    assert all(0 <= start < 2 for start in starts)


def test_the_operator_watches_its_own_namespace_unless_told_otherwise():
    assert operator_settings({"POD_NAMESPACE": "llm"}).namespaces == ("llm",)
    assert operator_settings({"KIMISTACK_NAMESPACES": "a, b"}).namespaces == ("a", "b")
    assert operator_settings({"KIMISTACK_NAMESPACES": "*"}).namespaces == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KIMISTACK_WRITE_RATE", "fast"),
        ("KIMISTACK_HTTP_PORT", "0"),
        ("KIMISTACK_LEADER_ELECTION", "maybe"),
        ("KIMISTACK_LOG_LEVEL", "loud"),
    ],
)
def test_a_wrong_setting_names_its_variable(name: str, value: str):
    with pytest.raises(ConfigError, match=name):
        operator_settings({name: value})
