"""The observed instances, sorted by what a rollout may do with them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kimi_operator.api.deployment import ROLES
from kimi_operator.api.roles import RoleName
from kimi_operator.observed import InstanceView
from kimi_operator.rollout.view import RolloutView

Counts = Mapping[RoleName, int]


def count_by_role(instances: Iterable[InstanceView]) -> dict[RoleName, int]:
    """Instances of each role, 0 included."""
    counted = Counter(instance.id.role for instance in instances)
    return {role: counted[role] for role in ROLES}


@dataclass(frozen=True)
class Fleet:
    """`new` and `old` are kept (neither draining nor terminating), by the revision aimed at."""

    target: str
    new: tuple[InstanceView, ...]
    old: tuple[InstanceView, ...]
    draining: tuple[InstanceView, ...]
    terminating: tuple[InstanceView, ...]
    view: RolloutView
    now_s: float

    @classmethod
    def of(
        cls, instances: Sequence[InstanceView], target: str, view: RolloutView, now_s: float
    ) -> "Fleet":
        """Sort what is observed."""
        ordered = sorted(instances, key=lambda instance: instance.id)
        leaving = [i for i in ordered if (i.draining or i.evicted) and not i.terminating]
        kept = [i for i in ordered if not (i.draining or i.evicted or i.terminating)]
        return cls(
            target=target,
            new=tuple(i for i in kept if i.id.revision == target),
            old=tuple(i for i in kept if i.id.revision != target),
            draining=tuple(leaving),
            terminating=tuple(i for i in ordered if i.terminating),
            view=view,
            now_s=now_s,
        )

    @property
    def kept(self) -> tuple[InstanceView, ...]:
        """What stays as it is unless something is decided."""
        return self.old + self.new

    @property
    def all(self) -> tuple[InstanceView, ...]:
        """Whatever holds GPUs."""
        return self.old + self.new + self.draining + self.terminating

    @property
    def gpus(self) -> int:
        """GPUs in use, those of terminating pods included."""
        return sum(self.view.gpus_of(instance.id) for instance in self.all)

    def available(self, instance: InstanceView) -> bool:
        """Whether it serves, and has done so for `min_ready_s` where it is of the new revision.

        An old one has proved itself; asking it again would let a longer `minReadySeconds` take
        capacity out of the count.
        """
        if not instance.serving or instance.draining or instance.terminating:
            return False
        if instance.id.revision != self.target or self.view.min_ready_s <= 0:
            return True
        since_s = instance.ready_since_s
        return since_s is not None and self.now_s - since_s >= self.view.min_ready_s

    def serving(self) -> dict[RoleName, int]:
        """Kept instances, by role, that can serve now."""
        return Guard({}, 0, self.view).serving(self.counted(self.kept))

    def counted(self, instances: Iterable[InstanceView]) -> Counter[tuple[str, RoleName]]:
        """Those of them that are available, by revision and role."""
        return Counter((i.id.revision, i.id.role) for i in instances if self.available(i))

    def pending(self) -> list[InstanceView]:
        """New instances that do not count yet."""
        return [instance for instance in self.new if not self.available(instance)]

    def stable_revision(self) -> str | None:
        """The old revision that serves most; None where no old instance is left."""
        revisions = {instance.id.revision for instance in (*self.old, *self.draining)}
        revisions.discard(self.target)
        if not revisions:
            return None

        def weight(revision: str) -> tuple[int, int, str]:
            mine = [i for i in (*self.old, *self.draining) if i.id.revision == revision]
            return sum(i.serving for i in mine), len(mine), revision

        return max(revisions, key=weight)


@dataclass(frozen=True)
class Guard:
    """What a removal must leave serving.

    Prefill and decode of different revisions are never paired, so what serves is counted per
    revision: one that lacks a role serves nothing, unless its workers do both. `floors` are by
    role, `least` over all roles. What is below its floor already must not sink further.
    """

    floors: Counts
    least: int
    view: RolloutView

    def serving(self, counted: Mapping[tuple[str, RoleName], int]) -> dict[RoleName, int]:
        """Instances that can serve, by role, of those counted by revision and role."""
        able: dict[RoleName, int] = dict.fromkeys(ROLES, 0)
        for revision in {revision for revision, _ in counted}:
            have = {role: counted.get((revision, role), 0) for role in ROLES}
            needs = [role for role in self.view.shape_of(revision) if role in ROLES]
            if not self.view.either_role and not all(have[role] for role in needs):
                continue
            for role in ROLES:
                able[role] += have[role]
        return able

    def allows(
        self,
        counted: Mapping[tuple[str, RoleName], int],
        removed: Mapping[tuple[str, RoleName], int],
    ) -> bool:
        """Whether the removal leaves enough of what serves now."""
        before = self.serving(counted)
        after = self.serving({key: n - removed.get(key, 0) for key, n in counted.items()})
        enough = all(after[role] >= min(self.floors.get(role, 0), before[role]) for role in ROLES)
        return enough and sum(after.values()) >= min(self.least, sum(before.values()))
