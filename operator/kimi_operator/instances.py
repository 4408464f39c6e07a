"""Instances as their StatefulSets and pods show them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import get_args

from kimi_operator.api.roles import RoleName
from kimi_operator.changes import is_owned
from kimi_operator.observed import (
    DRAINING_LABEL,
    DRAINING_SINCE,
    EVICT,
    INSTANCE_LABEL,
    REVISION_LABEL,
    ROLE_LABEL,
    InstanceId,
    InstanceView,
    Manifest,
    ObjectKey,
)
from kimi_operator.stamps import ready_since_s, seconds

ROLES: tuple[str, ...] = get_args(RoleName)
BROKEN = frozenset(
    {
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "RunContainerError",
    }
)
"""Reasons of a waiting container that no waiting cures."""
DOUBTED_FOR_S = 120.0
"""What is amiss with a pod for longer than this is not its node's silence."""


@dataclass(frozen=True)
class LoadReport:
    """What the worker in a pod says of itself."""

    in_flight: int
    cached_tokens: int | None = None


def instance_id(labels: Mapping[str, str]) -> InstanceId | None:
    """Which instance an object with these labels belongs to, if to any."""
    role, index = labels.get(ROLE_LABEL, ""), labels.get(INSTANCE_LABEL, "")
    if role not in ROLES or REVISION_LABEL not in labels or not index.isdigit():
        return None
    return InstanceId(role, labels[REVISION_LABEL], int(index))  # type: ignore[arg-type]


def instance_views(
    children: Mapping[ObjectKey, Manifest],
    owner_uid: str,
    loads: Mapping[str, LoadReport],
) -> tuple[InstanceView, ...]:
    """Every instance there is, by id. `loads` has load reports by pod name."""
    sets: dict[InstanceId, Manifest] = {}
    pods: dict[str, list[Manifest]] = {}
    for key, child in children.items():
        if key.kind == "StatefulSet" and is_owned(child, owner_uid):
            found = instance_id(child["metadata"].get("labels") or {})
            if found is not None:
                sets[found] = child
        elif key.kind == "Pod":
            for owner in child["metadata"].get("ownerReferences", ()):
                pods.setdefault(owner["uid"], []).append(child)
    return tuple(
        _view(found, sets[found], pods.get(sets[found]["metadata"]["uid"], []), loads)
        for found in sorted(sets)
    )


