"""Floors under the costs of many workers at once: who need not be priced at all. Pure.

The same formulas as in `seat`, `prefill` and `decode`, over arrays, with everything left out that
only ever adds to a cost: waiting for room, evictions, latency and sharing of links, moves. A
worker whose floor is no better than a plan that is known needs no seat.
"""

from collections.abc import Callable, Sequence

import numpy as np

from kimi_runtime.router.cost.columns import Floats, Table
from kimi_runtime.router.cost.decode import MAX_UTILISATION
from kimi_runtime.router.cost.hits import usable_tokens
from kimi_runtime.router.cost.order import ROUNDING
from kimi_runtime.router.cost.prices import Context
from kimi_runtime.router.cost.seat import (
    MAX_QUEUE_RATIO,
    MAX_STALE_S,
    STALE_S_PER_S,
    UNCERTAIN_SHARE,
)
from kimi_runtime.router.view import WorkerView


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
    return alone_s, _by_kind(context, workers, lambda group, _: group.missing_bytes(), none)


def _by_kind(
    context: Context,
    workers: Sequence[WorkerView],
    floor: "Callable[[_Group, Floats], Floats]",
    deepest: Sequence[int],
) -> list[float]:
    kinds = {one.kind for one in workers}
    if len(kinds) == 1:
        (name,) = kinds
        return _rounded(floor(_Group(context, name, workers), _column(deepest)))
    result = np.zeros(len(workers))
    for name in kinds:
        numbers = [number for number, one in enumerate(workers) if one.kind == name]
        same = [workers[number] for number in numbers]
        tokens = _column([deepest[number] for number in numbers])
        result[numbers] = floor(_Group(context, name, same), tokens)
    return _rounded(result)


def _rounded(result: Floats) -> list[float]:
    floors: list[float] = (result - ROUNDING * np.abs(result)).tolist()
    return floors


def _column(values: Sequence[float]) -> Floats:
    return np.array(values, dtype=float)


