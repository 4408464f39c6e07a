"""The scale of a role, what writes it, and how many pods may be evicted at once."""

from typing import Any

from kimi_operator.api.base import API_VERSION
from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.api.roles import Role, RoleName
from kimi_operator.api.scaling import Metric, ScalingBehavior
from kimi_operator.desired.dashboard import POD_LABEL_DEPLOYMENT
from kimi_operator.desired.labels import Owner, metadata_of, selector_of
from kimi_operator.desired.left_out import LeftOut
from kimi_operator.desired.monitoring import METRIC_NAMES, POD_LABEL_ROLE
from kimi_operator.desired.names import role_name, router_name
from kimi_operator.observed import (
    DEPLOYMENT_LABEL,
    ROLE_LABEL,
    Capabilities,
    Manifest,
)

PROMETHEUS_ANNOTATION = "kimistack.dev/prometheus"
"""Annotation of the KimiDeployment: the address KEDA asks, e.g. http://prometheus.monitoring:9090.
"""
SCALED_OBJECT = "keda.sh/v1alpha1/ScaledObject"
HPA_VERSIONS = ("autoscaling/v2", "autoscaling/v2beta2")
PDB_VERSIONS = ("policy/v1", "policy/v1beta1")


def workers(owner: Owner, name: RoleName) -> Manifest:
    """The role's KimiWorkers. Its replicas are not ours to apply: there is one writer."""
    return {
        "apiVersion": API_VERSION,
        "kind": "KimiWorkers",
        "metadata": metadata_of(
            owner, role_name(owner.name, name), "engine", labels={ROLE_LABEL: name}
        ),
        "spec": {"deployment": owner.name, "role": name},
    }


def autoscaler(
    owner: Owner,
    spec: DeploymentSpec,
    name: RoleName,
    role: Role,
    capabilities: Capabilities,
    prometheus: str | None,
) -> Manifest | LeftOut | None:
    """The autoscaler of a role: what writes its KimiWorkers, where the spec asks for one."""
    external = role.scaling.external
    if external is None or external.render is None:
        return None
    what = "HorizontalPodAutoscaler" if external.render == "hpa" else "ScaledObject"
    unknown = [
        m.type for m in role.scaling.metrics if METRIC_NAMES[spec.engine].get(m.type) is None
    ]
    if unknown:
        return LeftOut(
            f"{what} {role_name(owner.name, name)}",
            f"engine {spec.engine} reports no metric for {', '.join(unknown)}; use "
            f"{', '.join(sorted(METRIC_NAMES[spec.engine])) or 'scaling.mode Managed'}",
        )
    if external.render == "hpa":
        return _hpa(owner, spec, name, role, capabilities)
    return _scaled_object(owner, spec, name, role, capabilities, prometheus)


def _hpa(
    owner: Owner, spec: DeploymentSpec, name: RoleName, role: Role, capabilities: Capabilities
) -> Manifest | LeftOut:
    version = next(
        (v for v in HPA_VERSIONS if capabilities.serves(f"{v}/HorizontalPodAutoscaler")), None
    )
    full = role_name(owner.name, name)
    if version is None:
        return LeftOut(f"HorizontalPodAutoscaler {full}", "the server serves none with pod metrics")
    scaling = role.scaling
    body: Manifest = {
        "scaleTargetRef": {"apiVersion": API_VERSION, "kind": "KimiWorkers", "name": full},
        # an autoscaler of pods cannot see load while there is no pod
        "minReplicas": max(1, scaling.min),
        "maxReplicas": scaling.max,
        "metrics": [_pod_metric(spec, metric) for metric in scaling.metrics],
    }
    behavior = _behavior(role)
    if behavior:
        body["behavior"] = behavior
    return {
        "apiVersion": version,
        "kind": "HorizontalPodAutoscaler",
        "metadata": metadata_of(owner, full, "engine", labels={ROLE_LABEL: name}),
        "spec": body,
    }


def _pod_metric(spec: DeploymentSpec, metric: Metric) -> Manifest:
    found = METRIC_NAMES[spec.engine][metric.type]
    # a usage is a share of one, the target is in percent
    value = f"{metric.target * 10}m" if metric.type == "KvUsage" else str(metric.target)
    target = {"type": "AverageValue", "averageValue": value}
    return {"type": "Pods", "pods": {"metric": {"name": found}, "target": target}}


def _behavior(role: Role) -> Manifest:
    external = role.scaling.external
    written: ScalingBehavior = (external and external.behavior) or ScalingBehavior()
    data: Manifest = written.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    down = data.setdefault("scaleDown", {})
    # Kubernetes accepts an hour at the most
    down.setdefault("stabilizationWindowSeconds", min(3600, round(role.scaling.scale_down_delay)))
    return data


