"""The status of a KimiDeployment: conditions, counts, revisions, addresses."""

from collections.abc import Mapping, Sequence
from typing import Any

from kimi_operator.api.deployment import KimiDeployment
from kimi_operator.api.roles import RoleName
from kimi_operator.api.status import LIST_CAP
from kimi_operator.conditions import Condition, stamped
from kimi_operator.observed import (
    DEPLOYMENT_LABEL,
    INSTANCE_LABEL,
    ROLE_LABEL,
    InstanceView,
    Manifest,
    ObjectKey,
    Observed,
)
from kimi_operator.verdicts import (
    Facts,
    Problem,
    blocked,
    conditions_of,
    count,
    name_of,
    url_of,
    workload,
)

OWNERS = {"Static": "Spec", "External": "External", "Managed": "Planner"}


def status_of(facts: Facts, previous: Mapping[str, Any], now: str) -> dict[str, Any]:
    """The whole status; `now` is an RFC 3339 time."""
    deployment, observed, step = facts.deployment, facts.observed, facts.step
    generation = deployment.metadata.generation or 0
    router = workload(observed, "Deployment", "router")
    pool = workload(observed, "DaemonSet", "umbp")
    roles = {name: _role_status(facts, name) for name, _ in deployment.spec.roles()}
    url = url_of(deployment)
    status: dict[str, Any] = {
        "observedGeneration": generation,
        "conditions": stamped(
            conditions_of(facts, router, pool),
            previous.get("conditions") or (),
            generation,
            now,
        ),
        "model": deployment.spec.model.served_name,
        "pools": roles,
        "currentRevision": step.serving_revision or None,
        "updateRevision": facts.update_revision,
        "rollout": _rollout(facts, previous, now),
        "url": url,
        "endpoints": [url, *_outside(observed, deployment)][:LIST_CAP],
        "kvPool": _pool_status(pool),
        "gpu": {"used": _gpus(facts), "budget": deployment.spec.budget.max_gpus},
        "recommendation": facts.recommendation,
        **_placement(deployment, observed.instances),
    }
    return _written(status)


def _written(tree: dict[str, Any]) -> dict[str, Any]:
    """Without what is None, which an API server would not keep."""
    return {
        name: _written(value) if isinstance(value, dict) else value
        for name, value in tree.items()
        if value is not None
    }


def unable_status(
    generation: int, problem: Problem, previous: Mapping[str, Any], now: str
) -> dict[str, Any]:
    """The status of a resource that nothing can be derived from; what was known stays."""
    doing = Condition("Reconciling", not problem.stalled, problem.reason, problem.message)
    stalled = Condition("Stalled", problem.stalled, problem.reason, problem.message)
    ready = Condition("Ready", False, problem.reason, problem.message)
    before = previous.get("conditions") or ()
    new = stamped((ready, doing, stalled), before, generation, now)
    named = {condition["type"] for condition in new}
    kept = [dict(condition) for condition in before if condition["type"] not in named]
    return {**previous, "observedGeneration": generation, "conditions": new + kept}


def first_status(generation: int, now: str) -> dict[str, Any]:
    """What is written before anything is done: without it kstatus takes the resource for done."""
    begun = "the operator has begun"
    conditions = (
        Condition("Ready", False, "Reconciling", begun),
        Condition("Reconciling", True, "Reconciling", begun),
        Condition("Stalled", False, "Reconciling", begun),
    )
    return {
        "observedGeneration": generation,
        "conditions": stamped(conditions, (), generation, now),
    }


def _role_status(facts: Facts, name: RoleName) -> dict[str, Any]:
    role = dict(facts.deployment.spec.roles())[name]
    mine = [i for i in facts.observed.instances if i.id.role == name]
    desired = facts.targets.get(name, 0)
    ready = sum(1 for i in mine if i.ready)
    revisions = [i.id.revision for i in mine]
    return {
        "summary": f"{ready}/{desired}",
        "desired": desired,
        "current": len(mine),
        "scheduled": sum(1 for i in mine if i.pods_scheduled >= i.pods_desired > 0),
        "ready": ready,
        "serving": sum(1 for i in mine if i.serving),
        "updated": revisions.count(facts.update_revision),
        "revision": max(sorted(set(revisions)), key=revisions.count, default=None),
        "owner": OWNERS[role.scaling.mode],
        "selector": selector_of_role(facts.deployment.name, name),
        "blocked": None if ready >= desired else blocked(facts, name)[:4096],
    }


def selector_of_role(deployment: str, role: RoleName) -> str:
    """Selects the first pod of each instance of a role, so that averages are per instance."""
    # the ordinal-0 pods of the role's StatefulSets are the ones that serve
    return f"{DEPLOYMENT_LABEL}={deployment},{ROLE_LABEL}={role},{INSTANCE_LABEL}"


def _rollout(facts: Facts, previous: Mapping[str, Any], now: str) -> dict[str, Any] | None:
    step = facts.step
    if step.done:
        return None
    before = previous.get("rollout") or {}
    same = previous.get("updateRevision") == facts.update_revision
    started = before.get("startedAt") if same else None
    return {"step": step.step, "total": step.total_steps, "startedAt": started or now}


def _placement(deployment: KimiDeployment, instances: Sequence[InstanceView]) -> dict[str, Any]:
    placed = [i for i in instances if i.nodes]
    shown = [{"instance": name_of(i), "nodes": list(i.nodes[:16])} for i in placed[:LIST_CAP]]
    more = len(placed) - len(shown)
    return {"placement": shown, "more": more or None}


def _gpus(facts: Facts) -> int:
    roles = dict(facts.deployment.spec.roles())
    return sum(roles[i.id.role].gpus for i in facts.observed.instances if i.id.role in roles)


def _pool_status(pool: Manifest | None) -> dict[str, Any] | None:
    if pool is None:
        return None
    return {
        "nodes": count(pool, "numberReady"),
        "desired": count(pool, "desiredNumberScheduled"),
    }


def _outside(observed: Observed, deployment: KimiDeployment) -> list[str]:
    """Addresses of the router's load balancer."""
    key = ObjectKey(
        "v1", "Service", deployment.metadata.namespace or "default", f"{deployment.name}-router"
    )
    balancer = observed.children.get(key, {}).get("status", {}).get("loadBalancer") or {}
    port = deployment.spec.router.service.port
    hosts = [entry.get("hostname") or entry.get("ip") for entry in balancer.get("ingress") or ()]
    return [f"http://{host}:{port}/v1" for host in hosts if host]
