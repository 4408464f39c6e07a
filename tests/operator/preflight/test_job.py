"""Preflight in the operator: one Job per class of nodes, its verdict, and what waits for it."""

from dataclasses import replace
from typing import Any

import pytest

from kimi_operator.api.load import validated
from kimi_operator.decide import effective_of
from kimi_operator.nodes import node_view
from kimi_operator.observed import Manifest, ObjectKey
from kimi_operator.preflight.checks import Finding
from kimi_operator.preflight.classes import node_classes
from kimi_operator.preflight.report import Report, last_words
from kimi_runtime.errors import ClusterRefused
from operator_world import NODE, World, nano

FINE = Finding(check="memory", ok=True, have="64.0 GiB", want="3.0 GiB")
SHORT = Finding(check="memory", ok=False, have="1.0 GiB", want="3.0 GiB", remedy="add memory")


def node(name: str, **allocatable: str) -> Manifest:
    status = {**NODE["status"], "allocatable": {**NODE["status"]["allocatable"], **allocatable}}
    return {**NODE, "metadata": {"name": name}, "status": status}


async def started(**spec: Any) -> World:
    world = World()
    world.create(nano(**spec))
    await world.settle()
    return world


def jobs(world: World) -> list[Manifest]:
    return world.kube.of_kind("Job")


def ended(world: World, job: Manifest, *findings: Finding, words: str | None = None) -> None:
    """Its pod as the kubelet leaves it, and its status as the controller writes it."""
    metadata = job["metadata"]
    report = Report(node="node-1", findings=findings)
    code = 0 if report.ok else 1
    owner = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
    }
    message = last_words(report) if words is None else words
    state = {"terminated": {"exitCode": code, "message": message}}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{metadata['name']}-x",
            "namespace": metadata["namespace"],
            "labels": job["spec"]["template"]["metadata"]["labels"],
            "ownerReferences": [owner],
        },
        "spec": {**job["spec"]["template"]["spec"], "nodeName": "node-1"},
        "status": {
            "phase": "Succeeded" if report.ok else "Failed",
            "containerStatuses": [{"name": "preflight", "state": state}],
        },
    }
    world.kube.put(pod, "kubelet")
    verdict = "Complete" if report.ok and words is None else "Failed"
    status = {"conditions": [{"type": verdict, "status": "True", "reason": "BackoffLimitExceeded"}]}
    world.kube.edit(ObjectKey.of(job), {"status": status}, "job", subresource="status")


async def test_disabled_looks_at_nothing_and_says_nothing():
    world = await started()
    assert jobs(world) == []
    assert "PreflightPassed" not in world.conditions


async def test_a_job_looks_at_a_node_and_its_verdict_is_a_condition():
    world = await started(preflight="Warn")
    (job,) = jobs(world)
    assert world.conditions["PreflightPassed"] == ("Unknown", "Looking")
    assert world.conditions["Ready"] == ("True", "Serving"), "a warning holds nothing back"
    ended(world, job, FINE)
    await world.settle()
    assert world.conditions["PreflightPassed"] == ("True", "Passed")


async def test_what_is_missing_is_in_the_condition_with_node_numbers_and_remedy():
    world = await started(preflight="Warn")
    (job,) = jobs(world)
    ended(world, job, SHORT)
    await world.settle()
    condition = next(
        c for c in world.resource["status"]["conditions"] if c["type"] == "PreflightPassed"
    )
    assert (condition["status"], condition["reason"]) == ("False", "ChecksFailed")
    assert "node node-1: memory: 1.0 GiB, 3.0 GiB wanted; add memory" in condition["message"]
    assert f"delete Job {job['metadata']['name']}" in condition["message"]
    assert any(
        event["reason"] == "ChecksFailed" and event["type"] == "Warning"
        for event in world.kube.of_kind("Event")
    )
    assert world.conditions["Ready"] == ("True", "Serving")


