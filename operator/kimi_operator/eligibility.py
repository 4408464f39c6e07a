"""Whether nodes can take the deployment's pods: which, and why the others cannot."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.api.pods import NEVER_TOLERATED
from kimi_operator.api.roles import Role, RoleName
from kimi_operator.conditions import Condition
from kimi_operator.observed import NodeView

VALIDATION_LABELS = (
    "amd.com/cluster-validation-status",
    "amd.com/gpu-hw-acceptance",
    "amd.com/gpu-mesh-validation",
    "amd.com/nic-health",
    "amd.com/rail-bandwidth",
)
"""Written by AMD's cluster validation; a node that failed one takes no instance."""
_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SHOWN = 5


@dataclass(frozen=True)
class Demand:
    """What one pod of a role asks of a node."""

    role: RoleName
    replicas: int
    pods: int
    resource: str
    gpus: int
    memory_bytes: float
    selector: Mapping[str, str]
    passed: tuple[str, ...]
    """Validation labels whose value must be `passed`."""


def memory_bytes(quantity: str | None) -> float:
    """Bytes of a memory quantity as roles have it (`256Gi`); 0 for none."""
    if not quantity:
        return 0.0
    unit = quantity[-2:]
    return float(quantity.removesuffix(unit)) * _UNITS[unit] if unit in _UNITS else float(quantity)


def demand(name: RoleName, role: Role, replicas: int) -> Demand:
    """What `replicas` instances of a role ask for."""
    return Demand(
        role=name,
        replicas=replicas,
        pods=role.parallelism.nodes,
        resource=role.gpu.resource or "amd.com/gpu",
        gpus=0 if role.gpu.dra is not None else role.gpus_per_pod,
        memory_bytes=memory_bytes(role.resources.memory),
        selector=role.placement.node_selector or {},
        passed=role.placement.require_labels,
    )


def problem(node: NodeView, wanted: Demand) -> str | None:
    """Why the node cannot take a pod of the role even when it is empty; None if it can."""
    if not node.ready:
        return "it is not Ready"
    if node.unschedulable:
        return "it is cordoned"
    for taint in node.taints:
        if taint["key"] in NEVER_TOLERATED and taint.get("effect") in ("NoSchedule", "NoExecute"):
            return f"it has the taint {taint['key']}"
    for label in VALIDATION_LABELS:
        if node.labels.get(label) == "failed":
            return f"its label {label} is failed"
    for label, value in [*wanted.selector.items(), *((name, "passed") for name in wanted.passed)]:
        if node.labels.get(label) != value:
            return f"its label {label} is {node.labels.get(label, 'missing')}, not {value}"
    have = node.allocatable.get(wanted.resource, 0)
    if have < wanted.gpus:
        return f"it has {have:g} {wanted.resource}, a {wanted.role} pod takes {wanted.gpus}"
    memory = node.allocatable.get("memory", 0.0)
    if wanted.memory_bytes > memory:
        return (
            f"it has {memory / 2**30:.1f} GiB of memory, a {wanted.role} pod takes "
            f"{wanted.memory_bytes / 2**30:.1f} GiB"
        )
    return None


def nodes_eligible(
    spec: DeploymentSpec, counts: Mapping[RoleName, int], nodes: tuple[NodeView, ...] | None
) -> Condition:
    """The condition NodesEligible, with the numbers in it. `counts` are wanted instances.

    It counts nodes as if they were empty: what else runs there is the scheduler's business, and
    its verdict shows in the instance's `blocked`.
    """
    kind = "NodesEligible"
    if nodes is None:
        return Condition(
            kind,
            None,
            "NodesNotReadable",
            "the operator may not list nodes; grant it the ClusterRole that the chart has for it",
        )
    short: list[str] = []
    for name, role in spec.roles():
        wanted = demand(name, role, counts.get(name, 0))
        problems = {node.name: problem(node, wanted) for node in nodes}
        fit = [node for node in nodes if problems[node.name] is None]
        places = sum(_places(node, wanted) for node in fit)
        need = wanted.replicas * wanted.pods
        if need > places:
            short.append(
                f"{name}: {need} pods of {wanted.gpus} {wanted.resource} are wanted, "
                f"{len(fit)} of {len(nodes)} nodes have room for {places}{_why(problems)}"
            )
    if short:
        return Condition(kind, False, "TooFewNodes", "; ".join(short))
    return Condition(kind, True, "Eligible", f"{len(nodes)} nodes were looked at")


def _places(node: NodeView, wanted: Demand) -> int:
    rooms = [int(node.allocatable.get("pods", 110))]
    if wanted.gpus:
        rooms.append(int(node.allocatable.get(wanted.resource, 0) // wanted.gpus))
    if wanted.memory_bytes:
        rooms.append(int(node.allocatable.get("memory", 0.0) // wanted.memory_bytes))
    return min(rooms)


def _why(problems: Mapping[str, str | None]) -> str:
    counted = Counter(why for why in problems.values() if why is not None)
    if not counted:
        return ""
    first = {why: name for name, why in reversed(list(problems.items())) if why is not None}
    shown = [
        f"{first[why]}{f' and {count - 1} more' if count > 1 else ''}: {why}"
        for why, count in counted.most_common(_SHOWN)
    ]
    return f" ({'; '.join(shown)})"
