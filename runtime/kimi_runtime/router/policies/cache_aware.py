"""SGLang's `cache_aware`: the best match, unless the load is out of balance.

If the longest queue exceeds the shortest by `imbalance_requests` and by the factor
`imbalance_ratio`, the shortest queue; else the worker with the longest matching prefix if that is
more than `match_threshold` of the prompt, else the shortest queue. Source: sgl-project/sglang
sgl-router/src/policies/cache_aware.rs. The defaults are those of its launcher (0.3, 64, 1.5);
vllm-project/router and ROCm/ATOM's mesh, forks of it, use 0.5, 32 and 1.1. Two differences: the
match is counted in tokens by the feeds, not in characters by a tree of what was sent, and the
balance is judged among workers that could serve the request, not among all.
"""

from collections.abc import Sequence

from kimi_runtime.router.plan import Leg, Terms, lowest
from kimi_runtime.router.policies.base import PicksByLeg
from kimi_runtime.router.view import RequestView, WorkerView
from kimi_runtime.spec.router import CacheAware


class CacheAwarePolicy(PicksByLeg):
    """Prefill and decode workers are picked independently, as there."""

    def __init__(self, spec: CacheAware) -> None:
        self._spec = spec

    def _pick(
        self, request: RequestView, workers: Sequence[WorkerView], leg: Leg
    ) -> tuple[WorkerView, Terms]:
        del leg
        spec, loads = self._spec, [_load(worker) for worker in workers]
        apart = max(loads) - min(loads) > spec.imbalance_requests
        chosen = lowest(request, workers, lambda one: -one.cached_tokens)
        share = chosen.cached_tokens / max(request.prompt_tokens, 1)
        out_of_balance = apart and max(loads) > spec.imbalance_ratio * min(loads)
        if out_of_balance or share <= spec.match_threshold:
            chosen = lowest(request, workers, _load)
        return chosen, {"requests": _load(chosen)}


def _load(worker: WorkerView) -> float:
    return float(worker.running + worker.waiting)
