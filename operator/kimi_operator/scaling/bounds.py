"""Bounds of the counts, and the counts within them that come nearest to what is wanted."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from kimi_operator.api.deployment import ROLES, DeploymentSpec
from kimi_operator.api.roles import RoleName

MOST = 200
"""Instances of a role: what a list of them in the status and a cluster's names can bear."""

Counts = Mapping[RoleName, int]


@dataclass(frozen=True)
class RoleBounds:
    """Bounds of one role. `fixed` is the count where the spec itself is the writer."""

    least: int
    most: int
    gpus: int
    fixed: int | None = None


@dataclass(frozen=True)
class Bounds:
    """Bounds of all roles together; `ratio` is of prefill to decode."""

    roles: Mapping[RoleName, RoleBounds]
    max_gpus: int | None = None
    least_ratio: Fraction | None = None
    most_ratio: Fraction | None = None

    def gpus(self, counts: Counts) -> int:
        """GPUs of the counts."""
        return sum(bounds.gpus * counts.get(role, 0) for role, bounds in self.roles.items())

    def allows(self, counts: Counts) -> bool:
        """Whether the counts keep the budget and, where both roles run, the ratio."""
        if not self._fits(counts):
            return False
        if len(self.roles) < 2 or not all(counts[role] for role in self.roles):
            return True
        ratio = Fraction(counts["prefill"], counts["decode"])
        above = self.least_ratio is None or ratio >= self.least_ratio
        return above and (self.most_ratio is None or ratio <= self.most_ratio)

    def nearest(self, wanted: Counts) -> dict[RoleName, int]:
        """The allowed counts that come nearest: the role worst off comes as near as it can.

        With nothing wanted of any role and nothing required, both are zero; otherwise both run,
        but for a role whose spec says 0. Where no counts keep the ratio it is given up; the budget
        is not.
        """
        off = [role for role, bounds in self.roles.items() if bounds.fixed == 0]
        if off:
            on = {role: b for role, b in self.roles.items() if role not in off}
            rest = replace(self, roles=on, least_ratio=None, most_ratio=None)
            return dict.fromkeys(off, 0) | (rest.nearest(wanted) if on else {})
        required = any(bounds.least for bounds in self.roles.values())
        if not required and not any(wanted[role] for role in self.roles):
            return dict.fromkeys(self.roles, 0)
        for keeps_ratio in (True, False):
            candidates = list(self._candidates(wanted, keeps_ratio))
            if candidates:
                return min(candidates, key=lambda counts: self._distance(counts, wanted))
        return {role: bounds.least for role, bounds in self.roles.items()}

    def _candidates(self, wanted: Counts, keeps_ratio: bool) -> Iterator[dict[RoleName, int]]:
        """Allowed counts: for each count of the first role the nearest ones of the other."""
        first, *others = self.roles
        for count in range(max(self.roles[first].least, 1), self.roles[first].most + 1):
            if not others:
                if self._fits({first: count}):
                    yield {first: count}
                continue
            least, most = self._span(count, keeps_ratio)
            if least <= most:
                other = min(max(wanted[others[0]], least), most)
                yield {first: count, others[0]: other}

    def _span(self, prefill: int, keeps_ratio: bool) -> tuple[int, int]:
        """Least and most decode instances beside these prefill instances."""
        decode = self.roles["decode"]
        least, most = max(decode.least, 1), decode.most
        if self.max_gpus is not None and decode.gpus:
            left = self.max_gpus - prefill * self.roles["prefill"].gpus
            most = min(most, left // decode.gpus)
        elif not self._fits({"prefill": prefill, "decode": 0}):
            most = 0
        if keeps_ratio and self.most_ratio is not None:
            least = max(least, -(-prefill // self.most_ratio))
        if keeps_ratio and self.least_ratio is not None:
            most = min(most, prefill // self.least_ratio)
        return least, most

    def _fits(self, counts: Counts) -> bool:
        return self.max_gpus is None or self.gpus(counts) <= self.max_gpus

    def _distance(self, counts: Counts, wanted: Counts) -> tuple[Fraction, int, int]:
        """How short the worst-off role falls, then how far off all are, then GPUs."""
        short = max(
            Fraction(max(wanted[role] - counts[role], 0), max(wanted[role], 1))
            for role in self.roles
        )
        off = sum(abs(wanted[role] - counts[role]) for role in self.roles)
        return short, off, self.gpus(counts)


def bounds_of(spec: DeploymentSpec) -> Bounds:
    """The bounds of an effective spec."""
    roles = {}
    for name, role in spec.roles():
        scaling = role.scaling
        if scaling.mode == "Static":
            roles[name] = RoleBounds(role.replicas, role.replicas, role.gpus, role.replicas)
        else:
            most = MOST if scaling.max is None else scaling.max
            roles[name] = RoleBounds(scaling.min, min(most, MOST), role.gpus)
    ratio = spec.budget.ratio
    ordered = {role: roles[role] for role in ROLES if role in roles}
    return Bounds(
        roles=ordered,
        max_gpus=spec.budget.max_gpus,
        least_ratio=_fraction(ratio.min) if ratio else None,
        most_ratio=_fraction(ratio.max) if ratio else None,
    )


def _fraction(ratio: str | None) -> Fraction | None:
    if ratio is None:
        return None
    prefill, decode = ratio.split(":")
    return Fraction(int(prefill), int(decode))
