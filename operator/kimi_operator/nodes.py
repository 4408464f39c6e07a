"""Nodes as the API has them, in whole units."""

from kimi_operator.observed import Manifest, NodeView
from kimi_operator.stamps import seconds

_FACTORS = {
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
    "Pi": 2.0**50,
}


def quantity(text: str) -> float:
    """A Kubernetes quantity (`7500m`, `1.5Ti`, `8`, `1e3`) as a number."""
    for unit in (text[-2:], text[-1:]):
        if unit in _FACTORS:
            return float(text.removesuffix(unit)) * _FACTORS[unit]
    return float(text)


def node_view(node: Manifest) -> NodeView:
    """A Node as decisions see it."""
    spec, status = node.get("spec") or {}, node.get("status") or {}
    told: Manifest = next((c for c in status.get("conditions") or () if c["type"] == "Ready"), {})
    ready = told.get("status") == "True"
    return NodeView(
        name=node["metadata"]["name"],
        labels=node["metadata"].get("labels") or {},
        taints=tuple(spec.get("taints") or ()),
        allocatable={k: quantity(str(v)) for k, v in (status.get("allocatable") or {}).items()},
        ready=ready,
        unschedulable=bool(spec.get("unschedulable")),
        unready_since_s=None if ready else seconds(told.get("lastTransitionTime")) or None,
    )
