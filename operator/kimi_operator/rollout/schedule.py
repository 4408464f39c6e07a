"""The waypoints of a rollout: how many new instances of each role, and how many old ones at most.

They depend on the spec and the wanted counts alone, so any pass can tell from the instances which
waypoint was passed last.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kimi_operator.api.deployment import ROLES
from kimi_operator.api.roles import RoleName
from kimi_operator.rollout.fleet import Counts, Fleet, Guard, count_by_role
from kimi_operator.rollout.view import RolloutView

ANY = math.inf


@dataclass(frozen=True)
class Waypoint:
    """`new` instances are available and no more than `old` are left, by role."""

    new: Counts
    old: Mapping[RoleName, float]

    def passed(self, available: Counts, old: Counts) -> bool:
        """Whether these counts are at it or beyond."""
        return all(available[r] >= self.new[r] and old[r] <= self.old[r] for r in ROLES)


@dataclass(frozen=True)
class Course:
    """How one revision follows another: waypoints from the start, with what holds on the way.

    `surge` is by role. `ends_early` says that the last waypoint is a canary, not the end.
    """

    waypoints: tuple[Waypoint, ...]
    guard: Guard
    surge: Counts
    ends_early: bool = False

    @property
    def steps(self) -> int:
        """Steps between the first and the last waypoint."""
        return len(self.waypoints) - 1

    def reached(self, fleet: Fleet) -> int:
        """The last waypoint that was passed."""
        available = count_by_role(i for i in fleet.new if fleet.available(i))
        old = count_by_role(fleet.old)
        passed = [n for n, point in enumerate(self.waypoints) if point.passed(available, old)]
        return max(passed, default=0)


def floors_of(view: RolloutView, targets: Counts) -> dict[RoleName, int]:
    """Instances of each role that a rollout leaves serving, never one side at zero.

    A role of a single instance may pause where the other role's workers serve meanwhile.
    """
    total = sum(targets.values())

    def floor(count: int) -> int:
        alone = not view.either_role or count > 1 or total == 1
        return min(count, max(count - view.max_unavailable, 1 if alone else 0))

    return {role: floor(targets[role]) for role in ROLES}


def course_of(view: RolloutView, targets: Counts) -> Course:
    """The course of the spec's strategy."""
    if view.strategy == "RecreatePair":
        return _until_canary(view, targets, recreation(view, targets))
    guard = Guard(floors_of(view, targets), min(1, sum(targets.values())), view)
    if view.strategy == "BlueGreen":
        points = [
            _start(),
            Waypoint(targets, {role: targets[role] for role in ROLES}),
            _end(targets),
        ]
        return _until_canary(view, targets, Course(tuple(points), guard, targets))
    steps = _steps(view, targets)
    points = [_start(), *(_between(view, targets, n / steps) for n in range(1, steps))]
    surge = dict.fromkeys(ROLES, view.max_surge)
    return _until_canary(view, targets, Course((*points, _end(targets)), guard, surge))


def recreation(view: RolloutView, targets: Counts) -> Course:
    """All down, then up: the course where an outage is chosen or allowed."""
    guard = Guard(dict.fromkeys(ROLES, 0), 0, view)
    return Course((_start(), _end(targets)), guard, dict.fromkeys(ROLES, 0))


def _start() -> Waypoint:
    return Waypoint(dict.fromkeys(ROLES, 0), dict.fromkeys(ROLES, ANY))


def _end(targets: Counts) -> Waypoint:
    return Waypoint(targets, dict.fromkeys(ROLES, 0))


def _steps(view: RolloutView, targets: Counts) -> int:
    """Steps small enough for what may be down at once and for the allowed skew."""
    most = max(targets.values(), default=0)
    batch = max(1, view.max_unavailable + view.max_surge)
    for_skew = min(most, math.ceil(100 / view.max_skew_percent))
    return max(1, math.ceil(most / batch), for_skew)


def _between(view: RolloutView, targets: Counts, share: float) -> Waypoint:
    """The counts nearest to the share that leave both revisions a complete set of roles."""
    new: dict[RoleName, int] = {}
    old: dict[RoleName, float] = {}
    for role in ROLES:
        count = targets[role]
        nearest = math.floor(count * share + 0.5)
        new[role] = min(max(nearest, 1), max(count - 1, 1), count)
        left = count - new[role]
        if count == 1 and not view.either_role:
            left = 1  # the only one goes with the last of the other role
        old[role] = left if count else ANY
    return Waypoint(new, old)


def _until_canary(view: RolloutView, targets: Counts, course: Course) -> Course:
    """The course up to the canary, where there is one and it is not everything."""
    canary = view.canary
    if canary is None or all(targets[role] <= canary for role in ROLES):
        return course
    beside_each_other = view.strategy == "BlueGreen"
    most = {role: _canaries(view, targets[role], canary) for role in ROLES}
    points: list[Waypoint] = []
    for point in course.waypoints[:-1] if beside_each_other else course.waypoints:
        capped = Waypoint(
            {role: min(point.new[role], most[role]) for role in ROLES},
            {
                role: max(point.old[role], _beside(view, targets[role], most[role]))
                for role in ROLES
            },
        )
        if capped not in points:
            points.append(capped)
    return Course(tuple(points), course.guard, course.surge, ends_early=True)


def _canaries(view: RolloutView, count: int, canary: int) -> int:
    """Canaries of a role: one instance of several stays old, since the old revision needs it."""
    paired = view.strategy != "BlueGreen" and not view.either_role
    return min(canary, count - 1 if paired and count > 1 else count)


def _beside(view: RolloutView, count: int, canaries: int) -> float:
    """Old instances of a role that stay beside its canaries."""
    if not count:
        return ANY
    only = view.strategy == "Paired" and not view.either_role and count == 1
    return 1 if only else count - canaries