def _view(
    found: InstanceId,
    stateful_set: Manifest,
    pods: list[Manifest],
    loads: Mapping[str, LoadReport],
) -> InstanceView:
    desired = int(stateful_set["spec"].get("replicas", 1))
    terminating = "deletionTimestamp" in stateful_set["metadata"]
    running = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    ready = [since for pod in running if (since := ready_since_s(pod)) is not None]
    draining = [pod for pod in pods if _labels(pod).get(DRAINING_LABEL) == "true"]
    reports = [loads[name] for pod in pods if (name := pod["metadata"]["name"]) in loads]
    cached = [report.cached_tokens for report in reports if report.cached_tokens is not None]
    whole = len(ready) >= desired > 0
    return InstanceView(
        id=found,
        pods_desired=desired,
        pods_ready=len(ready),
        serving=whole and not draining and not terminating,
        draining=bool(draining),
        in_flight=sum(report.in_flight for report in reports) if reports else None,
        cached_tokens=sum(cached) if cached else None,
        created_s=seconds(stateful_set["metadata"].get("creationTimestamp")),
        ready_since_s=max(ready) if whole else None,
        failures=tuple(failure for pod in running for failure in pod_failures(pod)),
        pods_scheduled=sum(1 for pod in running if pod["spec"].get("nodeName")),
        nodes=tuple(
            sorted({pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName")})
        ),
        terminating=terminating,
        draining_since_s=_draining_since_s(draining),
        pods_made=len(running),
        pods_not_started=tuple(
            sorted(pod["metadata"]["name"] for pod in running if not_started(pod))
        ),
        evicted=(stateful_set["metadata"].get("annotations") or {}).get(EVICT) == "true",
    )


def _labels(pod: Manifest) -> Mapping[str, str]:
    return pod["metadata"].get("labels") or {}


def _draining_since_s(pods: Iterable[Manifest]) -> float | None:
    times = [
        float(since)
        for pod in pods
        if (since := (pod["metadata"].get("annotations") or {}).get(DRAINING_SINCE, ""))
        .replace(".", "", 1)
        .isdigit()
    ]
    return min(times) if times else None


def pod_failures(pod: Manifest) -> tuple[str, ...]:
    """What keeps a pod from running that waiting does not cure, one line each."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    found = [
        f"{condition.get('reason', 'Unschedulable')}: {name}: {condition.get('message', '')}"
        for condition in status.get("conditions") or ()
        if condition["type"] == "PodScheduled" and condition["status"] == "False"
    ]
    for part in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(part) or ():
            failure = _container_failure(container)
            if failure is not None:
                reason, why = failure
                found.append(f"{reason}: {name}/{container['name']}: {why}")
    if status.get("phase") == "Failed":
        found.append(f"{status.get('reason', 'Failed')}: {name}: {status.get('message', '')}")
    return tuple(" ".join(line.split())[:500] for line in found)


def _container_failure(container: Manifest) -> tuple[str, str] | None:
    """Reason and text, the same ones while the kubelet goes from one try to the next."""
    waiting = container.get("state", {}).get("waiting") or {}
    reason, last = waiting.get("reason"), container.get("lastState", {}).get("terminated") or {}
    if reason in ("ErrImagePull", "ImagePullBackOff"):
        image = container.get("image") or "?"
        return (
            "ImagePullBackOff",
            f"image {image} cannot be pulled; check its name and tag and spec.imagePullSecrets, "
            "kubectl describe pod has the registry's answer",
        )
    tries = not container.get("ready") and container.get("restartCount", 0) > 1 and last
    if reason == "CrashLoopBackOff" or (tries and last.get("exitCode")):
        how = f"it ends with exit code {last['exitCode']}" if "exitCode" in last else "it ends"
        by_itself = last.get("reason") in (None, "Error")
        why = "" if by_itself else f" ({last['reason']})"
        # what a runtime says of a container may differ from one try to the next
        words = last.get("message") if by_itself else None
        shown = words or "kubectl logs --previous shows its last words"
        return "CrashLoopBackOff", f"{how}{why}; {shown}"
    if reason in BROKEN:
        return str(reason), waiting.get("message") or last.get("reason") or ""
    return None


def not_started(pod: Manifest) -> bool:
    """Whether the pod is on a node and the kubelet has started no container of it yet."""
    status = pod.get("status", {})
    containers = [
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ]
    begun = any({"running", "terminated"} & (c.get("state") or {}).keys() for c in containers)
    return bool(pod["spec"].get("nodeName")) and not begun and status.get("phase") == "Pending"


def fixable_by_recreation(pod: Manifest, update_revision: str) -> bool:
    """Whether the pod is broken and of an older template than its StatefulSet has by now.

    A StatefulSet never replaces a pod that never became ready, so a corrected image would wait for
    ever (kubernetes/kubernetes#67250).
    """
    labels = _labels(pod)
    stale = labels.get("controller-revision-hash", update_revision) != update_revision
    return stale and ready_since_s(pod) is None and bool(pod_failures(pod))


def doubtful_pods(children: Mapping[ObjectKey, Manifest], now_s: float) -> frozenset[str]:
    """Pods that may be on a lost node, by what the API has said of them of late.

    The node controller takes a pod's readiness away when its node falls silent; what the kubelet
    last said of the containers stays. One that was to be deleted is still there.
    """
    return frozenset(
        key.name
        for key, pod in children.items()
        if key.kind == "Pod" and pod["spec"].get("nodeName")
        if (since_s := _doubted_since_s(pod)) is not None and now_s - since_s <= DOUBTED_FOR_S
    )


def _doubted_since_s(pod: Manifest) -> float | None:
    if "deletionTimestamp" in pod["metadata"]:
        return seconds(pod["metadata"]["deletionTimestamp"])
    status = pod.get("status", {})
    containers = status.get("containerStatuses") or ()
    if not containers or not all(one.get("ready") for one in containers):
        return None
    for condition in status.get("conditions") or ():
        if condition["type"] == "Ready" and condition["status"] != "True":
            return seconds(condition.get("lastTransitionTime"))
    return None


def broken_pods(children: Mapping[ObjectKey, Manifest]) -> tuple[Manifest, ...]:
    """Pods that their StatefulSet would wait for in vain; see `fixable_by_recreation`."""
    newest = {
        child["metadata"]["uid"]: (child.get("status") or {}).get("updateRevision", "")
        for key, child in children.items()
        if key.kind == "StatefulSet"
    }
    return tuple(
        child
        for key, child in children.items()
        if key.kind == "Pod" and "deletionTimestamp" not in child["metadata"]
        for owner in child["metadata"].get("ownerReferences", ())
        if (revision := newest.get(owner["uid"])) and fixable_by_recreation(child, revision)
    )


def drain_patches(
    children: Mapping[ObjectKey, Manifest],
    drain: frozenset[InstanceId],
    stay: frozenset[InstanceId],
    now_s: float,
) -> dict[ObjectKey, Manifest]:
    """By pod, the merge patch that marks it as draining, or takes the mark away again.

    Only instances that `stay` lose the mark: one that is about to be deleted keeps it to its end.
    """
    patches: dict[ObjectKey, Manifest] = {}
    for key, child in sorted(children.items()):
        if key.kind != "Pod" or "deletionTimestamp" in child["metadata"]:
            continue
        found = instance_id(_labels(child))
        wanted = found in drain
        marked = _labels(child).get(DRAINING_LABEL) == "true"
        if wanted != marked and (wanted or found in stay):
            patches[key] = {
                "metadata": {
                    "labels": {DRAINING_LABEL: "true" if wanted else None},
                    "annotations": {DRAINING_SINCE: f"{now_s:.0f}" if wanted else None},
                }
            }
    return patches
