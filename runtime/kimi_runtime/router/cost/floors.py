"""Floors under the costs of many workers at once: who need not be priced at all. Pure.

The same formulas as in `seat`, `prefill` and `decode`, over arrays, with everything left out that
only ever adds to a cost: waiting for room, evictions, latency and sharing of links, moves. A
worker whose floor is no better than a plan that is known needs no seat.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kimi_runtime.router.cost.decode import MAX_UTILISATION
from kimi_runtime.router.cost.prices import Context, Kind
from kimi_runtime.router.cost.seat import (
    MAX_QUEUE_RATIO,
    MAX_STALE_S,
    STALE_S_PER_S,
    TYPICAL_CONTEXT_SHARE,
    UNCERTAIN_SHARE,
)
from kimi_runtime.router.view import WorkerView
from kimi_runtime.spec.worker import Role

Floats = npt.NDArray[np.float64]
ROUNDING = 1e-9
"""Share of a floor that is given up, so that no rounding lifts it above the cost."""


def whole_floors(
    context: Context, workers: Sequence[WorkerView], deepest: Sequence[int], *, z: float
) -> list[float]:
    """Seconds that no plan costs less than in which the worker does it all.

    `deepest` is the most that each worker could read of the prompt, in tokens; `z` the standard
    deviations that risk is priced with, at least.
    """
    return _by_kind(context, workers, lambda group, tokens: group.whole(tokens, z), deepest)


def prefill_floors(
    context: Context, workers: Sequence[WorkerView], deepest: Sequence[int], *, z: float
) -> list[float]:
    """The same of a pair's prefill leg."""
    return _by_kind(context, workers, lambda group, tokens: group.prefill(tokens, z), deepest)


def decode_floors(
    context: Context, workers: Sequence[WorkerView]
) -> tuple[list[float], list[float]]:
    """Seconds that no pair costs less than beyond its prefill leg, without the hand-off.

    The other list is the bytes that have to be handed over, at least.
    """
    none = [0] * len(workers)
    alone_s = _by_kind(context, workers, lambda group, _: group.decode(), none)
    length = context.request.prompt_tokens
    missing = [
        context.kind(one.kind).prior.kv_token_bytes * (length - min(one.cached_tokens, length - 1))
        for one in workers
    ]
    return alone_s, [(1 - ROUNDING) * size for size in missing]


def _by_kind(
    context: Context,
    workers: Sequence[WorkerView],
    floor: "Callable[[_Group, Floats], Floats]",
    deepest: Sequence[int],
) -> list[float]:
    result = np.zeros(len(workers))
    by_kind: dict[str, list[int]] = {}
    for number, worker in enumerate(workers):
        by_kind.setdefault(worker.kind, []).append(number)
    for name, numbers in by_kind.items():
        same = [workers[number] for number in numbers]
        tokens = np.array([deepest[number] for number in numbers], dtype=float)
        result[numbers] = floor(_Group(context, context.kind(name), same), tokens)
    floors: list[float] = (result - ROUNDING * np.abs(result)).tolist()
    return floors


