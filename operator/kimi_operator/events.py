"""Events for people, on transitions only."""

import hashlib
from collections.abc import Mapping
from typing import Any

from kimi_operator.conditions import Transition
from kimi_operator.observed import Manifest

COMPONENT = "kimi-operator"
TOLD = frozenset(
    {"Ready", "Progressing", "Stalled", "Degraded", "NodesEligible", "PreflightPassed"}
)
_BAD = {
    ("Ready", "False"),
    ("Stalled", "True"),
    ("Degraded", "True"),
    ("NodesEligible", "False"),
    ("PreflightPassed", "False"),
}
_QUIET = {
    ("Stalled", "False"),
    ("Degraded", "False"),
    ("NodesEligible", "True"),
    ("PreflightPassed", "Unknown"),
}


def event_of(resource: Mapping[str, Any], transition: Transition, now: str) -> Manifest | None:
    """The Event that tells of a transition; None for one that nobody needs to be told of.

    Its name is derived, so that a pass that is repeated after a crash writes no second one.
    """
    kind = (transition.type, transition.status)
    begun = transition.reason == "Reconciling"
    if transition.type not in TOLD or kind in _QUIET or begun:
        return None
    metadata = resource["metadata"]
    parts = (metadata["uid"], *kind, transition.reason, metadata["resourceVersion"])
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()[:16]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{metadata['name']}.{digest}",
            "namespace": metadata.get("namespace"),
        },
        "involvedObject": {
            "apiVersion": resource["apiVersion"],
            "kind": resource["kind"],
            "name": metadata["name"],
            "namespace": metadata.get("namespace"),
            "uid": metadata["uid"],
            "resourceVersion": metadata["resourceVersion"],
        },
        "type": "Warning" if kind in _BAD and _is_bad(transition) else "Normal",
        "reason": transition.reason,
        "message": f"{transition.type}={transition.status}: {transition.message}"[:1024],
        "source": {"component": COMPONENT},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def _is_bad(transition: Transition) -> bool:
    """Not ready yet is no warning; not ready for a reason that waiting does not cure is."""
    waiting = ("Creating", "Loading", "PoolNotReady", "RollingOut", "RouterNotReady", "Scheduling")
    return transition.type != "Ready" or transition.reason not in waiting
