"""How much work one request is, on average: what a fleet's later requests are made of. Pure."""

import math

USUAL_COUNT = 20.0
"""Requests that the prior is worth."""
USUAL_RATE = 0.02


class UsualWork:
    """Seconds of prefill that a request takes; `prior_s` before any was seen."""

    def __init__(self, prior_s: float) -> None:
        self.mean_s, self._count = max(prior_s, 1e-6), USUAL_COUNT

    def observe(self, seconds: float) -> None:
        """A request took so long."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        self._count += 1
        self.mean_s += max(1 / self._count, USUAL_RATE) * (seconds - self.mean_s)
