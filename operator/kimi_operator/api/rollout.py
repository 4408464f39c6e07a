"""How a change reaches the pods, and how many GPUs all of it may take."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from kimi_operator.api.base import ApiModel, Rule, implies, value_or
from kimi_runtime.units import Seconds

Ratio = Annotated[str, Field(pattern=r"^[1-9]\d{0,3}:[1-9]\d{0,3}$", max_length=9)]


class Rollout(ApiModel):
    """How pods are replaced by pods of a new revision."""

    strategy: Literal["Paired", "RecreatePair", "BlueGreen"] = Field(
        "Paired",
        description="Paired: prefill and decode step by step, in proportion. RecreatePair: all "
        "down, then up. BlueGreen: a second set beside the first; needs twice the GPUs.",
    )
    max_unavailable: NonNegativeInt = Field(1, description="Instances of a role down at once.")
    max_surge: NonNegativeInt = Field(0, description="Instances of a role beyond its count.")
    max_skew: Annotated[int, Field(ge=1, le=100)] = Field(
        25, description="The most, in percent, that one role may be further along than the other."
    )
    progress_deadline: Seconds = Field(7200.0, description="A step longer than this has failed.")
    min_ready_seconds: NonNegativeInt = Field(
        0, description="How long an instance must be ready before it counts."
    )
    paused: bool = Field(False, description="Finish the running step, then wait.")
    canary: PositiveInt | None = Field(
        None,
        description="Instances of each role that get the new revision; the rollout then waits "
        "until this is raised or removed.",
    )
    to_revision: Annotated[str, Field(pattern="^[0-9a-f]{6}$")] | None = Field(
        None,
        description="A kept revision to run instead of what the spec asks for: to abort a rollout, "
        "or to undo one. Remove it to go forward again.",
    )
    allow_outage: bool = Field(
        False,
        description="Where nothing can be replaced without taking everything down (one instance, "
        "no surge, no worker that does both roles): take it down.",
    )
    on_failure: Literal["Pause", "Rollback"] = Field(
        "Pause", description="What follows a step that failed."
    )
    revision_history_limit: Annotated[int, Field(ge=1, le=20)] = Field(
        3, description="Old revisions that are kept to go back to."
    )
    allow_mixed_images: bool = Field(
        False, description="Let prefill and decode have different images."
    )

    rules: ClassVar = (
        Rule(
            "maxUnavailable and maxSurge must not both be 0: nothing could ever be replaced",
            lambda m: m.max_unavailable > 0 or m.max_surge > 0,
            f"{value_or('self.maxUnavailable', '1')} > 0 || {value_or('self.maxSurge', '0')} > 0",
        ),
    )


def _at_most(low: str, high: str) -> bool:
    (a, b), (c, d) = (map(int, ratio.split(":")) for ratio in (low, high))
    return a * d <= c * b


def _part(field: str, index: int) -> str:
    return f"int(self.{field}.split(':')[{index}])"


class PrefillRatio(ApiModel):
    """Bounds on prefill : decode instances."""

    min: Ratio | None = Field(None, description="E.g. 1:4, one prefill to four decode instances.")
    max: Ratio | None = Field(None, description="E.g. 1:1.")

    rules: ClassVar = (
        Rule(
            "min must not exceed max",
            lambda m: m.min is None or m.max is None or _at_most(m.min, m.max),
            implies(
                "has(self.min) && has(self.max)",
                f"{_part('min', 0)} * {_part('max', 1)} <= {_part('max', 0)} * {_part('min', 1)}",
            ),
            field="min",
        ),
    )


class Budget(ApiModel):
    """What all roles together may take, scaling and rollouts included."""

    max_gpus: PositiveInt | None = Field(
        None, alias="maxGPUs", description="GPUs of all instances of all revisions."
    )
    ratio: PrefillRatio | None = Field(None, description="Prefill to decode instances.")
