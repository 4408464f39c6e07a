"""What becomes of a session's KV while its tool runs: keep, demote, fetch early, or drop. Pure.

KV in tier k is worth `hazard(t) * (reload(k+1) - reload(k)) * weight` a second at time t into the
gap: how likely the session is to come back just now, times what it would then save. It costs what
its space is worth to others. What is written through on the way down is not written again, so a
demotion is free. Min-waste interception (InferCept, arXiv 2402.01869) with a hazard in place of one
estimate of the gap's length, and a price in place of one memory.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kimi_runtime.router.estimate.gaps import Curve

EARLY = 1.2
"""A fetch starts this many times its own duration before the session is expected."""
IDLE_LINK_SHARE = 0.5
FETCH_QUANTILE = 0.5
"""Without a hint a fetch starts when this share of sessions would come back while it runs."""


class Action(StrEnum):
    """What to do with a session's KV."""

    KEEP = "keep"
    DEMOTE = "demote"
    PREFETCH = "prefetch"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class TierPrice:
    """One tier, fastest first. `reload_s`: from here into GPU memory. For one session's KV."""

    name: str
    reload_s: float
    space_s_per_s: float
    """What others lose every second that this session's KV is here: price times size."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do, and when to ask again if nothing happens (infinite: never)."""

    action: Action
    tier: str
    ask_again_s: float
    """Seconds into the gap."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A session whose tool runs: since when, and how long that may go on.

    `expected_s` is a client's hint of the whole gap; `ended`: the session is over or was compacted,
    and nobody will come back for this KV.
    """

    curve: Curve
    since_s: float
    expected_s: float | None = None
    ended: bool = False


def verdict(
    gap: Gap,
    tiers: Sequence[TierPrice],
    tier: int,
    *,
    recompute_s: float,
    idle_link_share: float = 0.0,
    weight: float = 1.0,
) -> Verdict:
    """Decide for KV that is in `tiers[tier]` now. Below the last tier lies recomputing.

    `idle_link_share` is of the links that a fetch upwards would use.
    """
    here = tiers[tier]
    if gap.ended:
        return Verdict(Action.DROP, "", math.inf)
    if tier and _is_time(gap, here.reload_s - tiers[0].reload_s, idle_link_share):
        return Verdict(Action.PREFETCH, tiers[0].name, math.inf)
    below = [*(one.reload_s for one in tiers[tier + 1 :]), recompute_s]
    # a gain over the next tier that is free is none if a tier further down is as fast
    saved_s = max(min(below) - here.reload_s, 0.0)
    until_s = _worth_until(gap, saved_s * weight, here.space_s_per_s)
    if until_s > gap.since_s:
        asks = [until_s]
        if tier and gap.expected_s is not None:
            asks.append(max(gap.expected_s - EARLY * here.reload_s, gap.since_s))
        return Verdict(Action.KEEP, here.name, min(asks))
    if tier + 1 < len(tiers):
        return Verdict(Action.DEMOTE, tiers[tier + 1].name, gap.since_s)
    return Verdict(Action.DROP, "", math.inf)


def _worth_until(gap: Gap, saved_s: float, space_s_per_s: float) -> float:
    """Seconds into the gap from which on the space costs more than it saves.

    Infinite if never. Hazards fall and rise again over a gap: what counts is the rest of the gap
    until then, so KV is kept through a quiet piece if the pieces after it pay for it.
    """
    if space_s_per_s <= 0:
        return math.inf
    curve, start_s = gap.curve, gap.since_s
    edges = [edge for edge in curve.edges_s if edge > start_s]
    best_s, best_gain, gain, alive = start_s, 0.0, 0.0, 1.0
    for end_s in [*edges, math.inf]:
        hazard = curve.hazard(start_s)
        ends = 1 - math.exp(-hazard * (end_s - start_s)) if hazard else 0.0
        stays_s = ends / hazard if hazard else end_s - start_s
        gain += alive * (ends * saved_s - stays_s * space_s_per_s)
        if gain > best_gain:
            best_s, best_gain = end_s, gain
        alive *= 1 - ends
        start_s = end_s
    return best_s


def _is_time(gap: Gap, fetch_s: float, idle_link_share: float) -> bool:
    """Whether a fetch that takes `fetch_s` should start now."""
    if fetch_s <= 0:
        return False
    if gap.expected_s is not None:
        return gap.expected_s - gap.since_s <= EARLY * fetch_s
    if idle_link_share <= IDLE_LINK_SHARE:
        return False
    return gap.curve.ends_within(EARLY * fetch_s, since_s=gap.since_s) >= FETCH_QUANTILE
