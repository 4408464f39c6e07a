"""How long a source takes to bring so many bytes, from how long it took lately. Pure.

`seconds = latency + bytes / rate`, fitted by least squares with exponentially fading weights. What
is known before the first measurement counts as a few of them, so that it is soon outvoted.
"""

from kimi_runtime.umbp.tiers.base import TierCost

FADING = 0.9
"""Weight of a measurement after one more."""

FASTEST = 1e12
"""Bytes a second where the size made no difference."""

PRIOR_BYTES = (1 << 20, 32 << 20)
"""The prior counts as one measurement of each size."""


class MeasuredCost:
    """The cost of one source; `prior` until it is measured."""

    def __init__(self, prior: TierCost) -> None:
        self.measured = 0
        """How often."""
        self._prior = prior
        self._sums = [0.0] * 5
        for size in PRIOR_BYTES:
            self._add(size, prior.seconds(size))

    def observe(self, size_bytes: int, seconds: float) -> None:
        """It took so long to bring so much."""
        if size_bytes > 0 and seconds > 0:
            self.measured += 1
            self._sums = [FADING * one for one in self._sums]
            self._add(size_bytes, seconds)

    @property
    def cost(self) -> TierCost:
        """As it is now."""
        weight, x, y, xx, xy = self._sums
        spread = weight * xx - x * x
        if spread <= 1e-6 * weight * xx:  # all of one size: larger ones take longer in proportion
            return TierCost(0.0, x / y)
        per_byte = (weight * xy - x * y) / spread
        latency_s = (y - per_byte * x) / weight
        if per_byte <= 0:
            return TierCost(y / weight, FASTEST)
        return TierCost(latency_s, 1 / per_byte) if latency_s >= 0 else TierCost(0.0, xx / xy)

    def seconds(self, size_bytes: int) -> float:
        """Expected seconds for so much."""
        return self.cost.seconds(size_bytes)

    def _add(self, size: float, seconds: float) -> None:
        # relative errors count: a small batch says as much as a large one
        scale = 1 / self._prior.seconds(int(size)) ** 2
        new = (1.0, size, seconds, size * size, size * seconds)
        self._sums = [one + scale * more for one, more in zip(self._sums, new, strict=True)]
