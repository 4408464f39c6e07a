"""Parts of a role that concern its pods: where they run, how they start, how they end."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from kimi_operator.api.base import (
    ApiModel,
    FreeForm,
    Name,
    Rule,
    StringMap,
    Text,
    implies,
    presettable,
)
from kimi_runtime.units import Seconds

NEVER_TOLERATED = ("amd-gpu-unhealthy", "amd-dcm")
"""Taints of AMD's GPU operator: a GPU that failed its checks, a node being repartitioned."""

GRACE_CAP_S = 3600.0
GRACE_FLOOR_S = 120.0


class EnvVar(ApiModel):
    """An environment variable of the engine container."""

    name: Name = Field(description="Name of the variable.")
    value: Text | None = Field(None, description="Its value.")
    value_from: FreeForm | None = Field(None, description="As in a pod's `valueFrom`.")

    rules: ClassVar = (
        Rule(
            "write at most one of value and valueFrom",
            lambda m: m.value is None or m.value_from is None,
            "!(has(self.value) && has(self.valueFrom))",
        ),
    )


class Toleration(ApiModel):
    """As in a pod."""

    key: Name | None = Field(None, description="Key of the taint; none with Exists: every taint.")
    operator: Literal["Exists", "Equal"] = Field("Equal", description="How `value` is compared.")
    value: Name | None = Field(None, description="Value of the taint, with Equal.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="None: every effect."
    )
    toleration_seconds: NonNegativeInt | None = Field(
        None, description="How long NoExecute is tolerated; none: for ever."
    )


def _tolerates_no_sick_node(placement: "Placement") -> bool:
    return not any(t.key is None or t.key in NEVER_TOLERATED for t in placement.tolerations)


class Placement(ApiModel):
    """Which nodes a role's pods run on."""

    node_selector: StringMap | None = presettable(None, "Labels a node must have.")
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=16)] = presettable(
        (), "Taints that are tolerated."
    )
    affinity: FreeForm | None = Field(None, description="As in a pod.")
    topology_key: Name | None = Field(
        None, description="Label that names a node's rack or rail group, for `spread`."
    )
    spread: Literal["none", "host", "rail"] = presettable(
        "none", "Keep instances of the role apart: by host, or by `topologyKey` for rail."
    )
    require_labels: Annotated[tuple[Name, ...], Field(max_length=16)] = Field(
        (),
        description="Validation labels a node must carry with value passed, e.g. "
        "amd.com/rail-bandwidth. Without it they are preferred, and failed ones excluded.",
    )

    rules: ClassVar = (
        Rule(
            f"the taints {' and '.join(NEVER_TOLERATED)} mark nodes that cannot serve and are "
            "never tolerated; name the taints you mean by key",
            _tolerates_no_sick_node,
            implies(
                "has(self.tolerations)",
                "!self.tolerations.exists(t, !has(t.key) || t.key in "
                f"[{', '.join(repr(key) for key in NEVER_TOLERATED)}])",
            ),
            field="tolerations",
        ),
        Rule(
            "spread: rail needs topologyKey, the label that names a node's rail group",
            lambda m: m.spread != "rail" or m.topology_key is not None,
            implies("has(self.spread) && self.spread == 'rail'", "has(self.topologyKey)"),
            field="topologyKey",
        ),
    )


def _cel_seconds(field: str, default: str) -> str:
    return f"duration(has(self.{field}) ? self.{field} : '{default}')"


class Drain(ApiModel):
    """How a pod ends: routed around, then drained, then torn down. Together: its grace period."""

    pre_stop: Seconds = Field(
        15.0, description="Until every router has stopped planning onto the pod."
    )
    timeout: Seconds = Field(30.0, description="For running requests to finish or move.")
    teardown: Seconds = Field(
        50.0, description="For memory registrations and the GPU to be released."
    )

    rules: ClassVar = (
        Rule(
            "preStop, timeout and teardown together may take 1h at most",
            lambda m: m.pre_stop + m.timeout + m.teardown <= GRACE_CAP_S,
            # CEL's durations have no days; a day is over the cap in any case
            "![has(self.preStop) ? self.preStop : '', has(self.timeout) ? self.timeout : '', "
            "has(self.teardown) ? self.teardown : ''].exists(d, d.contains('d')) && "
            f"{_cel_seconds('preStop', '15s')} + {_cel_seconds('timeout', '30s')} + "
            f"{_cel_seconds('teardown', '50s')} <= duration('1h')",
            figures=lambda m: f"they are {m.pre_stop + m.timeout + m.teardown:g}s",
        ),
    )

    @property
    def grace_s(self) -> float:
        """The pod's termination grace period."""
        return max(GRACE_FLOOR_S, self.pre_stop + self.timeout + self.teardown)


class ReadinessProbe(ApiModel):
    """How readiness is checked."""

    period: Seconds = Field(15.0, description="Time between two checks.")
    timeout: Seconds = Field(10.0, description="A check may run a small prefill, so over 1s.")
    failure_threshold: PositiveInt = Field(6, description="Failures in a row until unready.")


class Probes(ApiModel):
    """How the start and the health of a pod are judged."""

    startup_timeout: Seconds = presettable(
        7200.0, "Loading 1.5 TB over NFS was seen to take 95 minutes."
    )
    readiness: ReadinessProbe = Field(ReadinessProbe(), description="When requests may come.")
    liveness: Literal["Disabled", "Enabled"] = Field(
        "Disabled", description="Enabled restarts a pod that stops answering once it was ready."
    )


class Resources(ApiModel):
    """CPU and host memory of one pod: both request and limit."""

    cpu: Annotated[str, Field(pattern=r"^\d+(\.\d+)?m?$", max_length=16)] | None = presettable(
        None, "CPUs, e.g. 32 or 500m."
    )
    memory: Annotated[str, Field(pattern=r"^\d+(Ki|Mi|Gi|Ti)?$", max_length=16)] | None = (
        presettable(None, "Host memory, e.g. 256Gi; shared memory counts against it.")
    )
    shm: Annotated[str, Field(pattern=r"^\d+(Ki|Mi|Gi|Ti)?$", max_length=16)] | None = presettable(
        None, "Size of /dev/shm, e.g. 64Gi."
    )
