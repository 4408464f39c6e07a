"""The rollout ahead, by rolling `next_step` forward over instances on paper."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kimi_operator.api.deployment import ROLES
from kimi_operator.api.roles import RoleName
from kimi_operator.observed import InstanceId, InstanceView
from kimi_operator.rollout.fleet import Guard
from kimi_operator.rollout.planner import next_step
from kimi_operator.rollout.view import Revisions, RolloutView, Step

LOAD_S = 600.0
"""Assumed until a new instance is ready; only the order of events depends on it."""


@dataclass(frozen=True)
class Stage:
    """A pass that changes something, or the one the rollout stops at.

    `serving` and `gpus` are right after its changes: what drains serves no more, what was created
    does not serve yet, and both hold GPUs.
    """

    step: int
    total_steps: int
    created: tuple[InstanceId, ...]
    drained: tuple[InstanceId, ...]
    kept_again: tuple[InstanceId, ...]
    serving: Mapping[RoleName, int]
    gpus: int
    done: bool
    waiting_for: str | None
    outage: str | None


def all_steps(
    view: RolloutView,
    instances: Sequence[InstanceView],
    revisions: Revisions,
    targets: Mapping[RoleName, int],
    now_s: float,
) -> tuple[Stage, ...]:
    """Every change until the rollout is done or waits for a person.

    It assumes that what is created becomes ready and what drains comes to an end. The last stage
    says whether it is done; where it is not, `waiting_for` says why.
    """
    fleet, stages = list(instances), list[Stage]()
    for _ in range(_passes(instances, targets)):
        step = next_step(view, fleet, revisions, targets, now_s)
        after = _applied(view, fleet, step, now_s)
        moved = _moved(fleet, step)
        waits = _settled(view, after, now_s) == fleet
        if moved or step.done or waits:
            stages.append(_stage(view, after, step, fleet))
        if step.done or (waits and not moved):
            return tuple(stages)
        now_s += LOAD_S
        fleet = _settled(view, after, now_s)
    raise AssertionError(f"the rollout to {step.target_revision} does not end: {stages[-1]}")


def _passes(instances: Sequence[InstanceView], targets: Mapping[RoleName, int]) -> int:
    """More passes than any rollout takes: an instance is created, counts, drains and ends."""
    return 16 + 8 * (len(instances) + sum(targets.values()))


def _moved(fleet: Sequence[InstanceView], step: Step) -> bool:
    here = {i.id for i in fleet if not i.terminating}
    marked = {i.id for i in fleet if i.draining and not i.terminating}
    return (
        bool(step.instances - here)
        or bool((here - marked) - (step.instances - step.drain))
        or (bool(marked & (step.instances - step.drain)))
    )


def _applied(
    view: RolloutView, fleet: Sequence[InstanceView], step: Step, now_s: float
) -> list[InstanceView]:
    """The instances right after the step was applied."""
    after = [_marked(instance, step, now_s) for instance in fleet]
    here = {instance.id for instance in fleet}
    created = sorted(step.instances - here)
    return after + [InstanceView(new, 1, 0, False, created_s=now_s) for new in created]


def _marked(instance: InstanceView, step: Step, now_s: float) -> InstanceView:
    if instance.terminating:
        return instance
    if instance.id not in step.instances:
        return replace(instance, terminating=True, serving=False, in_flight=0)
    if instance.id in step.drain:
        since_s = now_s if instance.draining_since_s is None else instance.draining_since_s
        return replace(instance, draining=True, serving=False, draining_since_s=since_s)
    if instance.draining:
        ready = instance.ready
        return replace(instance, draining=False, serving=ready, draining_since_s=None)
    return instance


def _settled(view: RolloutView, fleet: Sequence[InstanceView], now_s: float) -> list[InstanceView]:
    """The instances once everything that was begun has ended."""
    return [_ended(view, instance, now_s) for instance in fleet if not instance.terminating]


def _ended(view: RolloutView, instance: InstanceView, now_s: float) -> InstanceView:
    if instance.draining:
        long_ago_s = now_s - sum((*view.settle_s.values(), *view.drain_s.values()))
        return replace(instance, in_flight=0, draining_since_s=long_ago_s)
    if instance.serving and instance.ready_since_s is not None:
        return replace(
            instance, ready_since_s=min(instance.ready_since_s, now_s - view.min_ready_s)
        )
    return replace(
        instance,
        pods_ready=instance.pods_desired,
        serving=True,
        created_s=now_s,
        ready_since_s=now_s - view.min_ready_s,
        unready_since_s=None,
        failures=(),
    )


def _stage(
    view: RolloutView, after: Sequence[InstanceView], step: Step, before: Sequence[InstanceView]
) -> Stage:
    here = {i.id for i in before}
    marked = {i.id for i in before if i.draining}
    stay = step.instances - step.drain
    gone = {i.id for i in before if not i.terminating} - stay
    counted = {
        (revision, role): sum(
            i.serving for i in after if (i.id.revision, i.id.role) == (revision, role)
        )
        for revision in {i.id.revision for i in after}
        for role in ROLES
    }
    return Stage(
        step=step.step,
        total_steps=step.total_steps,
        created=tuple(sorted(step.instances - here)),
        drained=tuple(sorted(gone - marked)),
        kept_again=tuple(sorted(marked & stay)),
        serving=Guard({}, 0, view).serving(counted),
        gpus=sum(view.gpus_of(i.id) for i in after),
        done=step.done,
        waiting_for=step.waiting_for,
        outage=step.outage,
    )
