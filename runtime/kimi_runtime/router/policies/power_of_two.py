"""The less loaded of two workers drawn for each request (Mitzenmacher 2001).

The draw is a hash of the session and of how many were drawn before, so that it can be repeated.
"""

import hashlib
from collections.abc import Sequence

from kimi_runtime.router.plan import Leg, Terms
from kimi_runtime.router.policies.base import PicksByLeg
from kimi_runtime.router.view import RequestView, WorkerView


class PowerOfTwoPolicy(PicksByLeg):
    """Counts its draws."""

    def __init__(self) -> None:
        self._draws = 0

    def _pick(
        self, request: RequestView, workers: Sequence[WorkerView], leg: Leg
    ) -> tuple[WorkerView, Terms]:
        self._draws += 1
        drawn = hashlib.blake2b(
            self._draws.to_bytes(8, "big") + leg.encode(), key=request.session[:64], digest_size=16
        ).digest()
        names = sorted(workers, key=lambda worker: worker.name)
        first = int.from_bytes(drawn[:8], "big") % len(names)
        other = int.from_bytes(drawn[8:], "big") % max(len(names) - 1, 1)
        second = (first + 1 + other) % len(names)
        chosen = min(names[first], names[second], key=lambda one: one.running + one.waiting)
        return chosen, {"requests": float(chosen.running + chosen.waiting)}
