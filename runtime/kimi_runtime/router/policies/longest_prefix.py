"""Route to the longest cached prefix, unless its holder is busier than the gain is worth."""

from collections.abc import Sequence
from dataclasses import dataclass

from kimi_runtime.router.plan import Leg, Plan, Terms, best
from kimi_runtime.router.view import RequestView, WorkerView

MOVED_TOKEN_WEIGHT = 0.1
"""Moving a token's KV between memories costs about a tenth of computing it (MLA, 25 to 50 GB/s)."""


@dataclass(frozen=True, slots=True)
class LongestPrefixPolicy:
    """Prices in tokens of prefill: what must be computed or moved, plus what is ahead of it."""

    queued_token_weight: float = 1.0
    running_token_weight: float = 64.0

    def choose(self, request: RequestView, workers: Sequence[WorkerView], *, now_s: float) -> Plan:
        """See `Policy.choose`."""
        del now_s  # no term of this policy ages
        return best(request, workers, self._price)

    def _price(self, request: RequestView, worker: WorkerView, leg: Leg) -> Terms:
        cached = min(worker.cached_tokens, request.prompt_tokens)
        from_pool = max(min(worker.pool_tokens, request.prompt_tokens) - cached, 0)
        lacking = request.prompt_tokens - cached
        if leg is Leg.DECODE:  # what it lacks is handed to it
            compute, moved = 0, lacking
        else:
            compute, moved = lacking - from_pool, from_pool
        room = worker.free_blocks * worker.block_tokens
        return {
            "compute": float(compute),
            "move": MOVED_TOKEN_WEIGHT * moved,
            "queued": self.queued_token_weight * worker.queued_tokens,
            "requests": self.running_token_weight * (worker.running + worker.waiting),
            # blocks that must become free first, by others finishing
            "room": float(max(lacking - room, 0)),
        }
