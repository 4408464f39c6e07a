"""`targets`: the wanted number of instances of each role."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.api.roles import Role, RoleName
from kimi_operator.observed import InstanceView, Observed
from kimi_operator.scaling.bounds import Bounds, bounds_of
from kimi_operator.scaling.history import History
from kimi_operator.scaling.pressure import (
    COMFORT,
    MOST_GROWTH,
    TOLERANCE,
    Pressure,
    asked_for,
    idle,
    pressures,
)

STALE_S = 60.0
"""Signals older than this say nothing of now."""
UP_WINDOW_S = 30.0
"""A shortage must last this long; one burst is over before an instance is loaded."""
REBALANCE_WINDOW_S = 300.0
"""How long a role must have had spare instances before its GPUs go to a role that is short."""
LOOK_AGAIN_S = 15.0


@dataclass(frozen=True)
class Targets:
    """Wanted instances; `prefill` is None where there is no such role.

    `history` is to be passed to the next call. `wait_s` is when to decide again although nothing
    happened. `recommendation` is what would help but is not the planner's to do; `stale` says that
    the planner had no current signals and kept the counts.
    """

    prefill: int | None
    decode: int
    reason: str
    wait_s: float | None = None
    history: History = field(default_factory=History)
    recommendation: str | None = None
    stale: bool = False

    @property
    def by_role(self) -> dict[RoleName, int]:
        """As the rollout planner takes them."""
        roles: dict[RoleName, int] = {"decode": self.decode}
        return roles if self.prefill is None else {"prefill": self.prefill, **roles}


def seed(role: RoleName, spec: Role, observed: Observed) -> int:
    """What a new KimiWorkers of the role says: what is there, never 0, never fewer."""
    here = sum(i.id.role == role and not (i.draining or i.terminating) for i in observed.instances)
    return max(here, spec.least_replicas, 1)


def targets(spec: DeploymentSpec, observed: Observed, history: History, now_s: float) -> Targets:
    """The wanted counts of an effective spec.

    Static: the spec's. External: the `/scale` of the role's KimiWorkers. Managed: the planner's,
    whose last decision is what KimiWorkers says. Counts of the latter two are kept within `min`,
    `max`, the ratio and the budget, and prefill and decode are zero only together.
    """
    roles, bounds = dict(spec.roles()), bounds_of(spec)
    if spec.suspend == "Scale":
        return _answer(dict.fromkeys(roles, 0), "spec.suspend is Scale")
    written = {
        name: role.replicas
        if role.scaling.mode == "Static"
        else observed.workers_replicas.get(name, seed(name, role, observed))
        for name, role in roles.items()
    }
    managed = [name for name, role in roles.items() if role.scaling.mode == "Managed"]
    if managed:
        return _managed(_Planner(spec, observed, bounds, written, now_s), managed, history)
    if all(role.scaling.mode == "Static" for role in roles.values()):
        return replace(
            _answer(written, "the spec's replicas"), recommendation=_advice(spec, observed, now_s)
        )
    allowed = bounds.nearest(written)
    return replace(
        _answer(allowed, _clamped("/scale", written, allowed)),
        recommendation=_advice(spec, observed, now_s),
    )


@dataclass(frozen=True)
class _Planner:
    """One decision of mode Managed. `current` is what was decided last."""

    spec: DeploymentSpec
    observed: Observed
    bounds: Bounds
    current: Mapping[RoleName, int]
    now_s: float

    def serving(self, role: RoleName) -> list[InstanceView]:
        return [i for i in self.observed.instances if i.id.role == role and i.serving]

    def pressure(self, role: RoleName) -> Pressure | None:
        """The strongest."""
        found = pressures(role, self.spec, self.observed, self.serving(role))
        return max(found, key=lambda pressure: pressure.value, default=None)

    def wanted(self, role: RoleName) -> int:
        """Instances that the signals of this moment ask for."""
        current, pressure = self.current[role], self.pressure(role)
        if idle(self.observed) and self.bounds.roles[role].least == 0:
            return 0
        if pressure is None or current == 0:
            return current
        serving = len(self.serving(role))
        if pressure.value > 1 + TOLERANCE:
            # instances that load count as help to come, or a slow load would double without end
            grown = math.ceil(serving * min(pressure.value, MOST_GROWTH) - 1e-9)
            return max(current, grown)
        spare = current > 1 and pressure.value * current / (current - 1) <= COMFORT
        return current - 1 if spare and serving >= current else current

    def may_shrink(self, role: RoleName) -> bool:
        """Whether the youngest instance is old enough to know what it does to the load."""
        settle_s = dict(self.spec.roles())[role].scaling.min_ready_before_scale_down
        since = [i.ready_since_s for i in self.serving(role) if i.ready_since_s is not None]
        return all(self.now_s - since_s >= settle_s for since_s in since)

    def fresh(self) -> bool:
        at_s = self.observed.signals.at_s
        return at_s is not None and self.now_s - at_s <= STALE_S


def _managed(planner: _Planner, managed: list[RoleName], history: History) -> Targets:
    current, now_s = planner.current, planner.now_s
    if not planner.fresh():
        kept = planner.bounds.nearest(current)
        reason = f"no signals of the last {STALE_S:g}s: the counts are kept"
        return replace(_answer(kept, reason), stale=True, wait_s=LOOK_AGAIN_S)
    delays = {n: dict(planner.spec.roles())[n].scaling.scale_down_delay for n in managed}
    keep_s = max(*delays.values(), REBALANCE_WINDOW_S, UP_WINDOW_S)
    history = history.add(now_s, {name: planner.wanted(name) for name in managed}, keep_s)
    if asked_for(planner.observed) and not any(current.values()):
        woken = planner.bounds.nearest(dict.fromkeys(current, 1))
        reason = "a request waits and nothing runs"
        return replace(_answer(woken, reason), history=History(), wait_s=LOOK_AGAIN_S)
    wants = dict(current)
    for name in managed:
        wants[name] = _steadied(planner, history, name, delays[name])
    wants = _together(wants, current, managed)
    allowed = _within(planner, wants)
    if any(wants[name] > max(allowed[name], current[name]) for name in managed):
        donors = {n: _spare_soon(planner, history, n, wants[n]) for n in managed}
        allowed = _within(planner, donors)
    return replace(
        _answer(allowed, _why(planner, managed, wants, allowed)),
        history=history,
        wait_s=LOOK_AGAIN_S,
        recommendation=_short_of(planner, managed, wants, allowed),
    )


def _steadied(planner: _Planner, history: History, name: RoleName, delay_s: float) -> int:
    """The count after the stabilisation windows: growth must last, lack of load longer."""
    track, current, now_s = history.tracks[name], planner.current[name], planner.now_s
    if history.covers(now_s, UP_WINDOW_S):
        lasting = track.lowest(now_s - UP_WINDOW_S)
        if lasting > current:
            return lasting
    if history.covers(now_s, delay_s) and planner.may_shrink(name):
        return min(current, track.highest(now_s - delay_s))
    return current


def _spare_soon(planner: _Planner, history: History, name: RoleName, wanted: int) -> int:
    """The count of a role that may give its spare GPUs to one that is short."""
    now_s, current = planner.now_s, planner.current[name]
    if wanted > current or not history.covers(now_s, REBALANCE_WINDOW_S):
        return wanted
    if not planner.may_shrink(name):
        return wanted
    return min(wanted, max(history.tracks[name].highest(now_s - REBALANCE_WINDOW_S), 1))


def _together(
    wants: Mapping[RoleName, int], current: Mapping[RoleName, int], managed: list[RoleName]
) -> dict[RoleName, int]:
    """To zero go all roles or none."""
    if all(wants[name] == 0 for name in wants):
        return dict(wants)
    return {
        name: current[name] if name in managed and count == 0 else count
        for name, count in wants.items()
    }


def _within(planner: _Planner, wants: Mapping[RoleName, int]) -> dict[RoleName, int]:
    """The nearest allowed counts that take from no role what it still needs."""
    kept = {
        name: replace(b, least=max(b.least, min(wants[name], planner.current[name], b.most)))
        for name, b in planner.bounds.roles.items()
    }
    nearest = replace(planner.bounds, roles=kept).nearest(wants)
    return nearest if planner.bounds.allows(nearest) else planner.bounds.nearest(wants)


def _answer(counts: Mapping[RoleName, int], reason: str) -> Targets:
    return Targets(counts.get("prefill"), counts["decode"], reason)


def _clamped(writer: str, wanted: Mapping[RoleName, int], allowed: Mapping[RoleName, int]) -> str:
    moved = [
        f"{role} {allowed[role]} instead of {wanted[role]}"
        for role in allowed
        if allowed[role] != wanted[role]
    ]
    bounds = "min, max, budget.maxGPUs and budget.ratio"
    return f"{writer}, within {bounds}: {', '.join(moved)}" if moved else writer


def _why(
    planner: _Planner,
    managed: list[RoleName],
    wants: Mapping[RoleName, int],
    allowed: Mapping[RoleName, int],
) -> str:
    said = []
    for role, count in allowed.items():
        before, pressure = planner.current[role], planner.pressure(role)
        if count == before:
            continue
        cause = "nothing is asked" if count == 0 else pressure.why if pressure else "the ratio"
        if role not in managed or (count > before and wants[role] <= before):
            cause = "budget.ratio"
        said.append(f"{role} from {before} to {count}: {cause}")
    return "; ".join(said) or "the planner's counts fit the load"


def _short_of(
    planner: _Planner,
    managed: list[RoleName],
    wants: Mapping[RoleName, int],
    allowed: Mapping[RoleName, int],
) -> str | None:
    """What the bounds kept the planner from."""
    short = []
    for role in managed:
        pressure = planner.pressure(role)
        if wants[role] > allowed[role] and pressure is not None:
            short.append(
                f"{wants[role]} {role} instances instead of {allowed[role]} ({pressure.short})"
            )
    if not short:
        return None
    return f"{'; '.join(short)}: raise scaling.max or budget.maxGPUs"


def _advice(spec: DeploymentSpec, observed: Observed, now_s: float) -> str | None:
    """Which role is short, where somebody else writes the counts."""
    at_s = observed.signals.at_s
    if at_s is None or now_s - at_s > STALE_S:
        return None
    short = []
    for name, _ in spec.roles():
        serving = [i for i in observed.instances if i.id.role == name and i.serving]
        worst = max(pressures(name, spec, observed, serving), key=lambda p: p.value, default=None)
        if worst is not None and worst.value > 1 + TOLERANCE:
            short.append(f"{name}: {worst.short}")
    return f"more instances would help {'; '.join(short)}" if short else None