async def test_a_deleted_job_looks_again():
    world = await started(preflight="Warn")
    (job,) = jobs(world)
    ended(world, job, SHORT)
    await world.settle()
    world.kube.remove(ObjectKey.of(job))
    world.kube.collect_garbage()
    await world.settle()
    (again,) = jobs(world)
    assert again["metadata"]["uid"] != job["metadata"]["uid"]
    assert world.conditions["PreflightPassed"] == ("Unknown", "Looking")


async def test_required_no_engine_starts_before_it_passed():
    world = await started(preflight="Require")
    (job,) = jobs(world)
    assert world.kube.of_kind("StatefulSet") == []
    assert world.child("Deployment", "nano-router") is not None
    reason = world.resource["status"]["pools"]["decode"]["blocked"]
    assert "preflight: looking at node node-1" in reason
    ended(world, job, FINE)
    await world.settle()
    assert len(world.kube.of_kind("StatefulSet")) == 2
    assert world.conditions["Ready"] == ("True", "Serving")


async def test_required_and_failed_is_stalled_until_somebody_repairs_it():
    world = await started(preflight="Require")
    (job,) = jobs(world)
    ended(world, job, SHORT)
    await world.settle()
    assert world.kube.of_kind("StatefulSet") == []
    assert world.conditions["Stalled"] == ("True", "PreflightFailed")
    assert world.conditions["Ready"] == ("False", "PreflightFailed")
    world.kube.remove(ObjectKey.of(job))
    world.kube.collect_garbage()
    await world.settle()
    (again,) = jobs(world)
    ended(world, again, FINE)
    await world.settle()
    assert world.conditions["Ready"] == ("True", "Serving")


async def test_required_again_after_a_change_the_old_revision_goes_on_serving():
    world = await started(preflight="Require")
    ended(world, jobs(world)[0], FINE)
    await world.settle()
    before = [obj["metadata"]["uid"] for obj in world.kube.of_kind("StatefulSet")]
    world.edit(decode={"resources": {"memory": "5Gi"}})
    await world.settle()
    (job,) = jobs(world)
    assert [obj["metadata"]["uid"] for obj in world.kube.of_kind("StatefulSet")] == before
    assert world.conditions["Available"][0] == "True"
    ended(world, job, FINE)
    await world.settle()
    after = [obj["metadata"]["uid"] for obj in world.kube.of_kind("StatefulSet")]
    assert not set(after) & set(before)
    assert world.conditions["Ready"] == ("True", "Serving")


async def test_required_daemons_of_the_pool_are_replaced_once_it_passed():
    world = World()
    world.controllers.daemon_nodes = ("node-1",)
    world.create(nano(preflight="Require"))
    await world.settle()
    ended(world, jobs(world)[0], FINE)
    await world.settle()
    world.edit(kvPool={"dram": "256MiB"})
    await world.settle()
    world.now_s += 100  # the daemon is known to its peers
    await world.settle()

    def replaced() -> list[str]:
        return [
            call.name
            for call in world.kube.calls
            if (call.verb, call.kind) == ("delete", "Pod") and "umbp" in call.name
        ]

    assert replaced() == []
    (pool,) = [c for c in world.resource["status"]["conditions"] if c["type"] == "KVPoolReady"]
    assert "1 are of an earlier spec until preflight passes" in pool["message"]
    (job,) = jobs(world)
    ended(world, job, FINE)
    await world.settle()
    assert len(replaced()) == 1


async def test_a_quiet_pass_writes_nothing_and_an_ended_job_stays():
    world = await started(preflight="Warn")
    (job,) = jobs(world)
    ended(world, job, FINE)
    await world.settle()
    before = len(world.kube.writes)
    world.now_s += 3600
    await world.passes(5)
    assert len(world.kube.writes) == before
    world.restart()
    await world.passes(2)
    assert [one["metadata"]["uid"] for one in jobs(world)] == [job["metadata"]["uid"]]
    assert [call for call in world.kube.writes[before:] if call.kind == "Job"] == []


