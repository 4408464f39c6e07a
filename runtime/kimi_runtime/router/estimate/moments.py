"""What an estimator says: a mean and how far off it may be."""

import math
from typing import NamedTuple


class Estimate(NamedTuple):
    """A mean and a variance, in a unit the name of its use says."""

    mean: float
    var: float = 0.0

    @property
    def sd(self) -> float:
        """The standard deviation."""
        return math.sqrt(self.var)

    def plus(self, other: "Estimate") -> "Estimate":
        """The sum of two independent quantities."""
        return Estimate(self.mean + other.mean, self.var + other.var)

    def times(self, factor: float) -> "Estimate":
        """The quantity in another unit."""
        return Estimate(self.mean * factor, self.var * factor * factor)
