"""What may be taken away and what may be added, without going below a floor or over the budget."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kimi_operator.api.deployment import ROLES
from kimi_operator.api.roles import RoleName
from kimi_operator.observed import InstanceId, InstanceView
from kimi_operator.rollout.fleet import Counts, Fleet, Guard, count_by_role
from kimi_operator.rollout.victims import cost_of_losing


def order_of_removal(fleet: Fleet) -> list[InstanceView]:
    """Kept instances, first to go first: what does not count anyway, leftovers of a rollout that
    was overtaken, then old before new, each cheapest first.
    """
    stable = fleet.stable_revision()

    def rank(instance: InstanceView) -> tuple[bool, int]:
        revision = instance.id.revision
        place = 2 if revision == fleet.target else 1 if revision == stable else 0
        return fleet.available(instance), place

    return sorted(fleet.kept, key=lambda instance: (rank(instance), cost_of_losing(instance)))


def choose_removals(
    candidates: Sequence[InstanceView], quota: Mapping[RoleName, float], guard: Guard, fleet: Fleet
) -> list[InstanceView]:
    """As many candidates, in their order, as the quota by role and the guard let go.

    One that the guard refuses alone may go together with all that is left of its revision: the last
    prefill instance and the last decode instance leave at once.
    """
    left = dict(quota)
    counted = fleet.counted(fleet.kept)
    chosen: list[InstanceView] = []

    def take(group: Sequence[InstanceView]) -> None:
        size = count_by_role(group)
        removed = fleet.counted(group)
        over = any(size[role] > left[role] for role in ROLES if size[role])
        if over or not guard.allows(counted, removed):
            return
        chosen.extend(group)
        counted.subtract(removed)
        for role in ROLES:
            left[role] -= size[role]

    for candidate in candidates:
        take([candidate])
    for revision in dict.fromkeys(candidate.id.revision for candidate in candidates):
        rest = [c for c in candidates if c.id.revision == revision and c not in chosen]
        if rest:
            take(rest)
    return chosen


@dataclass
class Additions:
    """Instances to add, within the counts and the GPUs that are free; nothing is taken twice."""

    fleet: Fleet
    targets: Counts
    surge: Counts
    created: list[InstanceId] = field(default_factory=list)
    kept_again: list[InstanceId] = field(default_factory=list)
    short_of_gpus: int = 0

    def fill(self, revision: str, missing: Counts, first: Sequence[RoleName] = ()) -> None:
        """Add up to `missing` instances of the revision, the role furthest behind first.

        One that drains already is kept instead where there is one: it is loaded and warm.
        """
        left = {role: self._kept_again(revision, role, missing[role]) for role in ROLES}
        while any(left.values()):
            roles = sorted(
                (role for role in ROLES if left[role] > 0),
                key=lambda role: (role not in first, self._share(role, left[role])),
            )
            added = next((role for role in roles if self._add(role, revision)), None)
            if added is None:
                return
            left[added] -= 1

    def _share(self, role: RoleName, missing: int) -> float:
        return -missing / max(self.targets[role], 1)

    def _kept_again(self, revision: str, role: RoleName, missing: int) -> int:
        """Stop drains of instances of the revision; return how many are missing still."""
        drained = [
            i
            for i in self.fleet.draining
            if (i.id.revision, i.id.role) == (revision, role)
            and not i.evicted
            and i.id not in self.kept_again
        ]
        again = sorted(drained, key=cost_of_losing, reverse=True)[: max(missing, 0)]
        self.kept_again += [instance.id for instance in again]
        return max(missing, 0) - len(again)

    def _add(self, role: RoleName, revision: str) -> bool:
        if self.fleet.view.hold is not None and revision == self.fleet.target:
            return False
        total = self._total(role)
        if total >= self.targets[role] + self.surge[role]:
            return False
        new = InstanceId(role, revision, self._free_index(role, revision))
        budget = self.fleet.view.max_gpus
        if budget is not None:
            gpus = self.fleet.view.gpus_of(new)
            lacking = self.fleet.gpus + self._gpus_created() + gpus - budget
            if total >= self.targets[role]:
                lacking += self._reserved(revision, role)
            if lacking > 0:
                self.short_of_gpus = max(self.short_of_gpus, lacking)
                return False
        self.created.append(new)
        return True

    def _total(self, role: RoleName) -> int:
        here = count_by_role(self.fleet.all)[role]
        return here + sum(created.role == role for created in self.created)

    def _gpus_created(self) -> int:
        return sum(self.fleet.view.gpus_of(created) for created in self.created)

    def _reserved(self, revision: str, surging: RoleName) -> int:
        """GPUs that the other roles need to reach their counts: a surge must not take them."""
        shape = self.fleet.view.shape_of(revision)
        return sum(
            max(self.targets[role] - self._total(role), 0) * shape.get(role, 0)
            for role in ROLES
            if role != surging
        )

    def _free_index(self, role: RoleName, revision: str) -> int:
        taken = {
            i.id.index for i in self.fleet.all if (i.id.role, i.id.revision) == (role, revision)
        }
        taken |= {c.index for c in self.created if (c.role, c.revision) == (role, revision)}
        return next(index for index in range(len(taken) + 1) if index not in taken)
