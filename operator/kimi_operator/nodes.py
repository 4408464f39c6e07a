"""Nodes as the API has them, in whole units, and what pods request of them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Claim:
    """What one pod requests of its node: amounts by resource, in whole units."""

    node: str
    amounts: Mapping[str, float]


def claim_of(pod: Manifest) -> Claim | None:
    """The claim of a pod; None before it is scheduled and after it ended."""
    spec, phase = pod.get("spec") or {}, (pod.get("status") or {}).get("phase")
    if not spec.get("nodeName") or phase in ("Succeeded", "Failed"):
        return None
    amounts: dict[str, float] = {}
    for container in spec.get("containers") or ():
        resources = container.get("resources") or {}
        # a limit without a request is the request
        asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
        for name, amount in asked.items():
            amounts[name] = amounts.get(name, 0.0) + quantity(str(amount))
    return Claim(spec["nodeName"], amounts)


def with_taken(
    nodes: tuple[NodeView, ...] | None, taken: Mapping[str, Mapping[str, Mapping[str, float]]]
) -> tuple[NodeView, ...] | None:
    """The nodes, with what others request there: amounts by resource, deployment and node."""
    if nodes is None:
        return None
    return tuple(replace(node, taken=taken.get(node.name, {})) for node in nodes)


def lets_in_daemons(node: NodeView, tolerations: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a DaemonSet whose pods have these tolerations makes new ones for the node.

    What Kubernetes itself taints nodes with, its controller tolerates in their stead.
    """
    return all(
        taint.get("effect") not in ("NoSchedule", "NoExecute")
        or taint["key"].startswith("node.kubernetes.io/")
        or any(_tolerated(taint, one) for one in tolerations)
        for taint in node.taints
    )


def _tolerated(taint: Mapping[str, Any], by: Mapping[str, Any]) -> bool:
    if by.get("effect") not in (None, "", taint.get("effect")):
        return False
    if by.get("operator") == "Exists":
        return by.get("key") in (None, "", taint["key"])
    return by.get("key") == taint["key"] and (by.get("value") or "") == (taint.get("value") or "")


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
