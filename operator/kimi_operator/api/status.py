"""What the operator reports. Written by the operator alone, in one patch of `/status`."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from kimi_operator.api.base import ApiModel, Name, Text, keyed

ConditionType = Annotated[str, Field(pattern="^[A-Z][A-Za-z]*$", max_length=64)]
LIST_CAP = 50
"""Bounded lists keep the object small; `more` counts what was left out."""


class Condition(ApiModel):
    """As in Kubernetes; the types follow kstatus."""

    type: ConditionType = Field(
        description="Ready, Available, Progressing, Reconciling, Stalled, Degraded, ModelReady, "
        "PrefillReady, DecodeReady, RouterReady, KVPoolReady, ScalingReady, NodesEligible or "
        "PreflightPassed."
    )
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: Annotated[str, Field(min_length=1, max_length=128)] = Field(
        description="Why, in CamelCase, for programs."
    )
    message: Text = Field("", description="Why and what to change, for people.")
    observed_generation: NonNegativeInt | None = Field(
        None, description="The spec's generation it speaks of."
    )
    last_transition_time: Name = Field(description="When `status` last changed (RFC 3339).")


class RoleStatus(ApiModel):
    """Instances of one role. `ready` is compared with `desired`, never with what is there."""

    summary: Name | None = Field(None, description="ready/desired, for the printer column.")
    desired: NonNegativeInt = Field(0, description="Instances there should be.")
    current: NonNegativeInt = Field(0, description="Instances there are, of any revision.")
    scheduled: NonNegativeInt = Field(0, description="Instances whose pods all have a node.")
    ready: NonNegativeInt = Field(0, description="Instances whose pods are all ready.")
    serving: NonNegativeInt = Field(0, description="Instances the router plans onto.")
    updated: NonNegativeInt = Field(0, description="Instances of the update revision.")
    revision: Name | None = Field(None, description="Revision most instances have.")
    owner: Literal["Spec", "External", "Planner"] | None = Field(
        None, description="Who writes the number of instances."
    )
    blocked: Text | None = Field(
        None, description="What the slowest instance waits for, and how long."
    )
    selector: Text | None = Field(None, description="Labels of the instances' first pods.")


class Roles(ApiModel):
    """By role."""

    prefill: RoleStatus | None = Field(None, description="Absent when aggregated.")
    decode: RoleStatus | None = Field(None, description="The decode (or aggregated) role.")


class RolloutStatus(ApiModel):
    """Where the running rollout is. Derived from the pods, never read back."""

    step: NonNegativeInt = Field(description="Step now under way, from 1.")
    total: NonNegativeInt = Field(description="Steps of the whole rollout.")
    started_at: Name | None = Field(None, description="When it began (RFC 3339).")


class KvPoolStatus(ApiModel):
    """The pool."""

    nodes: NonNegativeInt = Field(0, description="Nodes with a ready daemon.")
    desired: NonNegativeInt = Field(0, description="Nodes that should have one.")
    transport: Name | None = Field(None, description="How daemons reach each other.")


class PlacedInstance(ApiModel):
    """Where an instance runs."""

    instance: Name = Field(description="Its name.")
    nodes: Annotated[tuple[Name, ...], Field(max_length=16)] = Field(description="Its nodes.")


class GpuStatus(ApiModel):
    """GPUs in use against the budget."""

    used: NonNegativeInt = Field(0, description="GPUs of all pods of the deployment.")
    budget: NonNegativeInt | None = Field(None, description="spec.budget.maxGPUs.")


class DeploymentStatus(ApiModel):
    """Status of a KimiDeployment."""

    observed_generation: NonNegativeInt | None = Field(
        None, description="The generation this status speaks of."
    )
    conditions: Annotated[tuple[Condition, ...], Field(max_length=24)] = Field(
        (), description="One per type.", json_schema_extra=keyed("type")
    )
    model: Name | None = Field(None, description="The model, presets resolved.")
    pools: Roles | None = Field(None, description="Instances by role.")
    current_revision: Name | None = Field(None, description="Revision that serves.")
    update_revision: Name | None = Field(None, description="Revision the spec asks for.")
    rollout: RolloutStatus | None = Field(None, description="The running rollout.")
    compat_level: NonNegativeInt | None = Field(
        None,
        description="Level of defaults at creation; kept, so that an upgrade restarts nothing.",
    )
    url: Name | None = Field(None, description="Where clients send requests.")
    endpoints: Annotated[tuple[Name, ...], Field(max_length=LIST_CAP)] = Field(
        (), description="Every address of the router."
    )
    kv_pool: KvPoolStatus | None = Field(None, description="The KV-cache pool.")
    placement: Annotated[tuple[PlacedInstance, ...], Field(max_length=LIST_CAP)] = Field(
        (), description="Where instances run."
    )
    more: NonNegativeInt | None = Field(None, description="Instances `placement` leaves out.")
    gpu: GpuStatus | None = Field(None, description="GPUs.")
    recommendation: Text | None = Field(None, description="What the planner would change.")


class WorkersStatus(ApiModel):
    """Status of a KimiWorkers: what `/scale` reads."""

    observed_generation: NonNegativeInt | None = Field(
        None, description="The generation this status speaks of."
    )
    replicas: NonNegativeInt = Field(0, description="Instances there are.")
    selector: Text | None = Field(
        None, description="Labels of the first pod of each instance, so averages are per instance."
    )
    conditions: Annotated[tuple[Condition, ...], Field(max_length=8)] = Field(
        (), description="One per type.", json_schema_extra=keyed("type")
    )
