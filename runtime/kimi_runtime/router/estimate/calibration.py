"""Whether "80 % of requests are faster than this" is true, and by how much to correct it. Pure.

Conformal: the standardised errors of the last 500 decisions are kept, and the q-quantile of those
takes the place of the normal one as soon as there are enough. Source: Vovk et al. (2005); the rank
is ceil((n + 1) q), so the coverage holds for the next decision and not only for the past ones.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from statistics import NormalDist

KEPT = 500
ENOUGH = 50
MAX_SD = 10.0
_NORMAL = NormalDist()


class Calibration:
    """Errors of one kind of plan, in standard deviations."""

    def __init__(self, *, kept: int = KEPT) -> None:
        self._kept = kept
        self._newest: deque[float] = deque()
        self._sorted: list[float] = []

    def observe(self, *, expected_s: float, sd_s: float, actual_s: float) -> None:
        """What was expected took `actual_s`."""
        off = (actual_s - expected_s) / max(sd_s, 1e-9)
        if not math.isfinite(off):
            return
        off = min(max(off, -MAX_SD), MAX_SD)
        self._newest.append(off)
        insort(self._sorted, off)
        if len(self._newest) > self._kept:
            del self._sorted[bisect_left(self._sorted, self._newest.popleft())]

    def z(self, q: float) -> float:
        """Standard deviations above the mean that a share `q` of requests stays under, >= 0.

        Never negative: a plan is not made better by being uncertain.
        """
        count = len(self._sorted)
        if count < ENOUGH:
            return max(_NORMAL.inv_cdf(q), 0.0)
        rank = min(math.ceil((count + 1) * q), count)
        return max(self._sorted[rank - 1], 0.0)

    def coverage(self, z: float) -> float | None:
        """Of the kept requests, the share that was faster than mean + z sd; None without any."""
        if not self._sorted:
            return None
        return bisect_left(self._sorted, z) / len(self._sorted)
