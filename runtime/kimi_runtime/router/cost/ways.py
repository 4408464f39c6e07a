"""One prefill worker's ways to a prompt's front in a search for pairs, priced when needed. Pure."""

from kimi_runtime.router.cost.hits import Found
from kimi_runtime.router.cost.join import Joiner
from kimi_runtime.router.cost.order import ROUNDING
from kimi_runtime.router.cost.prefill import PrefillLeg, legs, read_from
from kimi_runtime.router.cost.seat import Seat
from kimi_runtime.router.view import WorkerView


class Ways:
    """Those of `seat`. `least_s` is what its pairs cost at least besides their decode leg, as far
    as that is known; `floor_s` at first.
    """

    def __init__(self, joiner: Joiner, seat: Seat, found: Found, *, floor_s: float) -> None:
        self._joiner, self._seat, self._found = joiner, seat, found
        self.least_s = floor_s
        self._made: list[PrefillLeg] = []
        self._looked = False

    def priced(self) -> list[PrefillLeg]:
        """All of them."""
        if not self._made:
            self._looked = True
            self._made = legs(self._seat, self._found, fewer=self._joiner.fewer_ways)
            alone_s = self._joiner.alone_s(self._made)
            self.least_s = max(self.least_s, alone_s - ROUNDING * abs(alone_s))
        return self._made

    def pass_by(self, decode: WorkerView) -> None:
        """No pair with this worker can be the best: it is not priced, only looked at."""
        context, worker = self._joiner.context, self._seat.worker
        context.flows.look(context.routes.between(worker, decode))
        if not self._looked:
            self._looked = True
            for source in read_from(self._seat, self._found):
                context.flows.look(context.routes.to_worker(source, worker))
