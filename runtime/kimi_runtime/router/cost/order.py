"""Which of two costs is better, with ties that are honest about how well costs are known. Pure.

Costs are put on a grid whose steps are as wide as the tie band; those in one step are equal. Unlike
a band around the best, a grid orders plans by what each of them costs alone: leaving out a plan
that was not chosen never changes the choice.
"""

import hashlib
import math
from dataclasses import dataclass

ROUNDING = 1e-9
"""Share of a floor that is given up, so that no rounding lifts it above the cost."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Steps of `tie_s` for small costs and of the share `tie_share` for large ones."""

    tie_s: float
    tie_share: float

    @property
    def knee_s(self) -> float:
        """Where a share of the cost becomes wider than `tie_s`."""
        return self.tie_s / self.tie_share

    def step(self, cost_s: float) -> int:
        """The step a cost falls into; rises with the cost. A cost may be negative."""
        if cost_s <= self.knee_s:
            return math.floor(cost_s / self.tie_s)
        above = math.log(cost_s / self.knee_s) / math.log1p(self.tie_share)
        return math.floor(1 / self.tie_share + above)

    def end(self, step: int) -> float:
        """No cost of `step` or below reaches this one."""
        if step + 1 <= 1 / self.tie_share:
            return (step + 1) * self.tie_s
        above: float = (1 + self.tie_share) ** (step + 1 - 1 / self.tie_share)
        return self.knee_s * above


class Rendezvous:
    """Orders names differently for each session, and evenly over sessions."""

    __slots__ = ("_keyed",)

    def __init__(self, session: bytes) -> None:
        self._keyed = hashlib.blake2b(key=session[:64], digest_size=8)

    def __call__(self, name: str) -> int:
        """The name's place in the session's order."""
        keyed = self._keyed.copy()  # the key is taken in once for all names
        keyed.update(name.encode())
        return int.from_bytes(keyed.digest(), "big")
