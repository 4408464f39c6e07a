"""llm-d's recipe for agents: a filter for holders, then the least tokens in flight.

Workers that hold at least `match_threshold` of the prompt are kept, unless even the fastest of them
is expected to start `excess` later than the fastest of all, a worker's start being its tokens in
flight over one constant rate for the whole fleet; then the score `1 - min(1, tokens / token_limit)`
decides. Source: llm-d/llm-d-router, `prefix-cache-affinity-filter` (0.80, 18,000 ms, 15,928 tok/s)
and the token-load scorer (4 Mi tokens). Tokens in flight are those queued and those in use.
"""

from collections.abc import Sequence

from kimi_runtime.router.plan import Leg, Terms, lowest
from kimi_runtime.router.policies.base import PicksByLeg
from kimi_runtime.router.view import RequestView, WorkerView
from kimi_runtime.spec.router import LlmdFilter


class LlmdPolicy(PicksByLeg):
    """Keeps no state: what it needs is in the views."""

    def __init__(self, spec: LlmdFilter) -> None:
        self._spec = spec

    def _pick(
        self, request: RequestView, workers: Sequence[WorkerView], leg: Leg
    ) -> tuple[WorkerView, Terms]:
        spec, able = self._spec, list(workers)
        if leg is not Leg.DECODE:
            least = spec.match_threshold * request.prompt_tokens
            holders = [one for one in able if one.cached_tokens >= least]
            soonest = min(map(self._starts_s, able))
            if holders and min(map(self._starts_s, holders)) - soonest <= spec.excess:
                able = holders
        chosen = lowest(request, able, self._load)
        return chosen, {"load": self._load(chosen)}

    def _starts_s(self, worker: WorkerView) -> float:
        return worker.queued_tokens / self._spec.tokens_per_s

    def _load(self, worker: WorkerView) -> float:
        used = max(worker.total_blocks - worker.free_blocks, 0) * worker.block_tokens
        return min((worker.queued_tokens + used) / self._spec.token_limit, 1.0)
