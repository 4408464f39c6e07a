"""A role of the deployment (prefill or decode): how many instances, of what shape."""

import re
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Gt
from pydantic import Field, NonNegativeInt, PositiveInt

from kimi_operator.api.base import (
    ApiModel,
    FreeForm,
    Name,
    Rule,
    StringMap,
    Text,
    given,
    implies,
    keyed,
    presettable,
    value_or,
)
from kimi_operator.api.pods import Drain, EnvVar, Placement, Probes, Resources
from kimi_operator.api.scaling import Scaling
from kimi_runtime.units import Bytes

RESERVED_FLAGS = (
    "config",
    "d(p|ata-parallel)-size",
    "disaggregation-(mode|transfer-backend|bootstrap-port|ib-device)",
    "dist-init-addr",
    "host",
    "kv-transfer-config",
    "model(-path)?",
    "n(nodes|ode-rank)",
    "p(p|ipeline-parallel)-size",
    "(server-)?port",
    "served-model-name",
    "t(p|ensor-parallel)-size",
)
"""Flags of the engines (as patterns, without dashes) that other fields of the spec decide."""
_RESERVED = f"^--({'|'.join(RESERVED_FLAGS)})(=.*)?$"


class Parallelism(ApiModel):
    """How one instance is spread over GPUs and nodes."""

    tp: PositiveInt = presettable(1, "Tensor parallel size.")
    pp: PositiveInt = presettable(1, "Pipeline parallel size.")
    dp: PositiveInt = presettable(1, "Data parallel size; within tp with dpAttention.")
    ep: PositiveInt | None = presettable(None, "Expert parallel size; none: experts go by tp.")
    dp_attention: bool = presettable(
        False, "Attention data-parallel over the tp GPUs, experts over all of them."
    )
    nodes: PositiveInt = presettable(1, "Nodes (pods) of one instance.")

    rules: ClassVar = (
        Rule(
            "with dpAttention, dp must divide tp",
            lambda m: not (m.dp_attention and m.wrote("tp", "dp")) or m.tp % m.dp == 0,
            implies(
                "has(self.dpAttention) && self.dpAttention && has(self.tp) && has(self.dp)",
                "self.tp % self.dp == 0",
            ),
            field="dp",
            figures=lambda m: f"tp is {m.tp}, dp is {m.dp}",
        ),
        Rule(
            "ep must divide tp x dp",
            lambda m: m.ep is None or not m.wrote("tp", "dp") or (m.tp * m.dp) % m.ep == 0,
            implies(
                "has(self.ep) && has(self.tp) && has(self.dp)",
                "(self.tp * self.dp) % self.ep == 0",
            ),
            field="ep",
            figures=lambda m: f"ep is {m.ep}, tp x dp is {m.tp * m.dp}",
        ),
    )

    @property
    def gpus(self) -> int:
        """GPUs of one instance: tp x pp, and dp where attention does not share the tp GPUs."""
        return self.tp * self.pp * (1 if self.dp_attention else self.dp)


class Dra(ApiModel):
    """GPUs by dynamic resource allocation."""

    device_class: Name = Field("gpu.amd.com", description="The DeviceClass.")
    selectors: Annotated[tuple[Text, ...], Field(max_length=8)] = Field(
        (), description="CEL expressions a device must meet."
    )


class Gpu(ApiModel):
    """Which GPUs a pod gets."""

    resource: Name | None = presettable(
        None, "Extended resource of the device plugin; none (and no dra): amd.com/gpu."
    )
    per_pod: NonNegativeInt | None = presettable(
        None, "GPUs of one pod; none: what the parallelism takes. 0: the engine runs on the CPU."
    )
    product: Name | None = presettable(None, "Wanted value of amd.com/gpu.product-name.")
    partition: Name | None = presettable(None, "Wanted partition, e.g. spx_nps1.")
    dra: Dra | None = Field(None, description="Dynamic resource allocation, not a device plugin.")

    rules: ClassVar = (
        Rule(
            "write resource or dra, not both: a node has a device plugin or a DRA driver",
            lambda m: m.resource is None or m.dra is None,
            "!(has(self.resource) && has(self.dra))",
        ),
    )


class RoleLimits(ApiModel):
    """How much one instance takes on at once."""

    kv_memory: Annotated[Bytes, Gt(0)] | None = presettable(
        None, "Memory for KV blocks per GPU (per process on the CPU), e.g. 96GiB."
    )
    max_running: PositiveInt = presettable(64, "Requests that run at once.")
    max_waiting: PositiveInt = presettable(256, "Beyond this a request is refused with 429.")
    step_tokens: PositiveInt = presettable(512, "Token budget of one step.")
    threads: PositiveInt = presettable(1, "CPU threads of the engine's mathematics.")


def gpu_cel(role: str) -> str:
    """CEL: GPUs of one instance of a role, absent fields at their defaults (no preset)."""
    at = f"{role}.parallelism"
    dp = f"({given(f'{at}.dpAttention')} && {at}.dpAttention ? 1 : {value_or(f'{at}.dp', '1')})"
    return f"{value_or(f'{at}.tp', '1')} * {value_or(f'{at}.pp', '1')} * {dp}"


def fits_cel(role: str) -> str:
    """CEL: what `Role.shape_fits` says."""
    per_pod, gpus = f"{role}.gpu.perPod", f"({gpu_cel(role)})"
    nodes = value_or(f"{role}.parallelism.nodes", "1")
    have = f"{nodes} * ({per_pod} == 0 ? 1 : {per_pod})"
    return f"({given(per_pod)}) ? {gpus} == {have} : {gpus} % {nodes} == 0"


