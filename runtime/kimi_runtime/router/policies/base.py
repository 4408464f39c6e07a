"""The routing policy: which workers serve a request."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from kimi_runtime.router.plan import Leg, Plan, Terms, assembled
from kimi_runtime.router.view import RequestView, WorkerView


class Policy(Protocol):
    """Chooses. No clock, no chance: from the same state the same arguments give the same plan.

    The order of `workers` does not matter. Ours keep no state but what they were told came of
    their plans; some baselines remember their own picks.
    """

    def choose(self, request: RequestView, workers: Sequence[WorkerView], *, now_s: float) -> Plan:
        """The plan for this request, with the terms of its price.

        Never uses a worker that is not ready or is draining, never pairs workers of different
        revisions or layouts. Raises Unavailable when nobody can serve it, and Overloaded for the
        start of a session that it would rather have later.
        """


class PicksByLeg(ABC):
    """A policy that picks a worker for each leg by itself, and looks at no clock."""

    def choose(self, request: RequestView, workers: Sequence[WorkerView], *, now_s: float) -> Plan:
        """See `Policy.choose`."""
        del now_s
        return assembled(request, workers, self._pick)

    @abstractmethod
    def _pick(
        self, request: RequestView, workers: Sequence[WorkerView], leg: Leg
    ) -> tuple[WorkerView, Terms]:
        """Who does this leg, of those who can, and what speaks for it."""
