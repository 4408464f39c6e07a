"""What is taken down, in which order, once a deployment's deletion was asked for.

Garbage collection would take all children at once, and running requests with them. So the router
goes first: it refuses new requests and ends when its running ones have. Then nobody uses decode,
then prefill, then the pool, and the rest is left to garbage collection.
"""

from collections.abc import Mapping

from kimi_operator.changes import Delete, deletion, is_owned
from kimi_operator.observed import ROLE_LABEL, Manifest, ObjectKey

FINALIZER = "kimistack.dev/teardown"
"""Keeps a KimiDeployment until its ordered deletion is over."""
STAGES = ("autoscaling", "router", "decode", "prefill", "umbp")
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


def next_teardown(
    children: Mapping[ObjectKey, Manifest], owner_uid: str
) -> tuple[str | None, tuple[Delete, ...]]:
    """The stage under way and what to delete for it now; None when all stages are over."""
    staged: dict[str, list[tuple[ObjectKey, Manifest]]] = {}
    for key, child in sorted(children.items()):
        stage = stage_of(key, child) if is_owned(child, owner_uid) else None
        if stage is not None:
            staged.setdefault(stage, []).append((key, child))
    for stage in STAGES:
        if stage in staged:
            return stage, tuple(
                deletion(key, child)
                for key, child in staged[stage]
                if "deletionTimestamp" not in child["metadata"]
            )
    return None, ()