async def test_another_spec_of_what_no_check_asks_about_looks_no_second_time():
    world = await started(preflight="Warn")
    before = jobs(world)[0]["metadata"]["uid"]
    world.edit(rollout={"maxSurge": 1}, decode={"replicas": 2})
    await world.settle()
    assert [job["metadata"]["uid"] for job in jobs(world)] == [before]
    world.edit(kvPool={"dram": "2GiB"})
    await world.settle()
    (job,) = jobs(world)
    assert job["metadata"]["uid"] != before, "more memory is asked for"


async def test_a_pod_that_is_gone_leaves_the_jobs_own_verdict():
    world = await started(preflight="Warn")
    (job,) = jobs(world)
    ended(world, job, FINE)
    world.kube.remove(ObjectKey("v1", "Pod", "llm", f"{job['metadata']['name']}-x"))
    await world.settle()
    assert world.conditions["PreflightPassed"] == ("True", "Passed")


async def test_a_pod_that_broke_is_not_taken_for_a_verdict():
    world = await started(preflight="Require")
    (job,) = jobs(world)
    ended(world, job, SHORT, words="Traceback: no such option")
    await world.settle()
    assert world.conditions["PreflightPassed"] == ("Unknown", "CouldNotLook")
    assert world.kube.of_kind("StatefulSet") == []


async def test_switched_off_its_jobs_go():
    world = await started(preflight="Warn")
    world.edit(preflight="Disabled")
    await world.settle()
    assert jobs(world) == []
    assert "PreflightPassed" not in world.conditions


async def test_nodes_that_may_not_be_listed_are_said_and_hold_back_only_what_requires_them():
    world = World()

    def forbidden(call: Any) -> None:
        if call.kind == "v1/Node":
            raise ClusterRefused("nodes is forbidden", code=403)

    world.kube.before = forbidden
    world.create(nano(preflight="Warn"))
    await world.settle()
    assert world.conditions["PreflightPassed"] == ("Unknown", "NodesNotReadable")
    assert world.conditions["Ready"] == ("True", "Serving")


def classes(*nodes: Manifest, **spec: Any) -> list[tuple[str, ...]]:
    resource = nano(**spec)
    resource["metadata"] |= {"uid": "u", "generation": 1}
    deployment = effective_of(resource).deployment
    return [one.nodes for one in node_classes(deployment.spec, [node_view(n) for n in nodes])]


def test_like_nodes_are_one_class_and_what_differs_makes_another():
    first, second = node("a"), node("b")
    assert classes(second, first) == [("a", "b")]
    assert len(classes(first, node("c", memory="128Gi"))) == 2
    assert len(classes(first, node("c", **{"hugepages-2Mi": "1Gi"}))) == 2
    assert classes(first, node("c", memory="65Gi")) == [("a", "c")], "firmware keeps that much"


def test_a_node_that_fits_no_role_is_in_no_class():
    small = node("small", memory="1Gi")
    assert classes(node("a"), small) == [("a",)]
    assert classes(small) == []


def test_a_kubelet_that_restarts_makes_no_new_class():
    resource = nano()
    spec = validated(resource, "file").spec
    ready = node_view(node("a"))
    other = node_view(node("b"))
    away = replace(ready, ready=False)
    (before,), (after,) = node_classes(spec, [ready, other]), node_classes(spec, [away, other])
    assert before.digest == after.digest
    assert after.nodes == ("b", "a"), "the one that is ready is looked at"


@pytest.mark.parametrize("profile", ["Restricted", "Privileged"])
async def test_its_pod_has_no_right_and_only_reads(profile: str):
    world = await started(preflight="Warn", security={"profile": profile})
    (job,) = jobs(world)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsUser"] == (65532 if profile == "Restricted" else 0)
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert all(mount["readOnly"] for mount in container["volumeMounts"])
    assert "amd.com/gpu" not in container["resources"].get("limits", {})
    assert job["spec"]["backoffLimit"] == 0
