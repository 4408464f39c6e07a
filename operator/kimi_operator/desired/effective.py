"""The effective spec: preset, defaults and what the user wrote, each value with its origin.

It is resolved once per revision and frozen, so that a newer preset changes no running deployment.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import yaml
from pydantic.alias_generators import to_camel

from kimi_operator.api.deployment import ROLES, KimiDeployment
from kimi_operator.api.load import validated
from kimi_operator.api.model import ONLY_WITH
from kimi_operator.api.roles import Role
from kimi_operator.desired.fit import check_fits
from kimi_operator.desired.merge import Path, Tree, holds, leaves, overlay
from kimi_operator.presets.preset import Preset
from kimi_runtime.errors import ConfigError

Origin = Literal["user", "preset", "default"]
GetPreset = Callable[[str], Preset]


@dataclass(frozen=True)
class Effective:
    """A deployment whose spec writes every field, and where each came from.

    `spec` is that spec as plain data, `written` what the user wrote of it.
    """

    deployment: KimiDeployment
    spec: Tree
    written: Tree
    origins: dict[Path, Origin]
    preset: Preset | None

    def as_text(self) -> str:
        """The resource as YAML that can be loaded again, each value with its origin behind it."""
        return "\n".join([*self._head(), *_lines(self.spec, self.origins, (), "  ")]) + "\n"

    def as_written_text(self) -> str:
        """The resource as YAML with what the user wrote, and no more."""
        body = yaml.safe_dump({"spec": self.written}, sort_keys=False, width=100)
        return "\n".join(self._head()).removesuffix("spec:") + body

    def _head(self) -> list[str]:
        deployment = self.deployment
        namespace = deployment.metadata.namespace
        return [
            f"apiVersion: {deployment.api_version}",
            f"kind: {deployment.kind}",
            "metadata:",
            f"  name: {deployment.name}",
            *([f"  namespace: {namespace}"] if namespace else []),
            "spec:",
        ]


def resolve(deployment: KimiDeployment, get_preset: GetPreset, origin: str) -> Effective:
    """The effective deployment; `origin` (a file, an object's name) leads every error.

    Raises ConfigError for a rule that presets and defaults bring to light (a parallelism that does
    not divide the model, an image that nothing names), CapacityError for what does not fit a GPU.
    """
    user = deployment.written()
    preset = get_preset(deployment.spec.preset) if deployment.spec.preset else None
    base = _preset_values(preset, user, deployment.spec.engine, get_preset, origin)
    spec = overlay(base, user)
    if not any(role in spec for role in ROLES):
        spec["decode"] = {}
    settled = _settled(validated(_document(deployment, spec), origin))
    filled = _filled(settled)
    effective = validated(_document(deployment, filled), origin)
    if effective.spec.image is None and effective.spec.model.source not in (
        "local",
        "packaged",
        "random",
    ):
        raise ConfigError(
            f"{origin}: spec.image: nothing names an image for engine {effective.spec.engine}; "
            "write one, by digest"
        )
    check_fits(effective, preset, origin)
    origins: dict[Path, Origin] = {
        path: "user" if holds(user, path) else "preset" if holds(base, path) else "default"
        for path in leaves(filled)
    }
    return Effective(effective, filled, user, origins, preset)


def _document(deployment: KimiDeployment, spec: Tree) -> Tree:
    metadata = deployment.metadata.model_dump(exclude_unset=True)
    return {
        "apiVersion": deployment.api_version,
        "kind": deployment.kind,
        "metadata": metadata,
        "spec": spec,
    }


def _preset_values(
    preset: Preset | None, user: Tree, engine: str, get_preset: GetPreset, origin: str
) -> Tree:
    """What the presets contribute: only what the user's own choices leave meaningful."""
    base = _engine_values(preset, engine, origin) if preset else {}
    written: list[str] = [role for role in ROLES if role in user]
    unwritten = ["decode"] if preset and preset.aggregated else list(ROLES)
    wanted = written or unwritten
    for role in ROLES:
        if role not in wanted:
            base.pop(role, None)
            continue
        other = user.get(role, {}).get("configPreset")
        if other is not None:
            base[role] = _engine_values(get_preset(other), engine, origin).get(role, {})
    return _without_what_the_user_replaced(base, user)


def _engine_values(preset: Preset, engine: str, origin: str) -> Tree:
    if engine not in preset.engines:
        raise ConfigError(
            f"{origin}: spec.engine: preset {preset.name} has no values for engine {engine}; it "
            f"has them for {', '.join(preset.engines)}"
        )
    return overlay(preset.spec, preset.engines[engine])


def _without_what_the_user_replaced(base: Tree, user: Tree) -> Tree:
    """Drop preset values that contradict a choice of the user (another source, DRA, a scaler)."""
    base = dict(base)
    source = user.get("model", {}).get("source")
    if source is not None and "model" in base:
        other = {to_camel(field) for field, fits in ONLY_WITH.items() if source not in fits}
        base["model"] = {k: v for k, v in base["model"].items() if k not in other}
    for role in ROLES:
        mine = user.get(role, {})
        values = dict(base.get(role, {}))
        if mine.get("scaling", {}).get("mode", "Static") != "Static":
            values.pop("replicas", None)
        if "dra" in mine.get("gpu", {}) and "gpu" in values:
            values["gpu"] = {k: v for k, v in values["gpu"].items() if k != "resource"}
        if role in base:
            base[role] = values
    return base


def _settled(deployment: KimiDeployment) -> KimiDeployment:
    """Defaults that follow from other values."""
    spec = deployment.spec
    transfer = spec.transfer
    if transfer.backend is None:
        no_cards = spec.rdma.mode == "none" and (spec.rdma.allow_tcp or spec.prefill is None)
        ours = "tcp" if no_cards else "verbs"
        backend = ours if spec.engine == "kimistack" else "mori"
        transfer = transfer.model_copy(update={"backend": backend})
    model = spec.model
    if model.source == "random" and model.seed is None:
        model = model.model_copy(update={"seed": 0})
    if model.served_name is None:
        model = model.model_copy(update={"served_name": deployment.name})
    roles: dict[str, Role] = {}
    for name, role in spec.roles():
        gpu = role.gpu
        if gpu.resource is None and gpu.dra is None and role.gpus_per_pod:
            gpu = gpu.model_copy(update={"resource": "amd.com/gpu"})
        roles[name] = role.model_copy(
            update={"gpu": gpu.model_copy(update={"per_pod": role.gpus_per_pod})}
        )
    update: dict[str, Any] = {"transfer": transfer, "model": model, **roles}
    return deployment.model_copy(update={"spec": spec.model_copy(update=update)})


def _filled(deployment: KimiDeployment) -> Tree:
    """Every field of the spec, but not a replica count that somebody else writes."""
    filled: Tree = deployment.spec.model_dump(mode="json")
    for name, role in deployment.spec.roles():
        if role.scaling.mode != "Static":
            del filled[name]["replicas"]
    return filled


def _lines(tree: Tree, origins: Mapping[Path, Origin], at: Path, indent: str) -> list[str]:
    lines = []
    for key, value in tree.items():
        path = (*at, key)
        if isinstance(value, dict) and value:
            below = _lines(value, origins, path, indent + "  ")
            lines += [f"{indent}{key}:", *below] if below else []
        elif value is not None:
            lines.append(f"{indent}{key}: {_inline(value)}  # {origins[path]}")
    return lines


def _inline(value: Any) -> str:
    return (
        yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()
    )
