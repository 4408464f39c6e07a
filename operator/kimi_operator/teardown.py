"""What is taken down, in which order, once a deployment's deletion was asked for.

Garbage collection would take all children at once, and running requests with them. So the router
goes first: it refuses new requests and ends when its running ones have. Then nobody uses decode,
then prefill, then the pool, and the rest is left to garbage collection.

A pod whose kubelet is gone never ends, and a workload deleted in the foreground stays as long as
its pods. Such a workload is let go: it is deleted, and its pods stay until their node is back or
is deleted too. So the next stage, and in the end the deployment's name, wait for nobody.
"""

from collections.abc import Iterable, Mapping

from kimi_operator.changes import KEPT_UNTIL_PODS_ARE_GONE, Delete, deletion, is_owned
from kimi_operator.observed import ROLE_LABEL, Manifest, NodeView, ObjectKey
from kimi_operator.stamps import seconds

FINALIZER = "kimistack.dev/teardown"
"""Keeps a KimiDeployment until its ordered deletion is over."""
STAGES = ("autoscaling", "router", "decode", "prefill", "umbp")
OVERDUE_S = 30.0
"""A kubelet at work has ended a pod long before its grace is over for so long."""
_SCALERS = ("HorizontalPodAutoscaler", "ScaledObject")


def stage_of(key: ObjectKey, child: Manifest) -> str | None:
    """In which stage a child goes; None: with the rest."""
    labels = child["metadata"].get("labels") or {}
    if key.kind in _SCALERS:
        return "autoscaling"
    if key.kind == "Deployment":
        return "router"
    if key.kind == "StatefulSet":
        return str(labels.get(ROLE_LABEL)) if labels.get(ROLE_LABEL) in STAGES else "decode"
    return "umbp" if key.kind == "DaemonSet" else None


def endless_pods(
    children: Mapping[ObjectKey, Manifest], nodes: Iterable[NodeView] | None, now_s: float
) -> frozenset[str]:
    """Names of pods that were asked to end and that nobody ends.

    Their node is gone or not ready, or, whatever is known of nodes, their grace is long over.
    """
    ready = None if nodes is None else {node.name for node in nodes if node.ready}
    found = set()
    for key, pod in children.items():
        asked = pod["metadata"].get("deletionTimestamp") if key.kind == "Pod" else None
        if asked is None:
            continue
        # what Kubernetes writes there is the end of the grace
        overdue = now_s - seconds(asked) > OVERDUE_S
        if overdue or (ready is not None and pod["spec"].get("nodeName") not in ready):
            found.add(key.name)
    return frozenset(found)


def next_teardown(
    children: Mapping[ObjectKey, Manifest],
    owner_uid: str,
    endless: frozenset[str] = frozenset(),
) -> tuple[str | None, tuple[Delete, ...]]:
    """The stage under way and what to delete for it now; None when all stages are over.

    `endless` are pods that nobody ends: a workload that waits for no other is let go.
    """
    staged: dict[str, list[tuple[ObjectKey, Manifest]]] = {}
    for key, child in sorted(children.items()):
        stage = stage_of(key, child) if is_owned(child, owner_uid) else None
        if stage is not None:
            staged.setdefault(stage, []).append((key, child))
    for stage in STAGES:
        if stage in staged:
            deletes = (_delete(key, child, children, endless) for key, child in staged[stage])
            return stage, tuple(one for one in deletes if one is not None)
    return None, ()


def let_go(children: Mapping[ObjectKey, Manifest], endless: frozenset[str]) -> tuple[Delete, ...]:
    """Workloads whose deletion waits for endless pods alone."""
    return tuple(
        Delete(key, child["metadata"]["uid"], foreground=False)
        for key, child in sorted(children.items())
        if key.kind in KEPT_UNTIL_PODS_ARE_GONE and "deletionTimestamp" in child["metadata"]
        if (pods := _pods_of(child, children)) and pods <= endless
    )


def _delete(
    key: ObjectKey,
    child: Manifest,
    children: Mapping[ObjectKey, Manifest],
    endless: frozenset[str],
) -> Delete | None:
    if "deletionTimestamp" not in child["metadata"]:
        return deletion(key, child)
    return next(iter(let_go({key: child, **_pods(children)}, endless)), None)


def _pods(children: Mapping[ObjectKey, Manifest]) -> dict[ObjectKey, Manifest]:
    return {key: child for key, child in children.items() if key.kind == "Pod"}


def _pods_of(workload: Manifest, children: Mapping[ObjectKey, Manifest]) -> frozenset[str]:
    selector = workload["spec"]["selector"]["matchLabels"].items()
    return frozenset(
        key.name
        for key, pod in _pods(children).items()
        if selector <= (pod["metadata"].get("labels") or {}).items()
    )