SHAPE_MESSAGE = (
    "tp x pp x dp (dp left out with dpAttention) must equal nodes x gpu.perPod, or be a multiple "
    "of nodes where perPod is not written"
)


def _engine_command(role: "Role") -> Any:
    template = role.pod_template or {}
    containers = template.get("spec", {}).get("containers", [])
    return any(c.get("name") == "engine" and "command" in c for c in containers)


class Role(ApiModel):
    """Prefill or decode."""

    replicas: NonNegativeInt = presettable(
        1, "Instances, with scaling.mode Static. Not written otherwise: there is one writer."
    )
    scaling: Scaling = Field(Scaling(), description="Who decides the number of instances.")
    parallelism: Parallelism = Field(Parallelism(), description="Shape of one instance.")
    gpu: Gpu = Field(Gpu(), description="Which GPUs its pods get.")
    limits: RoleLimits = Field(RoleLimits(), description="How much it takes on at once.")
    resources: Resources = Field(Resources(), description="CPU and host memory of a pod.")
    image: Name | None = Field(
        None, description="Image of this role alone; needs rollout.allowMixedImages."
    )
    config_preset: Name | None = Field(
        None, description="Take this role's values from another preset than the deployment's."
    )
    engine_args: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=1024)], ...], Field(max_length=128)
    ] = presettable(
        (), "Further arguments of the engine, replacing the preset's; not for engine kimistack."
    )
    env: Annotated[tuple[EnvVar, ...], Field(max_length=128)] = presettable(
        (), "Environment of the engine, merged by name.", json_schema_extra=keyed("name")
    )
    managed_command: bool = Field(
        True, description="The operator writes the engine's command; podTemplate may not."
    )
    pod_template: FreeForm | None = Field(
        None,
        description="Merged over the rendered pod (strategic merge; the container is `engine`).",
    )
    pod_labels: StringMap | None = Field(None, description="Labels added to the pods.")
    placement: Placement = Field(Placement(), description="Which nodes.")
    drain: Drain = Field(Drain(), description="How a pod ends.")
    probes: Probes = Field(Probes(), description="How its start and health are judged.")

    rules: ClassVar = (
        Rule(
            "replicas has one writer: it goes with scaling.mode Static only",
            lambda m: not m.wrote("replicas") or m.scaling.mode == "Static",
            implies(
                "has(self.replicas)",
                "!has(self.scaling) || !has(self.scaling.mode) || self.scaling.mode == 'Static'",
            ),
            field="replicas",
        ),
        Rule(
            SHAPE_MESSAGE,
            lambda m: not m.shape_is_written or m.shape_fits,
            implies(
                " && ".join(
                    f"has(self.parallelism.{name})"
                    for name in ("tp", "pp", "dp", "dpAttention", "nodes")
                ).join(("has(self.parallelism) && ", " && "))
                + given("self.gpu.perPod"),
                fits_cel("self"),
            ),
            field="parallelism",
            figures=lambda m: m.shape_figures,
        ),
        Rule(
            "engineArgs may not set what other fields decide (role, ports, model, parallelism, "
            "transfer)",
            lambda m: not any(re.match(_RESERVED, arg) for arg in m.engine_args),
            implies(
                "has(self.engineArgs)", f"!self.engineArgs.exists(a, a.matches('{_RESERVED}'))"
            ),
            field="engineArgs",
            figures=lambda m: next(arg for arg in m.engine_args if re.match(_RESERVED, arg)),
        ),
        Rule(
            "podTemplate may not set the engine's command while managedCommand is true",
            lambda m: not (m.managed_command and _engine_command(m)),
            None,
            field="podTemplate",
            why_not_cel="the template is preserved without a schema, which CEL cannot read",
        ),
    )

    @property
    def shape_is_written(self) -> bool:
        """Whether no preset could change how the parallelism compares with the GPUs."""
        shape = self.parallelism.wrote("tp", "pp", "dp", "dp_attention", "nodes")
        return shape and self.gpu.wrote("per_pod")

    @property
    def shape_fits(self) -> bool:
        """Whether the parallelism takes exactly the GPUs of the instance's pods.

        Where GPUs per pod are not written a pod gets its share; a pod without GPU is one process.
        """
        if self.gpu.per_pod is None:
            return self.parallelism.gpus % self.parallelism.nodes == 0
        return self.parallelism.gpus == self.parallelism.nodes * max(self.gpu.per_pod, 1)

    @property
    def shape_figures(self) -> str:
        """Both sides of the comparison in `shape_fits`."""
        p, per_pod = self.parallelism, self.gpu.per_pod
        have = "" if per_pod is None else f" with {max(per_pod, 1)} each"
        return f"the parallelism takes {p.gpus}, on {p.nodes} node(s){have}"

    @property
    def gpus_per_pod(self) -> int:
        """GPUs each pod asks for; 0 on the CPU."""
        if self.gpu.per_pod is not None:
            return self.gpu.per_pod
        return self.parallelism.gpus // self.parallelism.nodes

    @property
    def gpus(self) -> int:
        """GPUs of one instance; 0 on the CPU."""
        return self.gpus_per_pod * self.parallelism.nodes

    @property
    def least_replicas(self) -> int:
        """Instances there are at the least: `replicas`, or `scaling.min` with another writer."""
        return self.replicas if self.scaling.mode == "Static" else self.scaling.min


RoleName = Literal["prefill", "decode"]
