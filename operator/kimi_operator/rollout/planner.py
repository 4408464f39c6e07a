"""`next_step`: from the instances that are there to the ones that should be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kimi_operator.api.deployment import ROLES
from kimi_operator.api.roles import RoleName
from kimi_operator.observed import InstanceView
from kimi_operator.rollout.aim import Aim, aim_of, fallback, overdue
from kimi_operator.rollout.draining import drained, drains_until_s
from kimi_operator.rollout.fleet import Counts, Fleet, Guard, count_by_role
from kimi_operator.rollout.moves import Additions, choose_removals, order_of_removal
from kimi_operator.rollout.outage import remedy, stuck_outage, unavoidable_outage
from kimi_operator.rollout.schedule import Course, course_of, recreation
from kimi_operator.rollout.view import Revisions, RolloutView, Step
from kimi_operator.rollout.waiting import name_of, waits_for


@dataclass(frozen=True)
class _Plan:
    """What is taken away and added in this pass."""

    removed: tuple[InstanceView, ...]
    additions: Additions

    @property
    def moves(self) -> bool:
        return bool(self.removed or self.additions.created or self.additions.kept_again)


def next_step(
    view: RolloutView,
    instances: Sequence[InstanceView],
    revisions: Revisions,
    targets: Mapping[RoleName, int],
    now_s: float,
) -> Step:
    """What should exist now, of all that is observed; the same answer for the same observation.

    `targets` are the instances wanted by role, a role that is missing there has none. GPUs never
    exceed `max_gpus` by what is added here: pods that still terminate count. Removals leave
    `target - maxUnavailable` instances of each role serving, and at least one complete set of roles
    of one revision, unless the strategy is RecreatePair or an outage is needed and allowed.
    """
    wanted = {role: targets.get(role, 0) for role in ROLES}
    aim = aim_of(view, revisions, instances)
    fleet = Fleet.of(instances, aim.revision, view, now_s)
    failed = _failed(fleet, aim, revisions)
    course, outage, held = _course(fleet, aim, wanted, failed)
    plan = _held(fleet, course, wanted) if held else _advanced(fleet, course, wanted)
    if _stuck(fleet, plan, held):
        outage = stuck_outage(view, wanted, plan.additions.short_of_gpus)
        if view.allow_outage and not course.ends_early:
            course = recreation(view, wanted)
            plan = _advanced(fleet, course, wanted)
        else:
            held = remedy(outage, canary=course.ends_early)
    undone = aim.revision if failed and _goes_back(fleet, aim, revisions) else None
    return _step(fleet, course, plan, wanted, _Said(held, outage, undone))


@dataclass(frozen=True)
class _Said:
    """What a step says besides its instances."""

    held: str | None
    outage: str | None
    failed: str | None


def _failed(fleet: Fleet, aim: Aim, revisions: Revisions) -> InstanceView | None:
    """The instance that fails the running step, where a rollout is running."""
    late = overdue(fleet, fleet.view.progress_deadline_s)
    return late if fleet.old or _goes_back(fleet, aim, revisions) else None


def _goes_back(fleet: Fleet, aim: Aim, revisions: Revisions) -> bool:
    """Whether a failed step is to be undone, and can be."""
    ours = aim.revision == revisions.update and revisions.update not in revisions.failed
    back = fallback(revisions, fleet.all)
    return fleet.view.on_failure == "Rollback" and ours and back is not None


def _course(
    fleet: Fleet, aim: Aim, targets: Counts, failed: InstanceView | None
) -> tuple[Course, str | None, str | None]:
    """The course, the outage it needs, and why nothing may be replaced now."""
    view = fleet.view
    course, outage = course_of(view, targets), None
    if fleet.old and view.strategy == "RecreatePair":
        outage = "strategy RecreatePair takes all instances down before new ones start"
    elif fleet.old:
        outage = unavoidable_outage(view, targets, fleet)
        if outage is not None and view.allow_outage and not course.ends_early:
            course = recreation(view, targets)
    if not (fleet.old or fleet.stable_revision()):
        return course, None, aim.held
    reached = course.reached(fleet)
    consented = view.strategy == "RecreatePair" or (view.allow_outage and not course.ends_early)
    if aim.held:
        return course, outage, aim.held
    if failed is not None:
        return course, outage, _failure_text(failed, fleet)
    if outage is not None and not consented:
        return course, outage, remedy(outage, canary=course.ends_early)
    if view.paused and not _under_way(fleet, course, reached):
        return course, outage, "rollout.paused is true"
    if course.ends_early and fleet.old and reached == course.steps:
        text = f"the canary of {view.canary} is serving; raise or remove rollout.canary to go on"
        return course, outage, text
    return course, outage, None


def _failure_text(failed: InstanceView, fleet: Fleet) -> str:
    why = "; ".join(failed.failures) or f"{failed.pods_ready}/{failed.pods_desired} pods are ready"
    return (
        f"{name_of(failed.id)} did not become ready within rollout.progressDeadline "
        f"({fleet.view.progress_deadline_s:g}s): {why}; change the spec, or go back with "
        "rollout.toRevision"
    )


def _under_way(fleet: Fleet, course: Course, reached: int) -> bool:
    """Whether the step after the one reached has brought up an instance already."""
    new, passed = count_by_role(fleet.new), course.waypoints[reached].new
    return any(new[role] > passed[role] for role in ROLES)


def _advanced(fleet: Fleet, course: Course, targets: Counts) -> _Plan:
    """Go on to the next waypoint."""
    goal = course.waypoints[min(course.reached(fleet) + 1, course.steps)]
    old, new = count_by_role(fleet.old), count_by_role(fleet.new)
    guard = course.guard if fleet.old else _steady(fleet.view, targets)
    order = order_of_removal(fleet)
    removed = choose_removals(
        [i for i in order if i.id.revision == fleet.target],
        {role: new[role] - targets[role] for role in ROLES},
        guard,
        fleet,
    )
    rest = replace(fleet, new=tuple(i for i in fleet.new if i not in removed))
    removed += choose_removals(
        [i for i in order if i.id.revision != fleet.target],
        {role: old[role] - goal.old[role] for role in ROLES},
        guard,
        rest,
    )
    left = count_by_role(i for i in fleet.old if i not in removed)
    missing = {
        role: min(targets[role], max(goal.new[role], targets[role] - left[role])) - new[role]
        for role in ROLES
    }
    additions = Additions(fleet, targets, course.surge)
    lone = [r for r in ROLES if targets[r] and course.guard.floors.get(r, 0) >= targets[r]]
    additions.fill(fleet.target, missing, first=lone)
    return _Plan(tuple(removed), additions)


def _held(fleet: Fleet, course: Course, targets: Counts) -> _Plan:
    """Replace nothing: keep the counts, and what is missing comes from what serves already.

    What the rollout put beside the old instances on purpose stays: the whole of a second set, or
    the second instance of a role that has one.
    """
    old, new = count_by_role(fleet.old), count_by_role(fleet.new)
    guard, order = _steady(fleet.view, targets), order_of_removal(fleet)
    if fleet.view.strategy == "BlueGreen" and fleet.old:
        sets = ((fleet.new, new), (fleet.old, old))
        removed = [
            instance
            for kept, have in sets
            for instance in choose_removals(
                [i for i in order if i in kept],
                {role: have[role] - targets[role] for role in ROLES},
                guard,
                fleet,
            )
        ]
        missing = {role: max(targets[role] - old[role], 0) for role in ROLES}
    else:
        beside = {r: int(targets[r] == 1 and course.surge[r] and old[r] and new[r]) for r in ROLES}
        excess = {r: old[r] + new[r] - targets[r] - beside[r] for r in ROLES}
        removed = choose_removals(order, excess, guard, fleet)
        missing = {role: max(targets[role] - old[role] - new[role], 0) for role in ROLES}
    additions = Additions(fleet, targets, course.surge)
    additions.fill(fleet.stable_revision() or fleet.target, missing)
    return _Plan(tuple(removed), additions)


def _steady(view: RolloutView, targets: Counts) -> Guard:
    """Fewer instances are wanted: all that are wanted keep serving."""
    return Guard(targets, min(1, sum(targets.values())), view)


def _stuck(fleet: Fleet, plan: _Plan, held: str | None) -> bool:
    """Whether old instances are left and no event to come can change anything."""
    waits = fleet.draining or fleet.terminating or fleet.pending()
    return bool(fleet.old) and not (held or plan.moves or waits)


def _step(fleet: Fleet, course: Course, plan: _Plan, targets: Counts, said: _Said) -> Step:
    removed = {instance.id for instance in plan.removed}
    again, created = set(plan.additions.kept_again), plan.additions.created
    leaving = [
        *(i for i in fleet.draining if i.id not in again),
        *(i for i in fleet.kept if i.id in removed),
    ]
    drain = {i.id for i in leaving if not drained(i, fleet.view, fleet.now_s)}
    stay = {i.id for i in fleet.kept if i.id not in removed}
    reached = course.reached(fleet)
    available = count_by_role(i for i in fleet.new if fleet.available(i))
    settled = len(fleet.all) == len(fleet.new) and available == dict(targets)
    done = settled and said.held is None
    waiting_for = said.held or waits_for(fleet, leaving, created, plan.additions.short_of_gpus)
    return Step(
        instances=frozenset(stay | drain | again | set(created)),
        drain=frozenset(drain),
        target_revision=fleet.target,
        serving_revision=_serving_revision(fleet),
        routed=_routed(fleet, targets),
        step=course.steps if done else min(reached + 1, course.steps),
        total_steps=course.steps,
        done=done,
        waiting_for=None if done else waiting_for,
        outage=said.outage,
        failed=said.failed,
        wait_s=_wait_s(fleet),
    )


def _serving_revision(fleet: Fleet) -> str:
    """The revision with the most instances that can serve; the one aimed at where none can."""
    guard = Guard({}, 0, fleet.view)

    def able(revision: str) -> int:
        counted = {
            (revision, role): sum(
                i.serving for i in fleet.kept if (i.id.revision, i.id.role) == (revision, role)
            )
            for role in ROLES
        }
        return sum(guard.serving(counted).values())

    names = sorted({instance.id.revision for instance in fleet.kept} - {fleet.target})
    return max([fleet.target, *names], key=able)


def _routed(fleet: Fleet, targets: Counts) -> frozenset[str]:
    """All revisions that are there; with BlueGreen one set or the other, but for a canary."""
    present = {instance.id.revision for instance in fleet.all} | {fleet.target}
    if fleet.view.strategy != "BlueGreen" or fleet.view.canary is not None or not fleet.old:
        return frozenset({fleet.target}) if not fleet.old else frozenset(present)
    available = count_by_role(i for i in fleet.new if fleet.available(i))
    complete = all(available[role] >= targets[role] for role in ROLES)
    if complete and not fleet.view.paused:
        return frozenset({fleet.target})
    return frozenset(present - {fleet.target})


def _wait_s(fleet: Fleet) -> float | None:
    """When time alone changes the answer: a drain ends, an instance counts, a step is overdue."""
    view, now_s = fleet.view, fleet.now_s
    times = [t for i in fleet.draining for t in drains_until_s(i, view)]
    for instance in fleet.pending():
        if instance.ready_since_s is not None and instance.serving:
            times.append(instance.ready_since_s + view.min_ready_s)
        times.append(instance.created_s + view.progress_deadline_s)
    later = [at_s - now_s for at_s in times if at_s > now_s]
    return min(later, default=None)
