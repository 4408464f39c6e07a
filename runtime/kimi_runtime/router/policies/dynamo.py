"""Dynamo's router: a linear cost in KV blocks.

`prefill_load_scale * max(0, active_prefill + request - credit) + decode_blocks + weight * active`,
where active prefill is what is queued there and `credit = overlap_credit * device + host_credit *
host` blocks that need not be computed; `decode_blocks` are those in use with the request's own. On
the decode leg of a prefill/decode pair only the decode part counts, whatever the worker holds
(ai-dynamo/dynamo#10449). Source: lib/kv-router/src/scheduling/selector/default.rs of v1.6. Its
settings: the defaults here are Dynamo's; #11714 recommends (1.5, 1, 0) and #13447 (2, 4, 64) as
(overlap_credit, prefill_load_scale, active_request_weight) for agents. Ties are random there and by
rendezvous here.
"""

import math
from collections.abc import Sequence

from kimi_runtime.router.plan import Leg, Terms, lowest
from kimi_runtime.router.policies.base import PicksByLeg
from kimi_runtime.router.view import RequestView, WorkerView
from kimi_runtime.spec.router import DynamoCost


class DynamoPolicy(PicksByLeg):
    """Keeps no state: what it needs is in the views."""

    def __init__(self, spec: DynamoCost) -> None:
        self._spec = spec

    def cost(self, request: RequestView, worker: WorkerView, leg: Leg) -> Terms:
        """The cost's two summands, in blocks."""
        spec, size = self._spec, worker.block_tokens
        blocks = math.ceil(request.prompt_tokens / size)
        device = min(worker.cached_tokens // size, blocks)
        host = max(min(worker.pool_tokens // size, blocks) - device, 0)
        prefill = 0.0
        if leg is not Leg.DECODE:
            credit = spec.overlap_credit * device + spec.host_credit * host
            load = (worker.queued_tokens + request.prompt_tokens) / size - credit
            prefill = spec.prefill_load_scale * max(load, 0.0)
        used = max(worker.total_blocks - worker.free_blocks, 0) + blocks
        active = worker.running + worker.waiting
        return {"prefill": prefill, "decode": used + spec.active_request_weight * active}

    def _pick(
        self, request: RequestView, workers: Sequence[WorkerView], leg: Leg
    ) -> tuple[WorkerView, Terms]:
        chosen = lowest(request, workers, lambda one: sum(self.cost(request, one, leg).values()))
        return chosen, self.cost(request, chosen, leg)
