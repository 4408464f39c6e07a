"""Which revision a rollout goes to."""

from collections.abc import Sequence
from dataclasses import dataclass

from kimi_operator.observed import InstanceView
from kimi_operator.rollout.fleet import Fleet
from kimi_operator.rollout.view import Revisions, RolloutView


@dataclass(frozen=True)
class Aim:
    """The revision to go to; `held` says why nothing may be replaced on the way."""

    revision: str
    held: str | None = None


def aim_of(view: RolloutView, revisions: Revisions, instances: Sequence[InstanceView]) -> Aim:
    """The user's choice, what a rollback goes back to, or what the spec asks for."""
    aim = _aim_of(view, revisions, instances)
    return aim if aim.held or view.hold is None else Aim(aim.revision, view.hold)


def _aim_of(view: RolloutView, revisions: Revisions, instances: Sequence[InstanceView]) -> Aim:
    wanted = view.to_revision
    if wanted is not None:
        if wanted in (*revisions.history, revisions.update):
            return Aim(wanted)
        kept = ", ".join(revisions.history) or "none"
        return Aim(
            _present(revisions, instances),
            f"rollout.toRevision is {wanted}, but the kept revisions are {kept}: name one of "
            "these, or remove toRevision",
        )
    if revisions.update in revisions.failed and view.on_failure == "Rollback":
        return Aim(fallback(revisions, instances) or revisions.update)
    return Aim(revisions.update)


def fallback(revisions: Revisions, instances: Sequence[InstanceView]) -> str | None:
    """What a rollback of the update revision goes to: what serves, else the newest that did not
    fail; None where there is none.
    """
    candidates = [
        name
        for name in revisions.history
        if name != revisions.update and name not in revisions.failed
    ]
    serving = {instance.id.revision for instance in instances if instance.serving}
    return max(
        candidates,
        key=lambda name: (name in serving, revisions.history.index(name)),
        default=None,
    )


def _present(revisions: Revisions, instances: Sequence[InstanceView]) -> str:
    """The revision most of what is there has."""
    names = [instance.id.revision for instance in instances if not instance.terminating]
    return max(sorted(set(names)), key=names.count, default=revisions.update)


def overdue(fleet: Fleet, deadline_s: float) -> InstanceView | None:
    """A new instance that has kept the step from ending for longer than the deadline.

    A step begins with its youngest instance; one that was ready before is counted from when it
    stopped being so. With no old instance left only a revision that never served has failed: what
    breaks later is an outage, which other pods would not cure.
    """
    pending = fleet.pending()
    if not pending:
        return None
    if not fleet.old and not _never_served(fleet):
        return None
    began_s = max(instance.created_s for instance in fleet.new)
    worst = min(pending, key=_waits_since_s)
    late = fleet.now_s - max(began_s, _waits_since_s(worst)) > deadline_s
    return worst if late else None


def _waits_since_s(instance: InstanceView) -> float:
    seen = (instance.created_s, instance.unready_since_s, instance.ready_since_s)
    return max(at_s for at_s in seen if at_s is not None)


def _never_served(fleet: Fleet) -> bool:
    return all(not instance.serving and instance.unready_since_s is None for instance in fleet.new)