def _scaled_object(
    owner: Owner,
    spec: DeploymentSpec,
    name: RoleName,
    role: Role,
    capabilities: Capabilities,
    prometheus: str | None,
) -> Manifest | LeftOut:
    full = role_name(owner.name, name)
    if not capabilities.serves(SCALED_OBJECT):
        return LeftOut(f"ScaledObject {full}", "KEDA is not installed in this cluster")
    if prometheus is None:
        return LeftOut(
            f"ScaledObject {full}",
            f"KEDA must know which Prometheus to ask: write its address in the annotation "
            f"{PROMETHEUS_ANNOTATION} of the KimiDeployment",
        )
    scaling = role.scaling
    return {
        "apiVersion": SCALED_OBJECT.rpartition("/")[0],
        "kind": "ScaledObject",
        "metadata": metadata_of(owner, full, "engine", labels={ROLE_LABEL: name}),
        "spec": {
            "scaleTargetRef": {"apiVersion": API_VERSION, "kind": "KimiWorkers", "name": full},
            "minReplicaCount": scaling.min,
            "maxReplicaCount": scaling.max,
            "cooldownPeriod": round(scaling.scale_down_delay),
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _behavior(role)}},
            "triggers": [_trigger(owner, spec, name, m, prometheus) for m in scaling.metrics],
        },
    }


def _trigger(
    owner: Owner, spec: DeploymentSpec, name: RoleName, metric: Metric, prometheus: str
) -> Manifest:
    found = METRIC_NAMES[spec.engine][metric.type]
    where = (
        f'namespace="{owner.namespace}",{POD_LABEL_DEPLOYMENT}="{owner.name}",'
        f'{POD_LABEL_ROLE}="{name}"'
    )
    scale = "100 * " if metric.type == "KvUsage" else ""
    query = f"{scale}sum({found}{{{where}}})"
    return {
        "type": "prometheus",
        "metricType": "AverageValue",
        "metadata": {
            "serverAddress": prometheus,
            "query": query,
            "threshold": str(metric.target),
        },
    }


def disruption_budgets(
    owner: Owner, spec: DeploymentSpec, capabilities: Capabilities
) -> list[Manifest] | LeftOut:
    """How many pods of the router and of each role a node's drain may evict at once.

    A role may lose the instances a rollout may take down, and at least one: with none, no node
    with an engine could ever be emptied.
    """
    version = next(
        (v for v in PDB_VERSIONS if capabilities.serves(f"{v}/PodDisruptionBudget")), None
    )
    if version is None:
        return LeftOut("PodDisruptionBudgets", "the server does not serve them")
    selector = selector_of(owner, "router")
    budgets = [_budget(version, owner, router_name(owner.name), 1, selector, router=True)]
    for name, role in spec.roles():
        pods = max(1, spec.rollout.max_unavailable) * role.parallelism.nodes
        selector = {DEPLOYMENT_LABEL: owner.name, ROLE_LABEL: name}
        full = role_name(owner.name, name)
        budgets.append(_budget(version, owner, full, pods, selector, router=False))
    return budgets


def _budget(
    version: str, owner: Owner, name: str, pods: int, selector: dict[str, str], *, router: bool
) -> Manifest:
    body: dict[str, Any] = {"maxUnavailable": pods, "selector": {"matchLabels": selector}}
    return {
        "apiVersion": version,
        "kind": "PodDisruptionBudget",
        "metadata": metadata_of(owner, name, "router" if router else "engine"),
        "spec": body,
    }


def claim_template(owner: Owner, name: RoleName, role: Role, kind: str) -> Manifest:
    """The ResourceClaimTemplate that gives each pod of a role its GPUs."""
    dra = role.gpu.dra
    if dra is None:
        raise AssertionError("asked for by roles with dra only")
    exactly: Manifest = {
        "deviceClassName": dra.device_class,
        "allocationMode": "ExactCount",
        "count": role.gpus_per_pod,
    }
    if dra.selectors:
        exactly["selectors"] = [{"cel": {"expression": text}} for text in dra.selectors]
    return {
        "apiVersion": kind.rpartition("/")[0],
        "kind": "ResourceClaimTemplate",
        "metadata": metadata_of(owner, f"{owner.name}-{name}-gpus", "engine"),
        "spec": {"spec": {"devices": {"requests": [{"name": "gpus", "exactly": exactly}]}}},
    }
