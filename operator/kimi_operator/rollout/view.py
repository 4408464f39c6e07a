"""What the rollout planner is given, and what it answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.api.roles import RoleName
from kimi_operator.observed import InstanceId

Strategy = Literal["Paired", "RecreatePair", "BlueGreen"]
Shape = Mapping[RoleName, int]
"""GPUs of one instance of each role that a revision has."""

ENGINES_OF_BOTH_ROLES = frozenset({"kimistack"})
"""Engines whose workers serve a whole request, whichever role they were started for."""


@dataclass(frozen=True)
class RolloutView:
    """What of an effective spec matters to a rollout.

    `shape` is of the spec itself, `shapes` of the revisions that are kept (one that is missing
    there is taken to have the spec's). `settle_s` and `drain_s` are, by role, how long routers may
    still plan onto a draining instance, and how long its requests may take after that.
    """

    shape: Shape
    strategy: Strategy = "Paired"
    max_unavailable: int = 1
    max_surge: int = 0
    max_skew_percent: int = 25
    min_ready_s: float = 0.0
    progress_deadline_s: float = 7200.0
    on_failure: Literal["Pause", "Rollback"] = "Pause"
    paused: bool = False
    canary: int | None = None
    to_revision: str | None = None
    allow_outage: bool = False
    max_gpus: int | None = None
    either_role: bool = False
    hold: str | None = None
    """Why no instance of the revision aimed at may be started."""
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    settle_s: Mapping[RoleName, float] = field(default_factory=dict)
    drain_s: Mapping[RoleName, float] = field(default_factory=dict)

    def shape_of(self, revision: str) -> Shape:
        """GPUs of one instance by role, for the roles the revision has."""
        return self.shapes.get(revision, self.shape)

    def gpus_of(self, instance: InstanceId) -> int:
        """GPUs the instance takes; a role its revision is not known to have counts as now."""
        shape = self.shape_of(instance.revision)
        return shape.get(instance.role, self.shape.get(instance.role, 0))


def view_of(spec: DeploymentSpec, shapes: Mapping[str, Shape] | None = None) -> RolloutView:
    """The view of an effective spec; `shapes` comes from the kept ControllerRevisions."""
    rollout, roles = spec.rollout, dict(spec.roles())
    return RolloutView(
        shape={name: role.gpus for name, role in roles.items()},
        strategy=rollout.strategy,
        max_unavailable=rollout.max_unavailable,
        max_surge=rollout.max_surge,
        max_skew_percent=rollout.max_skew,
        min_ready_s=rollout.min_ready_seconds,
        progress_deadline_s=rollout.progress_deadline,
        on_failure=rollout.on_failure,
        paused=rollout.paused,
        canary=rollout.canary,
        to_revision=rollout.to_revision,
        allow_outage=rollout.allow_outage,
        max_gpus=spec.budget.max_gpus,
        either_role=spec.engine in ENGINES_OF_BOTH_ROLES,
        shapes=shapes or {},
        settle_s={name: role.drain.pre_stop for name, role in roles.items()},
        drain_s={name: role.drain.timeout for name, role in roles.items()},
    )


@dataclass(frozen=True)
class Revisions:
    """The revisions that are known, by name.

    `update` is what the spec asks for; `history` the kept ones, oldest first, `update` included or
    not; `failed` those that a rollback once left, as their ControllerRevisions say.
    """

    update: str
    history: tuple[str, ...] = ()
    failed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Step:
    """What should exist now.

    `instances` are all that should exist; what is observed beyond them is to be deleted, what is
    missing to be created. `drain` are those of them the router must leave; an instance that is
    marked as draining and not in `drain` is to be unmarked. `routed` are the revisions routers may
    plan onto, `serving_revision` the one that carries most of the load. `failed` names a revision
    to be marked as failed, which must be stored before the next pass may undo it. `outage` names an
    interruption that the rollout needs, whether it is allowed or waited for. `wait_s` is when to
    look again although nothing happened; None: when something does.
    """

    instances: frozenset[InstanceId]
    drain: frozenset[InstanceId]
    target_revision: str
    serving_revision: str
    routed: frozenset[str]
    step: int
    total_steps: int
    done: bool
    waiting_for: str | None = None
    outage: str | None = None
    failed: str | None = None
    wait_s: float | None = None
