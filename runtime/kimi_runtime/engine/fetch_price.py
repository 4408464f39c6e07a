"""Whether blocks are worth waiting for, or sooner computed. Pure."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kimi_connect.wire import Stretch

PATIENCE = 2.0
"""A fetch may take so many times what computing takes before it is given up: it was to be cheaper,
and what was waited for is lost."""

LEAST_S = 0.05
"""A fetch is waited for as long as this in any case: computing is not known to the millisecond."""

Compute = Callable[[int, int], float | None]
"""Seconds to compute so many tokens after so many; None: not known."""


class Worth(NamedTuple):
    """Fetch the first `blocks`; `refused` of those that follow could be had, and cost more than
    computing them. `within_s` is how long the fetch is worth waiting for; None: as long as may be.
    """

    blocks: int
    refused: int
    within_s: float | None


def worth_fetching(
    stretches: Sequence[Stretch], *, block_tokens: int, before: int, compute: Compute
) -> Worth:
    """How much of a run that follows `before` tokens to fetch, so that all is there soonest.

    Computing a token saves nothing of those after it, so the run is cut where the fetch up to there
    saves most: `compute` of the tokens fetched, less the seconds of the stretches that bring them.
    Where computing was never timed, all is fetched.
    """
    total = sum(stretch.blocks for stretch in stretches)
    best, blocks, fetch_s = 0, 0, 0.0
    most_saved = 0.0
    for stretch in stretches:
        blocks += stretch.blocks
        fetch_s += stretch.seconds
        compute_s = compute(blocks * block_tokens, before)
        if compute_s is None:
            return Worth(total, 0, None)
        if compute_s - fetch_s >= most_saved:
            best, most_saved = blocks, compute_s - fetch_s
    compute_s = compute(best * block_tokens, before) or 0.0
    return Worth(best, total - best, max(LEAST_S, PATIENCE * compute_s))
