"""Each worker in turn, by name: the baseline that knows nothing."""

from collections.abc import Sequence

from kimi_runtime.router.plan import Leg, Terms
from kimi_runtime.router.policies.base import PicksByLeg
from kimi_runtime.router.view import RequestView, WorkerView


class RoundRobinPolicy(PicksByLeg):
    """Counts its picks of each leg."""

    def __init__(self) -> None:
        self._picks = dict.fromkeys(Leg, 0)

    def _pick(
        self, request: RequestView, workers: Sequence[WorkerView], leg: Leg
    ) -> tuple[WorkerView, Terms]:
        del request
        number, self._picks[leg] = self._picks[leg], self._picks[leg] + 1
        names = sorted(workers, key=lambda worker: worker.name)
        return names[number % len(names)], {"turn": 0.0}
