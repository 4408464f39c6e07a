"""`kimistack plan`: read the cluster, and say what a spec would change. Nothing is written."""

import sys
from pathlib import Path
from typing import Any

from kimi_operator.api.deployment import KimiDeployment
from kimi_operator.api.load import MAX_FILE_BYTES, load_deployment, parse_deployment
from kimi_operator.kube import Kube
from kimi_operator.kubectl.sight import DEPLOYMENTS, look_at_all, nodes_of
from kimi_operator.observed import InstanceId, ObjectKey
from kimi_operator.plan import Plan, plan_of, resource_of, wanted_keys
from kimi_operator.rollout import Stage
from kimi_runtime.errors import ConfigError


def deployment_from(file: str) -> KimiDeployment:
    """The deployment of a file, or of standard input for `-`. Raises ConfigError."""
    if file != "-":
        return load_deployment(Path(file))
    text = sys.stdin.read(MAX_FILE_BYTES + 1)
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"standard input: larger than {MAX_FILE_BYTES} bytes")
    return parse_deployment(text, "standard input")


def namespace_of(deployment: KimiDeployment, flag: str | None, default: str) -> str:
    """Where the deployment goes. Raises ConfigError where file and flag name different ones."""
    written = deployment.metadata.namespace
    if flag and written and flag != written:
        raise ConfigError(
            f"the file says namespace {written}, the command line {flag}; leave one of them out"
        )
    return written or default


async def plan_for(kube: Kube, deployment: KimiDeployment, namespace: str, now_s: float) -> Plan:
    """The plan against what the cluster has now. Raises ConfigError, ClusterError."""
    capabilities = await kube.capabilities()
    if not capabilities.serves(DEPLOYMENTS):
        raise ConfigError(
            "the cluster has no KimiDeployments: their CRD is not installed; install it with "
            "kimistack install"
        )
    sight = await look_at_all(kube, namespace, deployment.name, capabilities)
    observed = sight.observed(capabilities, await nodes_of(kube))
    resource = resource_of(deployment, namespace, sight.resource)
    plan = plan_of(resource, sight.resource, observed, now_s)
    taken = [key for key in wanted_keys(plan) if await _is_taken(kube, key)]
    return plan_of(resource, sight.resource, observed, now_s, taken=taken) if taken else plan


async def _is_taken(kube: Kube, key: ObjectKey) -> bool:
    """Whether an object without our label has the name, which a list by label does not show."""
    return await kube.get(key) is not None


def as_data(plan: Plan) -> dict[str, Any]:
    """The plan as plain data, for programs."""
    return {
        "namespace": plan.namespace,
        "name": plan.name,
        "exists": plan.exists,
        "empty": plan.empty,
        "refused": plan.refusal
        and {
            "reason": plan.refusal.reason,
            "message": plan.refusal.message,
        },
        "spec": [vars(change) for change in plan.spec],
        "objects": [
            {
                "action": change.action,
                **_named(change.key),
                "fields": [vars(field) for field in change.fields],
            }
            for change in plan.changes
        ],
        "createdOnce": [_named(key) for key in plan.once],
        "taken": [_named(key) for key in plan.taken],
        "rollout": {
            "from": plan.current_revision,
            "to": plan.update_revision,
            "outage": plan.outage,
            "waitsFor": plan.waits,
            "passes": [_pass(stage) for stage in plan.stages],
            "daemons": {"nodes": list(plan.daemons), "by": plan.daemons_by},
        },
        "warnings": [
            {"type": c.type, "reason": c.reason, "message": c.message} for c in plan.warnings
        ],
    }


def _named(key: ObjectKey) -> dict[str, str]:
    return {"apiVersion": key.api_version, "kind": key.kind, "name": key.name}


def _pass(stage: Stage) -> dict[str, Any]:
    return {
        "step": stage.step,
        "totalSteps": stage.total_steps,
        "create": names(stage.created),
        "drain": names(stage.drained),
        "keep": names(stage.kept_again),
        "serving": dict(stage.serving),
        "gpus": stage.gpus,
        "done": stage.done,
        "waitsFor": stage.waiting_for,
        "outage": stage.outage,
    }


def names(instances: tuple[InstanceId, ...]) -> list[str]:
    """Names of instances, as everywhere in messages."""
    return [f"{i.role}-{i.revision}-{i.index}" for i in instances]
