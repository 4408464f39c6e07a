"""Subagents that start together from one parent's prefix, and should share one copy of it. Pure.

Until a worker's feed tells that it holds the prefix, every sibling of a burst looks as new to all
workers, and the prefix is computed on as many GPUs as there are siblings (ai-dynamo/dynamo#11343).
Here the first placement promises the prefix: for `WINDOW_S` the next siblings see it as cached
there, up to `bound_s` of work, so that a large burst spreads over a few copies instead of one.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

WINDOW_S = 2.0
"""How long a promise stands: computing a 20k prefix and its event take less."""
BOUND_S = 2.0
MAX_PARENTS = 8192


@dataclass(slots=True)
class _Burst:
    last_s: float
    tokens: int
    work_s: dict[str, float] = field(default_factory=dict)


class Siblings:
    """Promises by parent: any bytes that name a shared prefix within a tenant."""

    def __init__(
        self,
        *,
        window_s: float = WINDOW_S,
        bound_s: float = BOUND_S,
        max_parents: int = MAX_PARENTS,
    ) -> None:
        self._window_s, self._bound_s, self._max_parents = window_s, bound_s, max_parents
        self._bursts: OrderedDict[bytes, _Burst] = OrderedDict()

    def __len__(self) -> int:
        """How many parents have promises."""
        return len(self._bursts)

    def placed(
        self, parent: bytes, worker: str, *, tokens: int, work_s: float, now_s: float
    ) -> None:
        """A child with the parent's first `tokens` was sent to `worker`; it is `work_s` there."""
        burst = self._bursts.get(parent)
        if burst is None or now_s - burst.last_s > self._window_s:
            burst = self._bursts[parent] = _Burst(now_s, tokens)
        burst.last_s, burst.tokens = now_s, max(burst.tokens, tokens)
        burst.work_s[worker] = burst.work_s.get(worker, 0.0) + max(work_s, 0.0)
        self._bursts.move_to_end(parent)
        if len(self._bursts) > self._max_parents:
            self._bursts.popitem(last=False)

    def promised(self, parent: bytes, *, now_s: float) -> dict[str, int]:
        """Tokens to count as cached for the parent's next child, by worker.

        Workers that already have `bound_s` of the burst's work promise nothing more.
        """
        burst = self._bursts.get(parent)
        if burst is None:
            return {}
        if now_s - burst.last_s > self._window_s:
            del self._bursts[parent]
            return {}
        return {
            worker: burst.tokens
            for worker, work_s in burst.work_s.items()
            if work_s < self._bound_s
        }

    def failed(self, parent: bytes, worker: str) -> None:
        """The child that was to bring the prefix there did not."""
        burst = self._bursts.get(parent)
        if burst is not None:
            burst.work_s.pop(worker, None)
