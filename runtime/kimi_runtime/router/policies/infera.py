"""Infera's router: blocks to compute against blocks in use and blocks sent lately.

`weight * (request - hits) + active + recent`, lowest first. `recent` counts the request blocks that
this router sent to a worker, all of them times `decay` at every pick: it was added since sessions
that never overlap were split 100 to 0. Source: AMD-AGI/Infera
infera/router/policy/kv_event_aware.py; weight 20 for prefill and 2 for decode are its defaults,
which its authors call an unvalidated starting point. Whole requests are weighted as prefill.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence

from kimi_runtime.router.plan import Leg, Terms, lowest
from kimi_runtime.router.policies.base import PicksByLeg
from kimi_runtime.router.view import RequestView, WorkerView
from kimi_runtime.spec.router import InferaCost

MAX_WORKERS = 8192


class InferaPolicy(PicksByLeg):
    """Remembers what it sent, fading."""

    def __init__(self, spec: InferaCost) -> None:
        self._spec = spec
        self._recent: OrderedDict[tuple[Leg, str], float] = OrderedDict()

    def _pick(
        self, request: RequestView, workers: Sequence[WorkerView], leg: Leg
    ) -> tuple[WorkerView, Terms]:
        chosen = lowest(request, workers, lambda one: sum(self._cost(request, one, leg).values()))
        terms = self._cost(request, chosen, leg)
        for key in self._recent:
            self._recent[key] *= self._spec.decay
        key = leg, chosen.name
        blocks = math.ceil(request.prompt_tokens / chosen.block_tokens)
        self._recent[key] = self._recent.get(key, 0.0) + blocks
        self._recent.move_to_end(key)
        if len(self._recent) > MAX_WORKERS:
            self._recent.popitem(last=False)
        return chosen, terms

    def _cost(self, request: RequestView, worker: WorkerView, leg: Leg) -> Terms:
        size, spec = worker.block_tokens, self._spec
        blocks = math.ceil(request.prompt_tokens / size)
        hits = min(worker.cached_tokens // size, blocks)
        weight = spec.decode_weight if leg is Leg.DECODE else spec.prefill_weight
        return {
            "compute": weight * (blocks - hits),
            "active": float(max(worker.total_blocks - worker.free_blocks, 0)),
            "recent": self._recent.get((leg, worker.name), 0.0),
        }