class _Group:
    """Workers of one kind as columns."""

    def __init__(self, context: Context, kind: Kind, workers: Sequence[WorkerView]) -> None:
        self.context, self.kind = context, kind
        models = context.models
        biases = models.speeds(workers[0].kind)
        rows: list[tuple[Any, ...]] = []
        for one in workers:
            factor, var = models.queues.factor(one.name)
            hits = models.hits.ratio(one.name, "hbm") if one.cached_tokens else 1.0
            busy = -1.0 if one.utilisation is None else one.utilisation
            held = (one.total_blocks - one.free_blocks) * one.block_tokens
            rows.append(
                (
                    *(one.waiting, one.running, one.queued_tokens, held, one.cached_tokens),
                    *(one.max_context_tokens, one.age_s, one.certain, one.streams, busy),
                    *(one.role is Role.BOTH, biases.bias(one.name), factor, var, hits),
                )
            )
        columns = np.array(rows, dtype=float).T
        self.waiting, self.running, self.queued, self.held, self.cached = columns[:5]
        self.context_tokens, self.age_s, self.certain, self.streams, self.busy = columns[5:10]
        self.both, self.bias, self.factor, self.var, self.hits = columns[10:]
        self.held = np.maximum(self.held, 0.0)

    def whole(self, deepest: Floats, z: float) -> Floats:
        """One floor for each worker."""
        wait_s, wait_var = self._queue()
        step_s, after_s, stream_s, slowed_s = self._decoding()
        ready_s, compute_s, square = self._ready(wait_s, deepest, step_s)
        prices = self.context.prices
        interrupted = prices.others * prices.stream * self.running
        delayed = prices.others * self._queue_ratio() + interrupted
        fixed_s = after_s + stream_s + interrupted * slowed_s
        var = wait_var + self.kind.relative_var * square
        var = var + self.kind.step_relative_var * stream_s * stream_s
        cost_s = ready_s + fixed_s + compute_s * delayed + z * np.sqrt(var)
        return np.asarray(cost_s - self._replica_s())

    def prefill(self, deepest: Floats, z: float) -> Floats:
        """One floor for each worker."""
        wait_s, wait_var = self._queue()
        ready_s, compute_s, square = self._ready(wait_s, deepest, None)
        delayed = self.context.prices.others * self._queue_ratio()
        risk_s = z * np.sqrt(wait_var + self.kind.relative_var * square)
        return np.asarray(ready_s + compute_s * delayed + risk_s - self._replica_s())

    def decode(self) -> Floats:
        """One floor for each worker."""
        _, after_s, stream_s, slowed_s = self._decoding()
        prices = self.context.prices
        slowed_s = prices.others * prices.stream * self.running * slowed_s
        return np.asarray(after_s + stream_s + slowed_s)

    def _decoding(self) -> tuple[Floats, Floats, Floats, Floats]:
        """A step now and with one more row; the weighted answer; what each row loses to it."""
        step_s = np.where(self.running > 0, self._step(self.running, self.held), 0.0)
        tokens = self.context.output_tokens
        own = self.context.request.prompt_tokens + tokens / 2
        after_s = self._step(self.running + 1, self.held + own)
        shared = np.where(self.both > 0, np.clip(self.busy, 0.0, MAX_UTILISATION), 0.0)
        stream_s = self.context.prices.stream * tokens * after_s / (1 - shared)
        return step_s, after_s, stream_s, tokens * np.maximum(after_s - step_s, 0.0)

    def _queue(self) -> tuple[Floats, Floats]:
        kind = self.kind
        depth = TYPICAL_CONTEXT_SHARE * self.context_tokens
        work_s = kind.fixed_s * self.waiting + self.queued * (kind.token_s + kind.pair_s * depth)
        mean = self.bias * work_s * self.factor
        var = self.var * mean * mean
        old = (self.certain <= 0) | (self.age_s > 0)
        if old.any():
            grown_s = np.minimum(STALE_S_PER_S * np.maximum(self.age_s, 0.0), MAX_STALE_S)
            cold_s = UNCERTAIN_SHARE * self.bias * self.context.cold_s(kind)
            mean = mean + np.where(old, grown_s + np.where(self.certain > 0, 0.0, cold_s), 0.0)
            var = var + np.where(old, mean * mean, 0.0)
        return mean, var

    def _step(self, rows: Floats, kv_tokens: Floats) -> Floats:
        prior = self.kind.prior
        fixed, row, token = self.kind.step
        awake = 1 - (1 - prior.expert_share) ** rows
        shape = prior.step_row_s * rows + prior.step_experts_s * awake
        return np.asarray(self.bias * (fixed + row * shape + token * kv_tokens))

    def _compute(self, resumed: Floats, ratio: Floats | float, step_s: Floats | None) -> Floats:
        kind, length = self.kind, self.context.request.prompt_tokens
        kept = resumed * ratio
        each_s = kind.token_s + kind.pair_s / 2 * (length + kept)
        mean = self.bias * (kind.fixed_s + (length - kept) * each_s)
        if step_s is not None:
            mean = mean + np.ceil((length - resumed) / kind.prior.chunk_tokens) * step_s
        return np.asarray(mean)

    def _ready(
        self, wait_s: Floats, deepest: Floats, step_s: Floats | None
    ) -> tuple[Floats, Floats, Floats]:
        """Seconds until ready, seconds of computing, and the square of those: each at least."""
        length = self.context.request.prompt_tokens
        local = np.minimum(self.cached, length - 1)
        local_s = self._compute(local, self.hits, step_s)
        deeper = deepest > local
        if not deeper.any():
            return wait_s + local_s, local_s, local_s * local_s
        least_per_byte_s = self.context.models.links.least_per_byte_s
        reads = np.where(deeper, deepest - local, 0.0)
        read_s = reads * self.kind.prior.kv_token_bytes * least_per_byte_s
        all_s = self._compute(np.maximum(deepest, local), 1.0, step_s)
        least_s = np.where(deeper, np.minimum(local_s, all_s), local_s)
        free = np.divide(wait_s, read_s, out=np.ones_like(read_s), where=read_s > 0)
        part_s = self._compute(local + np.minimum(free, 1.0) * reads, 1.0, step_s)
        apart_s = np.minimum(wait_s + np.minimum(local_s, part_s), read_s + all_s)
        together = (read_s <= wait_s) | (self.streams > 1)
        ready_s = np.where(together, wait_s + least_s, apart_s)
        least_s = np.minimum(least_s, np.where(deeper, part_s, local_s))
        return ready_s, least_s, least_s * least_s

    def _queue_ratio(self) -> Floats:
        share = np.clip(self.busy, 0.0, 0.99)
        told = np.minimum(share / (1 - share), MAX_QUEUE_RATIO)
        untold = np.minimum(self.waiting, MAX_QUEUE_RATIO)
        return np.asarray(np.where(self.busy < 0, untold, told))

    def _replica_s(self) -> Floats | float:
        request, kind = self.context.request, self.kind
        if request.shared_per_s <= 0:
            return 0.0
        shared = min(request.shared_tokens, request.prompt_tokens)
        once_s = kind.fixed_s + shared * (kind.token_s + kind.pair_s * shared / 2)
        share = request.shared_busy / (request.shared_holders + 1)
        expected = request.shared_per_s * share * self.context.prices.horizon_s
        worth_s = min(expected, 1.0) * self.bias * once_s
        return np.asarray(np.where(shared > self.cached, worth_s, 0.0))
