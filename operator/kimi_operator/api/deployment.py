"""`KimiDeployment`: one served model, as people write it and as the cluster stores it."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kimi_operator.api.base import (
    API_VERSION,
    ApiModel,
    Name,
    Rule,
    UpdateRule,
    given,
    implies,
    keyed,
    presettable,
    value_or,
)
from kimi_operator.api.kvpool import KvPool
from kimi_operator.api.limits import ServingLimits
from kimi_operator.api.metadata import NAME_CAP, ObjectMeta
from kimi_operator.api.model import LoraAdapter, ModelSource
from kimi_operator.api.rdma import KIMISTACK_BACKENDS, OTHER_BACKENDS, Rdma, Transfer
from kimi_operator.api.roles import SHAPE_MESSAGE, Role, RoleName, fits_cel, gpu_cel
from kimi_operator.api.rollout import Budget, Rollout
from kimi_operator.api.router import Router
from kimi_operator.api.security import Observability, Security
from kimi_operator.api.status import DeploymentStatus

Engine = Literal["kimistack", "sglang", "vllm", "atom"]
ROLES: tuple[RoleName, ...] = ("prefill", "decode")
PRIVILEGED_MODES = ("hostDevice",)


def _backend_fits(spec: "DeploymentSpec") -> bool:
    allowed = KIMISTACK_BACKENDS if spec.engine == "kimistack" else OTHER_BACKENDS
    return spec.transfer.backend is None or spec.transfer.backend in allowed


def _crosses_by_rdma(spec: "DeploymentSpec") -> bool:
    chosen = spec.rdma.allow_tcp or spec.transfer.backend in ("shm", "tcp")
    return spec.prefill is None or spec.rdma.mode != "none" or chosen or spec.may_change


def _verbs_have_cards(spec: "DeploymentSpec") -> bool:
    by_verbs = spec.prefill is not None and spec.transfer.backend == "verbs"
    return not by_verbs or spec.rdma.mode != "none"


def _images_agree(spec: "DeploymentSpec") -> bool:
    return spec.rollout.allow_mixed_images or all(role.image is None for _, role in spec.roles())


def _static_gpus(spec: "DeploymentSpec") -> int:
    return sum(role.least_replicas * role.gpus for _, role in spec.roles())


def _profile_covers_rdma(spec: "DeploymentSpec") -> bool:
    if spec.rdma.mode in PRIVILEGED_MODES:
        return spec.security.profile == "Privileged"
    return spec.rdma.mode == "none" or spec.security.profile != "Restricted"


def _shape_rule(role: RoleName) -> Rule:
    def holds(spec: "DeploymentSpec") -> bool:
        part: Role | None = getattr(spec, role)
        return part is None or spec.may_change or part.shape_fits

    return Rule(
        SHAPE_MESSAGE,
        holds,
        implies(f"!has(self.preset) && has(self.{role})", fits_cel(f"self.{role}")),
        field=f"{role}.parallelism",
        figures=lambda spec: getattr(spec, role).shape_figures,
    )


def _role_gpus_cel(role: RoleName) -> str:
    at = f"self.{role}"
    replicas = (
        f"({given(f'{at}.scaling.mode')} && {at}.scaling.mode != 'Static' ? "
        f"{value_or(f'{at}.scaling.min', '1')} : {value_or(f'{at}.replicas', '1')})"
    )
    on_cpu = f"{given(f'{at}.gpu.perPod')} && {at}.gpu.perPod == 0"
    return f"(!has({at}) || ({on_cpu}) ? 0 : {replicas} * {gpu_cel(at)})"


_ENGINE_IS_OURS = "self.engine == 'kimistack'"
_RDMA_MODE = value_or("self.rdma.mode", "'none'")
_PROFILE = value_or("self.security.profile", "'Restricted'")


class DeploymentSpec(ApiModel):
    """What is wanted. Everything omitted comes from the preset, then from defaults."""

    engine: Engine = Field("kimistack", description="The engine that runs the model. Immutable.")
    preset: Name | None = Field(
        None, description="Values for a model on a GPU, e.g. kimi-k2.6-mxfp4/mi355x."
    )
    image: Name | None = presettable(None, "Image of the engine pods; pin it by digest.")
    image_pull_secrets: Annotated[tuple[Name, ...], Field(max_length=16)] = Field(
        (), description="Names of image pull Secrets."
    )
    image_pull_policy: Literal["IfNotPresent", "Always", "Never"] = Field(
        "IfNotPresent", description="As in a pod."
    )
    model: ModelSource = Field(ModelSource(), description="The served model.")
    limits: ServingLimits = Field(ServingLimits(), description="What holds for every role.")
    prefill: Role | None = Field(
        None, description="Prefill instances; omit it and decode serves whole requests."
    )
    decode: Role | None = Field(
        None, description="Decode instances; omit both roles to have the preset's."
    )
    transfer: Transfer = Field(Transfer(), description="How KV moves from prefill to decode.")
    rdma: Rdma = Field(Rdma(), description="How pods reach RDMA network cards.")
    kv_pool: KvPool = Field(KvPool(), description="KV cache beyond the GPUs.")
    router: Router = Field(Router(), description="The front door.")
    rollout: Rollout = Field(Rollout(), description="How changes reach the pods.")
    budget: Budget = Field(Budget(), description="What all roles together may take.")
    adapters: Annotated[tuple[LoraAdapter, ...], Field(max_length=64)] = Field(
        (),
        description="LoRA adapters.",
        json_schema_extra=keyed("name"),
    )
    security: Security = Field(Security(), description="Privilege and reach.")
    observability: Observability = Field(Observability(), description="What is observed.")
    preflight: Literal["Disabled", "Warn", "Require"] = presettable(
        "Disabled",
        "Have a Job look at a node of each kind (GPUs, RDMA ports, huge pages, memory, disks); its "
        "verdict is the condition PreflightPassed. Require: no instance starts before that holds.",
    )
    suspend: Literal["None", "Reconcile", "Scale"] = Field(
        "None", description="Reconcile: change nothing any more. Scale: no instance runs."
    )
    restart_token: Name | None = Field(
        None, description="Any text; a new one restarts all instances in order."
    )

    update_rules: ClassVar = (
        UpdateRule(
            "engine is immutable: it decides flags, ports and wire formats; create a new "
            "KimiDeployment",
            lambda old, new: old.engine == new.engine,
            "self.engine == oldSelf.engine",
        ),
    )
    rules: ClassVar = (
        Rule(
            "write preset or model: nothing says which model to serve",
            lambda m: m.preset is not None or m.wrote("model"),
            "has(self.preset) || has(self.model)",
        ),
        Rule(
            "model needs source where no preset sets it",
            lambda m: m.may_change or m.model.source is not None,
            implies("!has(self.preset) && has(self.model)", "has(self.model.source)"),
            field="model.source",
        ),
        Rule(
            "prefill needs decode: write both, or decode alone to serve whole requests",
            lambda m: m.prefill is None or m.decode is not None,
            implies("has(self.prefill)", "has(self.decode)"),
            field="decode",
        ),
        _shape_rule("prefill"),
        _shape_rule("decode"),
        Rule(
            "transfer.backend is verbs, tcp or shm for engine kimistack, mori or mooncake for the "
            "others",
            _backend_fits,
            implies(
                given("self.transfer.backend"),
                f"({_ENGINE_IS_OURS}) == (self.transfer.backend in ['verbs', 'tcp', 'shm'])",
            ),
            field="transfer.backend",
        ),
        Rule(
            "prefill and decode on different nodes hand KV over by RDMA: set rdma.mode, or accept "
            "a slow hand-off with transfer.backend: tcp or rdma.allowTCP: true",
            _crosses_by_rdma,
            implies(
                "has(self.prefill) && !has(self.preset)",
                f"{_RDMA_MODE} != 'none' || {value_or('self.rdma.allowTCP', 'false')} || "
                f"{value_or('self.transfer.backend', repr(''))} in ['shm', 'tcp']",
            ),
            field="rdma.mode",
        ),
        Rule(
            "transfer.backend verbs needs rdma.mode: without it pods have no network card to use",
            _verbs_have_cards,
            implies(
                f"has(self.prefill) && {value_or('self.transfer.backend', repr(''))} == 'verbs'",
                f"{_RDMA_MODE} != 'none'",
            ),
            field="rdma.mode",
        ),
        Rule(
            "prefill and decode of different images may not understand each other: set image once, "
            "or rollout.allowMixedImages: true",
            _images_agree,
            implies(
                "(has(self.prefill) && has(self.prefill.image)) || "
                "(has(self.decode) && has(self.decode.image))",
                value_or("self.rollout.allowMixedImages", "false"),
            ),
        ),
        Rule(
            "vllm needs the same tp for prefill and decode",
            lambda m: (
                m.engine != "vllm"
                or m.prefill is None
                or m.decode is None
                or m.may_change
                or m.prefill.parallelism.tp == m.decode.parallelism.tp
            ),
            implies(
                "self.engine == 'vllm' && !has(self.preset) && has(self.prefill) && "
                "has(self.decode)",
                f"{value_or('self.prefill.parallelism.tp', '1')} == "
                f"{value_or('self.decode.parallelism.tp', '1')}",
            ),
            field="decode.parallelism.tp",
        ),
        Rule(
            "engine kimistack takes no engineArgs; its settings are fields (limits, env)",
            lambda m: m.engine != "kimistack" or not any(r.engine_args for _, r in m.roles()),
            implies(
                _ENGINE_IS_OURS,
                "!(has(self.prefill) && has(self.prefill.engineArgs) && "
                "size(self.prefill.engineArgs) > 0) && !(has(self.decode) && "
                "has(self.decode.engineArgs) && size(self.decode.engineArgs) > 0)",
            ),
        ),
        Rule(
            "engine kimistack serves no LoRA adapters",
            lambda m: m.engine != "kimistack" or not m.adapters,
            implies(_ENGINE_IS_OURS, "!has(self.adapters) || size(self.adapters) == 0"),
            field="adapters",
        ),
        Rule(
            "packaged and random weights are known to engine kimistack only",
            lambda m: m.engine == "kimistack" or m.model.source not in ("packaged", "random"),
            implies(
                f"{given('self.model.source')} && self.model.source in ['packaged', 'random']",
                _ENGINE_IS_OURS,
            ),
            field="model.source",
        ),
        Rule(
            "security.profile does not cover rdma.mode: hostDevice needs Privileged, the other "
            "modes RDMA",
            _profile_covers_rdma,
            f"{_RDMA_MODE} == 'hostDevice' ? {_PROFILE} == 'Privileged' : "
            f"({_RDMA_MODE} == 'none' || {_PROFILE} != 'Restricted')",
            field="security.profile",
        ),
        Rule(
            "kvPool.numaNodes needs security.profile: RDMA or Privileged: to bind memory to a node "
            "takes a capability",
            lambda m: not m.kv_pool.numa_nodes or m.security.profile != "Restricted",
            implies(
                "has(self.kvPool) && has(self.kvPool.numaNodes) && size(self.kvPool.numaNodes) > 0",
                f"{_PROFILE} != 'Restricted'",
            ),
            field="security.profile",
        ),
        Rule(
            "kvPool.gpuAccess: HipIpc needs security.profile: Privileged",
            lambda m: m.kv_pool.gpu_access == "None" or m.security.profile == "Privileged",
            implies(
                f"{value_or('self.kvPool.gpuAccess', repr('None'))} != 'None'",
                f"{_PROFILE} == 'Privileged'",
            ),
            field="security.profile",
        ),
        Rule(
            "the instances there are at the least take more GPUs than budget.maxGPUs",
            lambda m: (
                m.budget.max_gpus is None or m.may_change or _static_gpus(m) <= m.budget.max_gpus
            ),
            implies(
                f"!has(self.preset) && {given('self.budget.maxGPUs')}",
                f"{_role_gpus_cel('prefill')} + {_role_gpus_cel('decode')} <= self.budget.maxGPUs",
            ),
            field="budget.maxGPUs",
            figures=lambda m: f"they take {_static_gpus(m)}, the budget is {m.budget.max_gpus}",
        ),
    )

    @property
    def may_change(self) -> bool:
        """Whether a preset, not yet resolved, may set what is not written here.

        A resolved spec writes every field, so all rules apply to it.
        """
        return self.preset is not None and not self.wrote(*type(self).model_fields)

    def roles(self) -> Iterator[tuple[RoleName, Role]]:
        """The roles there are, prefill first."""
        for name in ROLES:
            role: Role | None = getattr(self, name)
            if role is not None:
                yield name, role


class KimiDeployment(ApiModel):
    """A served Kimi model: prefill and decode instances, a KV-cache pool and a router."""

    api_version: Literal["kimistack.dev/v1alpha1"] = Field(
        API_VERSION, description="Version of this schema."
    )
    kind: Literal["KimiDeployment"] = Field("KimiDeployment", description="Kind of object.")
    metadata: ObjectMeta = Field(description="Name and labels.")
    spec: DeploymentSpec = Field(description="What is wanted.")
    status: DeploymentStatus | None = Field(None, description="What is; the operator writes it.")

    rules: ClassVar = (
        Rule(
            f"metadata.name must be a DNS label that starts with a letter, of at most {NAME_CAP} "
            "characters: names of pods and labels are derived from it",
            # ObjectMeta checks it field by field; the API server's schema of metadata is fixed
            lambda m: len(m.metadata.name) <= NAME_CAP,
            f"size(self.metadata.name) <= {NAME_CAP} && "
            "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        ),
    )

    @property
    def name(self) -> str:
        """The deployment's name, from which all others are derived."""
        return self.metadata.name

    def written(self) -> dict[str, Any]:
        """The spec's fields that were given, as plain data with the names of the YAML."""
        data: dict[str, Any] = self.spec.model_dump(
            mode="json", exclude_unset=True, exclude_none=True
        )
        return data
