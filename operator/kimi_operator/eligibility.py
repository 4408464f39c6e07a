"""Whether nodes can take the deployment's pods: which, and why the others cannot."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.api.pods import NEVER_TOLERATED
from kimi_operator.api.roles import Role, RoleName
from kimi_operator.conditions import Condition
from kimi_operator.desired.umbp import pool_resources
from kimi_operator.nodes import quantity
from kimi_operator.observed import NodeView

VALIDATION_LABELS = (
    "amd.com/cluster-validation-status",
    "amd.com/gpu-hw-acceptance",
    "amd.com/gpu-mesh-validation",
    "amd.com/nic-health",
    "amd.com/rail-bandwidth",
)
"""Written by AMD's cluster validation; a node that failed one takes no instance."""
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
    pool: Mapping[str, float]
    """What the pool's daemon takes of the node beside pods: bytes of memory and huge pages."""
    selector: Mapping[str, str]
    passed: tuple[str, ...]
    """Validation labels whose value must be `passed`."""


def demand(spec: DeploymentSpec, name: RoleName, role: Role, replicas: int) -> Demand:
    """What `replicas` instances of a role ask for."""
    pooled = spec.kv_pool.enabled and name in spec.kv_pool.roles
    pool = pool_resources(spec)["limits"] if pooled else {}
    return Demand(
        role=name,
        replicas=replicas,
        pods=role.parallelism.nodes,
        resource=role.gpu.resource or "amd.com/gpu",
        gpus=0 if role.gpu.dra is not None else role.gpus_per_pod,
        memory_bytes=quantity(role.resources.memory or "0"),
        pool={resource: quantity(amount) for resource, amount in pool.items()},
        selector=role.placement.node_selector or {},
        passed=role.placement.require_labels,
    )


def problem(node: NodeView, wanted: Demand) -> str | None:
    """Why the node cannot take a pod of the role beside other deployments'; None if it can."""
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
    if wanted.gpus > _free(node, wanted.resource):
        have = f"{node.allocatable.get(wanted.resource, 0):g} {wanted.resource}"
        return (
            f"it has {have}{_others(node, wanted.resource, 1)}, a {wanted.role} pod takes "
            f"{wanted.gpus}"
        )
    for resource, pool in {"memory": 0.0, **wanted.pool}.items():
        pod = wanted.memory_bytes if resource == "memory" else 0.0
        if pod + pool > _free(node, resource):
            return (
                f"it has {node.allocatable.get(resource, 0.0) / 2**30:.1f} GiB of {resource}"
                f"{_others(node, resource, 2**30)}, a {wanted.role} pod takes {pod / 2**30:.1f} GiB"
                f"{f' and the pool {pool / 2**30:.1f} GiB' if pool else ''}"
            )
    return None


def _free(node: NodeView, resource: str) -> float:
    taken = sum(amounts.get(resource, 0.0) for amounts in node.taken.values())
    return node.allocatable.get(resource, 0.0) - taken


def _others(node: NodeView, resource: str, unit: float) -> str:
    """What each other deployment holds of it: ` (llm/a takes 512, …)`."""
    held = {name: amounts.get(resource, 0.0) / unit for name, amounts in node.taken.items()}
    shown = [f"{name} takes {amount:.4g}" for name, amount in sorted(held.items()) if amount]
    more = [f"{len(shown) - _SHOWN} more"] if len(shown) > _SHOWN else []
    return f" ({', '.join([*shown[:_SHOWN], *more])})" if shown else ""


def nodes_eligible(
    spec: DeploymentSpec, counts: Mapping[RoleName, int], nodes: tuple[NodeView, ...] | None
) -> Condition:
    """The condition NodesEligible, with the numbers in it. `counts` are wanted instances.

    Nodes are counted as if only what other deployments request were on them. What else runs there
    is the scheduler's business, and its verdict shows in the instance's `blocked`.
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
        wanted = demand(spec, name, role, counts.get(name, 0))
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
        rooms.append(int(_free(node, wanted.resource) // wanted.gpus))
    if wanted.memory_bytes:
        memory = _free(node, "memory") - wanted.pool.get("memory", 0.0)
        rooms.append(int(memory // wanted.memory_bytes))
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
