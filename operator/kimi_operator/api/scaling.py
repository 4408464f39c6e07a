"""Who decides how many instances a role has, and within which bounds."""

from typing import Annotated, ClassVar, Literal

from annotated_types import Gt
from pydantic import Field, NonNegativeInt, PositiveInt

from kimi_operator.api.base import ApiModel, Rule, implies, value_or
from kimi_runtime.units import Seconds


class Metric(ApiModel):
    """A signal and the value per instance that scaling aims at."""

    type: Literal["QueueDepth", "RunningRequests", "QueuedTokens", "KvUsage"] = Field(
        description="QueueDepth and RunningRequests: requests per instance. QueuedTokens: prompt "
        "tokens waiting per instance. KvUsage: percent of the KV memory in use."
    )
    target: PositiveInt = Field(description="Aimed at, on average over the instances.")


class ScalingPolicy(ApiModel):
    """The most that may change within a period, as in a HorizontalPodAutoscaler."""

    type: Literal["Pods", "Percent"] = Field(description="Instances, or percent of the instances.")
    value: PositiveInt = Field(description="How many, or what percentage.")
    period_seconds: Annotated[int, Field(ge=1, le=1800)] = Field(description="The period.")


class ScalingDirection(ApiModel):
    """Rules for scaling one way."""

    stabilization_window_seconds: Annotated[int, Field(ge=0, le=3600)] | None = Field(
        None, description="The strongest recommendation of this window wins."
    )
    select_policy: Literal["Max", "Min", "Disabled"] | None = Field(
        None, description="Which policy wins where several apply."
    )
    policies: Annotated[tuple[ScalingPolicy, ...], Field(max_length=8)] = Field(
        (), description="The limits of change."
    )


class ScalingBehavior(ApiModel):
    """HorizontalPodAutoscaler behaviour, for a rendered autoscaler."""

    scale_up: ScalingDirection | None = Field(None, description="Rules for growing.")
    scale_down: ScalingDirection | None = Field(None, description="Rules for shrinking.")


class External(ApiModel):
    """Scaling by whoever writes the `/scale` of the role's KimiWorkers."""

    render: Literal["hpa", "keda"] | None = Field(
        None,
        description="Write that autoscaler too: a HorizontalPodAutoscaler or a KEDA ScaledObject. "
        "None: something of yours writes `/scale`.",
    )
    behavior: ScalingBehavior | None = Field(None, description="For the rendered autoscaler.")


class LatencyTargets(ApiModel):
    """What the planner of mode Managed keeps, at the least number of GPUs."""

    ttft: Annotated[Seconds, Gt(0)] | None = Field(
        None, description="95th percentile of the time to the first token, e.g. 2s."
    )
    itl: Annotated[Seconds, Gt(0)] | None = Field(
        None, description="95th percentile of the time between tokens, e.g. 40ms."
    )


class Scaling(ApiModel):
    """One writer of the replica count, declared here."""

    mode: Literal["Static", "External", "Managed"] = Field(
        "Static",
        description="Static: `replicas` of the role. External: the `/scale` of its KimiWorkers. "
        "Managed: the operator's planner.",
    )
    min: NonNegativeInt = Field(
        1, description="Never fewer; 0 (not with Static): none while nothing is asked."
    )
    max: PositiveInt | None = Field(None, description="Never more.")
    external: External | None = Field(None, description="Details of mode External.")
    targets: LatencyTargets | None = Field(None, description="What mode Managed keeps.")
    metrics: Annotated[tuple[Metric, ...], Field(max_length=8)] = Field(
        (), description="What a rendered autoscaler, or the planner, reacts to."
    )
    scale_down_delay: Seconds = Field(
        1800.0, description="Load must have been low for this long; loading a model takes minutes."
    )
    min_ready_before_scale_down: Seconds = Field(
        600.0, description="An instance this young does not count as spare."
    )

    rules: ClassVar = (
        Rule(
            "min must not exceed max",
            lambda m: m.max is None or m.min <= m.max,
            implies("has(self.max)", f"{value_or('self.min', '1')} <= self.max"),
            field="min",
        ),
        Rule(
            "min: 0 is not possible with mode Static: there, write replicas: 0",
            lambda m: m.min > 0 or m.mode != "Static",
            implies(f"{value_or('self.min', '1')} == 0", "self.mode != 'Static'"),
            field="min",
        ),
        Rule(
            "max is needed with mode Managed and with external.render",
            lambda m: (
                m.max is not None
                or not (m.mode == "Managed" or (m.external and m.external.render is not None))
            ),
            implies(
                "self.mode == 'Managed' || (has(self.external) && has(self.external.render))",
                "has(self.max)",
            ),
            field="max",
        ),
        Rule(
            "external goes with mode External only",
            lambda m: m.external is None or m.mode == "External",
            implies("has(self.external)", "self.mode == 'External'"),
            field="external",
        ),
        Rule(
            "targets goes with mode Managed only",
            lambda m: m.targets is None or m.mode == "Managed",
            implies("has(self.targets)", "self.mode == 'Managed'"),
            field="targets",
        ),
        Rule(
            "external.render needs metrics to scale by",
            lambda m: m.external is None or m.external.render is None or bool(m.metrics),
            implies(
                "has(self.external) && has(self.external.render)",
                "has(self.metrics) && size(self.metrics) > 0",
            ),
            field="metrics",
        ),
    )
