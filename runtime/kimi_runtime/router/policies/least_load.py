"""Route to the worker with the least work, whatever it has cached."""

from collections.abc import Sequence

from kimi_runtime.router.plan import Leg, Plan, Terms, best
from kimi_runtime.router.view import RequestView, WorkerView

REQUEST_TOKENS = 64.0
"""What a running or waiting request costs next to one queued token: its share of later steps."""


class LeastLoadPolicy:
    """Queued tokens, then requests, decide."""

    def choose(self, request: RequestView, workers: Sequence[WorkerView], *, now_s: float) -> Plan:
        """See `Policy.choose`."""
        del now_s  # no term of this policy ages
        return best(request, workers, self._price)

    def _price(self, request: RequestView, worker: WorkerView, leg: Leg) -> Terms:
        return {
            "queued": float(worker.queued_tokens),
            "requests": REQUEST_TOKENS * (worker.running + worker.waiting),
        }
