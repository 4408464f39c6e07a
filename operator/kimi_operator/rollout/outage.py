"""When a revision cannot be replaced without an interruption, and what would avoid that."""

from kimi_operator.api.deployment import ROLES
from kimi_operator.api.roles import RoleName
from kimi_operator.rollout.fleet import Counts, Fleet, count_by_role
from kimi_operator.rollout.schedule import floors_of
from kimi_operator.rollout.view import RolloutView


def unavoidable_outage(view: RolloutView, targets: Counts, fleet: Fleet) -> str | None:
    """Why the rollout must interrupt serving; None where it need not.

    A role none of whose instances may be down needs its first new instance beside the old ones:
    `maxSurge`, and the GPUs for it.
    """
    old, new = count_by_role(fleet.old), count_by_role(fleet.new)
    floors, able = floors_of(view, targets), fleet.serving()
    tight = [
        role
        for role in ROLES
        if able[role] and old[role] and not new[role] and floors[role] >= targets[role] > 0
    ]
    if view.strategy == "BlueGreen":
        gpus = sum(
            max(targets[role] - new[role], 0) * view.shape_of(fleet.target).get(role, 0)
            for role in ROLES
        )
        return _no_room(view, fleet, gpus) if fleet.old else None
    if not tight:
        return None
    why = _why_tight(view, targets, tight)
    if view.max_surge == 0:
        return f"{why}, and maxSurge is 0"
    gpus = _gpus_of_first_pair(view, targets, fleet, floors, new)
    no_room = _over_budget(view, gpus)
    return f"{why}, and {no_room}" if no_room else None


def stuck_outage(view: RolloutView, targets: Counts, short_of_gpus: int) -> str:
    """Why nothing can move although nothing is being waited for."""
    present = [role for role in ROLES if targets[role]]
    room = (
        f"budget.maxGPUs {view.max_gpus} is {short_of_gpus} GPUs short of a further instance"
        if short_of_gpus
        else f"maxSurge is {view.max_surge}"
    )
    return f"{_why_tight(view, targets, present)}, and {room}"


def remedy(outage: str, *, canary: bool) -> str:
    """What to change, for the message of a rollout that waits. A canary means to interrupt nothing,
    so an outage that is allowed does not go with it.
    """
    more = "raise budget.maxGPUs" if "maxGPUs" in outage else "set rollout.maxSurge: 1"
    otherwise = "or remove rollout.canary and" if canary else "or"
    return f"{outage}: {more}, {otherwise} accept an interruption with rollout.allowOutage: true"


def _why_tight(view: RolloutView, targets: Counts, roles: list[RoleName]) -> str:
    single = [role for role in roles if targets[role] == 1]
    if not single:
        return f"none of the {' and '.join(roles)} instances may be down (maxUnavailable is " + (
            f"{view.max_unavailable})"
        )
    alone = "" if view.either_role else ", the engine's workers do not do both roles"
    have = "have" if len(single) > 1 else "has"
    return f"{' and '.join(single)} {have} a single instance{alone}"


def _gpus_of_first_pair(
    view: RolloutView, targets: Counts, fleet: Fleet, floors: Counts, new: Counts
) -> int:
    """GPUs in use at the least when the first new instances stand beside the old ones."""
    shape = view.shape_of(fleet.target)
    gpus = 0
    for role in ROLES:
        old_gpus = min((view.gpus_of(i.id) for i in fleet.old if i.id.role == role), default=0)
        gpus += floors[role] * old_gpus
        if targets[role] and (not view.either_role or floors[role] >= targets[role]):
            gpus += max(new[role], 1) * shape.get(role, 0)
    return gpus


def _over_budget(view: RolloutView, gpus: int) -> str | None:
    if view.max_gpus is None or gpus <= view.max_gpus:
        return None
    return f"it takes {gpus} GPUs to have new ones beside them, budget.maxGPUs is {view.max_gpus}"


def _no_room(view: RolloutView, fleet: Fleet, more: int) -> str | None:
    if view.max_gpus is None or fleet.gpus + more <= view.max_gpus:
        return None
    return (
        f"BlueGreen needs {fleet.gpus + more} GPUs for both sets, budget.maxGPUs is {view.max_gpus}"
    )
