"""Whether a model's dimensions and weights fit the parallelism and the GPUs that are asked for."""

from kimi_operator.api.deployment import KimiDeployment
from kimi_operator.api.roles import Role
from kimi_operator.presets.preset import Preset
from kimi_runtime.errors import CapacityError, ConfigError
from kimi_runtime.spec.hardware import NODES, NodeSpec
from kimi_runtime.spec.model import ModelSpec
from kimi_runtime.spec.parallel import Sharding, check_divides, kv_room
from kimi_runtime.spec.published import PUBLISHED
from kimi_runtime.units import format_bytes


def known_model(model_id: str | None) -> ModelSpec | None:
    """The published model an id stands for: its last part starts with the model's name."""
    last = (model_id or "").rsplit("/", 1)[-1].lower()
    names = [name for name in PUBLISHED if last == name or last.startswith(f"{name}-")]
    return PUBLISHED[max(names, key=len)] if names else None


def check_fits(deployment: KimiDeployment, preset: Preset | None, origin: str) -> None:
    """ConfigError or CapacityError, naming the role, if a role's shape cannot hold the model.

    Nothing is checked of a model whose dimensions are unknown here (its own config.json has them):
    the worker refuses it.
    """
    model = PUBLISHED[preset.architecture] if preset else known_model(deployment.spec.model.id)
    if model is None or deployment.spec.model.config is not None:
        return
    node = NODES[preset.hardware] if preset else None
    for name, role in deployment.spec.roles():
        sharding = sharding_of(role, f"{origin}: spec.{name}.parallelism")
        try:
            check_divides(model, sharding, quantisation=preset.quantisation if preset else None)
        except ConfigError as exc:
            raise ConfigError(f"{origin}: spec.{name}.parallelism: {exc}") from exc
        if node is not None and role.gpus:
            _check_node(name, role, node, origin)
            _check_memory(name, role, model, sharding, preset, node)


def sharding_of(role: Role, where: str) -> Sharding:
    """Tensor ranks of attention and of experts. Raises ConfigError for an ep that fits neither."""
    p = role.parallelism
    tensor = p.tp // p.dp if p.dp_attention else p.tp
    expert = p.ep or 1
    if expert > 1 and expert % tensor:
        raise ConfigError(
            f"{where}.ep: {expert} expert ranks are no multiple of the {tensor} tensor ranks of "
            "attention"
        )
    return Sharding(tensor=tensor, expert=expert)


def _check_node(name: str, role: Role, node: NodeSpec, origin: str) -> None:
    if role.gpus_per_pod > node.gpus:
        raise ConfigError(
            f"{origin}: spec.{name}.parallelism: a pod would take {role.gpus_per_pod} GPUs, but a "
            f"{node.name} node has {node.gpus}; raise parallelism.nodes"
        )


def _check_memory(
    name: str,
    role: Role,
    model: ModelSpec,
    sharding: Sharding,
    preset: Preset | None,
    node: NodeSpec,
) -> None:
    room = kv_room(model, node.gpu, sharding, quantisation=preset.quantisation if preset else None)
    wanted = role.limits.kv_memory
    if wanted is not None and wanted > room:
        raise CapacityError(
            f"spec.{name}.limits.kvMemory of {format_bytes(wanted)} per GPU",
            need=f"{wanted / 2**30:.1f} GiB beside the weights of {model.name}",
            have=f"{room / 2**30:.1f} GiB left",
            where=f"a {node.gpu.name} at tensor size {sharding.tensor}",
            fix="lower kvMemory, or use more GPUs an instance",
        )
