"""A deployment as `kimistack capacity` sees it: a model on GPUs. Pure."""

from kimi_operator.api.roles import Role, RoleName
from kimi_operator.desired.effective import Effective
from kimi_operator.desired.fit import known_model, sharding_of
from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.capacity import K31_PRO, CapacitySpec, Shape
from kimi_runtime.spec.hardware import CPU_NODE, MI355X_NODE
from kimi_runtime.spec.worker import Role as WorkerRole


def capacity_of(effective: Effective, origin: str) -> CapacitySpec:
    """Its model, GPUs and instances. ConfigError for a model or parallelism that is not modelled.

    Decode instances without prefill ones serve whole requests.
    """
    deployment, preset = effective.deployment, effective.preset
    roles = dict(deployment.spec.roles())
    on_gpus = any(role.gpus for role in roles.values())
    alone = len(roles) == 1
    return CapacitySpec(
        name=deployment.name,
        model=_model(effective, origin),
        gpu=preset.hardware if preset else (MI355X_NODE if on_gpus else CPU_NODE).name,
        shapes=tuple(_shape(name, role, origin, alone=alone) for name, role in roles.items()),
        quantisation=preset.quantisation if preset else None,
        kv_dtype="fp8" if on_gpus else "bf16",
    )


def _model(effective: Effective, origin: str) -> str:
    model_id, preset = effective.deployment.spec.model.id, effective.preset
    if (model_id or "").rsplit("/", 1)[-1].lower().startswith(K31_PRO):
        return K31_PRO
    if preset is not None:
        return preset.architecture
    known = known_model(model_id)
    if known is None:
        raise ConfigError(
            f"{origin}: spec.model.id: {model_id!r} is no published Kimi model, so its sizes are "
            "not known; use a preset, or give capacity a file with model and gpu"
        )
    return known.name


def _shape(name: RoleName, role: Role, origin: str, *, alone: bool) -> Shape:
    parallelism = role.parallelism
    if parallelism.pp > 1:
        raise ConfigError(
            f"{origin}: spec.{name}.parallelism.pp: capacity knows no pipeline parallelism; use tp"
        )
    sharding = sharding_of(role, f"{origin}: spec.{name}.parallelism")
    groups = parallelism.gpus // max(sharding.tensor, sharding.expert)
    return Shape(
        role=WorkerRole.BOTH if alone else WorkerRole(name),
        replicas=max(role.least_replicas, 1) * max(groups, 1),
        tensor=sharding.tensor,
        expert=sharding.expert,
        kv_memory=role.limits.kv_memory,
        max_running=role.limits.max_running,
        step_tokens=role.limits.step_tokens,
    )
