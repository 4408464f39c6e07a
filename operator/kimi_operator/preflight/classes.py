"""Nodes that are alike for a deployment: one of each class is looked at. Pure.

Nodes are alike if the roles that fit them are the same, if they carry the same values of the labels
that selectors use, and if they offer the same devices, huge pages and, nearly, memory. Whether a
node is ready or cordoned just now makes no class: it would come and go with every restart of a
kubelet, and be looked at again each time.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.api.roles import RoleName
from kimi_operator.desired.names import digest_of
from kimi_operator.desired.placement import PARTITION_LABELS, PRODUCT_LABEL
from kimi_operator.eligibility import VALIDATION_LABELS, demand, problem
from kimi_operator.observed import NodeView

MEMORY_STEP = 2**33
"""Allocatable memory of like machines differs by some hundred MiB: what firmware keeps."""


@dataclass(frozen=True)
class NodeClass:
    """`nodes` by name, the one to look at first; `roles` are those whose pods fit there."""

    digest: str
    roles: tuple[RoleName, ...]
    nodes: tuple[str, ...]

    def __str__(self) -> str:
        """`node-1 (and 3 like it)`."""
        more = len(self.nodes) - 1
        return f"{self.nodes[0]} (and {more} like it)" if more else self.nodes[0]


def node_classes(spec: DeploymentSpec, nodes: Sequence[NodeView]) -> tuple[NodeClass, ...]:
    """The classes of the nodes where engines may run, in a stable order."""
    labels = _labels_used(spec)
    grouped: dict[str, tuple[tuple[RoleName, ...], list[NodeView]]] = {}
    for node in sorted(nodes, key=lambda node: node.name):
        roles = _roles(spec, node)
        if not roles:
            continue
        key = digest_of([roles, _values(node, labels), _offers(spec, node)])[:8]
        grouped.setdefault(key, (roles, []))[1].append(node)
    return tuple(
        NodeClass(digest, roles, tuple(node.name for node in _usable_first(members)))
        for digest, (roles, members) in sorted(grouped.items())
    )


def _usable_first(nodes: Iterable[NodeView]) -> list[NodeView]:
    return sorted(nodes, key=lambda node: (not node.ready, node.unschedulable, node.name))


def _roles(spec: DeploymentSpec, node: NodeView) -> tuple[RoleName, ...]:
    # what the pool takes is looked at by the Job, which says more of what is missing
    at_rest = replace(node, ready=True, unschedulable=False, taken={})
    alone = {name: replace(demand(spec, name, role, 1), pool={}) for name, role in spec.roles()}
    return tuple(name for name, wanted in alone.items() if problem(at_rest, wanted) is None)


def _labels_used(spec: DeploymentSpec) -> tuple[str, ...]:
    used = {PRODUCT_LABEL, *PARTITION_LABELS, *VALIDATION_LABELS}
    for _, role in spec.roles():
        used |= {*(role.placement.node_selector or {}), *role.placement.require_labels}
    return tuple(sorted(used))


def _values(node: NodeView, labels: Iterable[str]) -> dict[str, str]:
    return {label: node.labels[label] for label in labels if label in node.labels}


def _offers(spec: DeploymentSpec, node: NodeView) -> Mapping[str, float]:
    resources = {role.gpu.resource for _, role in spec.roles()} | {spec.rdma.resource}
    offers = {
        name: amount
        for name, amount in sorted(node.allocatable.items())
        if name in resources or name.startswith("hugepages-")
    }
    return offers | {"memory": round(node.allocatable.get("memory", 0.0) / MEMORY_STEP)}