class _Group:
    """Workers of one kind as columns."""

    def __init__(self, context: Context, kind: str, workers: Sequence[WorkerView]) -> None:
        self.context, self.kind, self.workers = context, context.kind(kind), workers
        self.table: Table = context.columns.of(workers)

    def whole(self, deepest: Floats, z: float) -> Floats:
        """One floor for each worker."""
        wait_s, wait_var = self._queue()
        step_s, after_s, stream_s, slowed_s = self._decoding()
        ready_s, compute_s, square = self._ready(wait_s, deepest, step_s)
        prices = self.context.prices
        interrupted = prices.others * prices.stream * self.table.running
        others_s = self._delays_s(wait_s, compute_s) + interrupted * compute_s
        fixed_s = after_s + stream_s + interrupted * slowed_s
        var = wait_var + self.kind.relative_var * square
        var = var + self.kind.step_relative_var * stream_s * stream_s
        cost_s = ready_s + fixed_s + others_s + z * np.sqrt(var)
        return np.asarray(cost_s - self._replica_s())

    def prefill(self, deepest: Floats, z: float) -> Floats:
        """One floor for each worker."""
        wait_s, wait_var = self._queue()
        ready_s, compute_s, square = self._ready(wait_s, deepest, None)
        delayed_s = self._delays_s(wait_s, compute_s)
        risk_s = z * np.sqrt(wait_var + self.kind.relative_var * square)
        return np.asarray(ready_s + delayed_s + risk_s - self._replica_s())

    def decode(self) -> Floats:
        """One floor for each worker."""
        _, after_s, stream_s, slowed_s = self._decoding()
        prices = self.context.prices
        slowed_s = prices.others * prices.stream * self.table.running * slowed_s
        return np.asarray(after_s + stream_s + slowed_s)

    def missing_bytes(self) -> Floats:
        """Bytes that each worker has to be handed over, at least."""
        length = self.context.request.prompt_tokens
        return self.kind.prior.kv_token_bytes * (length - np.minimum(self.table.cached, length - 1))

    def _decoding(self) -> tuple[Floats, Floats, Floats, Floats]:
        """A step now and with one more row; the weighted answer; what each row loses to it."""
        table = self.table
        running, held = table.running, table.held
        step_s = self._step(running, held) * (running > 0)
        tokens = self.context.output_tokens
        own = self.context.request.prompt_tokens + tokens / 2
        after_s = self._step(running + 1, held + own)
        shared = table.both * np.minimum(np.maximum(table.busy, 0.0), MAX_UTILISATION)
        stream_s = self.context.prices.stream * tokens * after_s / (1 - shared)
        return step_s, after_s, stream_s, tokens * np.maximum(after_s - step_s, 0.0)

    def _queue(self) -> tuple[Floats, Floats]:
        kind, table = self.kind, self.table
        work_s = kind.fixed_s * table.waiting
        work_s = work_s + table.queued * (kind.token_s + kind.pair_s * table.depth)
        mean = table.bias * work_s * table.queue
        var = table.queue_var * mean * mean
        unsure, age_s = table.unsure, table.age_s
        if unsure.any() or age_s.any():
            age_s = np.maximum(age_s, 0.0)
            cold_s = UNCERTAIN_SHARE * table.bias * self.context.cold_s(kind)
            mean = mean + np.minimum(STALE_S_PER_S * age_s, MAX_STALE_S) + unsure * cold_s
            var = var + np.where((age_s > 0) | (unsure > 0), mean * mean, 0.0)
        return mean, var

    def _step(self, rows: Floats, kv_tokens: Floats) -> Floats:
        prior = self.kind.prior
        fixed, row, token = self.kind.step
        awake = 1 - (1 - prior.expert_share) ** rows
        shape = prior.step_row_s * rows + prior.step_experts_s * awake
        return np.asarray(self.table.bias * (fixed + row * shape + token * kv_tokens))

    def _compute(self, resumed: Floats, ratio: Floats | float, step_s: Floats | None) -> Floats:
        kind, length = self.kind, self.context.request.prompt_tokens
        kept = resumed * ratio
        each_s = kind.token_s + kind.pair_s / 2 * (length + kept)
        mean = self.table.bias * (kind.fixed_s + (length - kept) * each_s)
        if step_s is not None:
            mean = mean + np.ceil((length - resumed) / kind.prior.chunk_tokens) * step_s
        return np.asarray(mean)

    def _ready(
        self, wait_s: Floats, deepest: Floats, step_s: Floats | None
    ) -> tuple[Floats, Floats, Floats]:
        """Seconds until ready, seconds of computing, and the square of those: each at least."""
        local = self._local()
        local_s = self._compute(local, self.table.hits, step_s)
        deeper = deepest > local
        if not deeper.any():
            return wait_s + local_s, local_s, local_s * local_s
        least_per_byte_s = self.context.models.links.least_per_byte_s
        reads = np.maximum(deepest - local, 0.0)
        read_s = reads * self.kind.prior.kv_token_bytes * least_per_byte_s
        all_s = self._compute(np.maximum(deepest, local), 1.0, step_s)
        least_s = np.where(deeper, np.minimum(local_s, all_s), local_s)
        free = np.divide(wait_s, read_s, out=np.ones_like(read_s), where=read_s > 0)
        part_s = self._compute(local + np.minimum(free, 1.0) * reads, 1.0, step_s)
        apart_s = np.minimum(wait_s + np.minimum(local_s, part_s), read_s + all_s)
        together = (read_s <= wait_s) | (self.table.streams > 1)
        ready_s = np.where(together, wait_s + least_s, apart_s)
        least_s = np.minimum(least_s, np.where(deeper, part_s, local_s))
        return ready_s, least_s, least_s * least_s

    def _local(self) -> Floats:
        """Where each resumes from in its own memory, up to a part of a block."""
        length = self.context.request.prompt_tokens
        if not self.table.stateful.any():
            return np.minimum(self.table.cached, length - 1)
        # at all that is held, hits that fail would cost more than reading from a state before it
        usable = [
            usable_tokens(
                one.cached_tokens,
                one.checkpoints,
                prompt_tokens=length,
                block_tokens=one.block_tokens,
            )
            for one in self.workers
        ]
        return _column(usable)

    def _delays_s(self, wait_s: Floats, compute_s: Floats) -> Floats:
        """See `Seat.delays_s`, weighted."""
        ratio = np.minimum(self._queue_ratio() + wait_s / self.context.usual_s, MAX_QUEUE_RATIO)
        return np.asarray(self.context.prices.others * compute_s * ratio)

    def _queue_ratio(self) -> Floats:
        share = np.minimum(np.maximum(self.table.busy, 0.0), 0.99)
        told = np.minimum(share / (1 - share), MAX_QUEUE_RATIO)
        if self.table.busy.min() >= 0:
            return np.asarray(told)
        untold = np.minimum(self.table.waiting, MAX_QUEUE_RATIO)
        return np.asarray(np.where(self.table.busy < 0, untold, told))

    def _replica_s(self) -> Floats | float:
        request, kind = self.context.request, self.kind
        if request.shared_per_s <= 0:
            return 0.0
        shared = min(request.shared_tokens, request.prompt_tokens)
        once_s = kind.fixed_s + shared * (kind.token_s + kind.pair_s * shared / 2)
        share = request.shared_busy / (request.shared_holders + 1)
        expected = request.shared_per_s * share * self.context.prices.horizon_s
        worth_s = min(expected, 1.0) * self.table.bias * once_s
        return np.asarray(np.where(shared > self.table.cached, worth_s, 0.0))
