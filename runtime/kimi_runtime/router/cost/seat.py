"""One worker as one decision sees it: what holds whatever is read from where. Pure."""

import math

from kimi_runtime.router.cost.hits import usable_tokens
from kimi_runtime.router.cost.prices import Context
from kimi_runtime.router.cost.room import wait_for_room
from kimi_runtime.router.view import WorkerView

TYPICAL_CONTEXT_SHARE = 0.25
"""Of the longest context: how deep in its context a queued token is, when nobody tells."""
STALE_S_PER_S = 0.02
MAX_STALE_S = 1.0
"""Old load may have grown: this much queue a second, at most, is added to it."""
UNCERTAIN_SHARE = 0.25
"""Of this request's own prefill, what is added where the load is a guess."""
MAX_QUEUE_RATIO = 5.0
"""The most that others lose to a second, in seconds: they may leave."""
FASTEST_STEP_S = 1e-3


class Seat:
    """A worker's queue, room and speed for a leg. `whole`: it will decode too.

    `wait_s` is until it can begin: the queue, or until there is room, whichever is longer.
    `work_s` is the prefill before us at the speeds known: what its queue should take.
    `local` tokens are in its own memory, of which the share `ratio` will really be there.
    """

    __slots__ = (
        "bias",
        "context",
        "held_tokens",
        "kind",
        "local",
        "mixes",
        "queue_ratio",
        "ratio",
        "step_s",
        "wait_s",
        "wait_var",
        "whole",
        "work_s",
        "worker",
    )

    def __init__(self, context: Context, worker: WorkerView, *, whole: bool) -> None:
        self.context, self.worker, self.whole = context, worker, whole
        self.kind = context.kind(worker.kind)
        models, request = context.models, context.request
        self.bias = models.speeds(worker.kind).bias(worker.name)
        self.local, self.ratio = 0, 1.0
        if worker.cached_tokens:
            self.local = usable_tokens(
                worker.cached_tokens,
                worker.checkpoints,
                prompt_tokens=request.prompt_tokens,
                block_tokens=worker.block_tokens,
            )
            self.ratio = models.hits.ratio(worker.name, "hbm")
        used = worker.total_blocks - worker.free_blocks
        self.held_tokens = used * worker.block_tokens if used > 0 else 0
        self.step_s, self.mixes, self.queue_ratio = 0.0, False, 0.0
        if worker.running:
            self.step_s, self.mixes = self.step(worker.running, self.held_tokens), whole
        if worker.waiting or worker.utilisation is not None:
            self.queue_ratio = queue_ratio(worker)
        self._wait()

    def step(self, rows: float, kv_tokens: float) -> float:
        """Seconds of a decode step here."""
        kind = self.kind
        fixed, row, token = kind.step
        prior = kind.prior
        awake = 1 - (1 - prior.expert_share) ** rows
        shape = prior.step_row_s * rows + prior.step_experts_s * awake
        return float(self.bias * (fixed + row * shape + token * kv_tokens))

    def compute(self, resumed: int, ratio: float) -> tuple[float, float]:
        """Seconds to compute the prompt from `resumed` on, and their variance.

        A share `ratio` of what is to be resumed from will be there; the end of the rest is computed
        too, and its time is as uncertain as it is long. Steps of running answers lie between.
        """
        kind, length = self.kind, self.context.request.prompt_tokens
        kept = resumed * ratio
        token_s, half_pair_s = kind.token_s, kind.pair_s / 2
        mean = kind.fixed_s + (length - kept) * (token_s + half_pair_s * (length + kept))
        mean *= self.bias
        if self.mixes:
            mean += math.ceil((length - resumed) / kind.prior.chunk_tokens) * self.step_s
        if kept == resumed:
            return mean, kind.relative_var * mean * mean
        lost_s = self.bias * (resumed - kept) * (token_s + half_pair_s * (kept + resumed))
        return mean, kind.relative_var * mean * mean + lost_s * lost_s

    def eviction_s(self, blocks: int) -> float:
        """What others lose when `blocks` more are taken here."""
        worker = self.worker
        if not worker.space_price_s:
            return 0.0
        taken = blocks if worker.unused_blocks is None else blocks - worker.unused_blocks
        return max(taken, 0) * worker.space_price_s

    def delays_s(self, compute_s: float) -> float:
        """What all who come later lose together to so much computing behind the wait.

        In an M/G/1 queue in order of arrival it is lambda C (W + R) / (1 - rho), since who comes
        during the wait W comes behind it, too; R is for how long some still come behind it then
        (Haviv and Ritov 1998). There that is C / 2. Here they go elsewhere as soon as it can be
        seen, and it is what a usual request takes: lambda R / (1 - rho) is `queue_ratio`. Where
        waiting is the best that can be done others are busy, too: for W rho / (1 - rho) is 1.
        """
        ratio = self.queue_ratio + self.wait_s / self.context.usual_s
        return compute_s * min(ratio, MAX_QUEUE_RATIO)

    def replica_s(self, copy_s: float) -> float:
        """What another copy of the shared front will save, beyond its own copying.

        Requests that its holders are too busy for would find it here. Never more than computing
        it once.
        """
        request = self.context.request
        if request.shared_per_s <= 0:
            return 0.0
        shared = min(request.shared_tokens, request.prompt_tokens)
        if shared <= self.worker.cached_tokens:
            return 0.0
        kind = self.kind
        once_s = self.bias * (kind.fixed_s + shared * (kind.token_s + kind.pair_s * shared / 2))
        share = request.shared_busy / (request.shared_holders + 1)
        expected = request.shared_per_s * share * self.context.prices.horizon_s
        return min(expected * max(once_s - copy_s, 0.0), once_s)

    def room(self, tokens: float, each_s: float) -> tuple[float, float]:
        """Seconds until there is room for `tokens`, and their variance."""
        worker = self.worker
        need = math.ceil(tokens / worker.block_tokens)
        at_once = worker.line is None and worker.max_running is None
        if at_once and worker.free_blocks >= need * (worker.waiting + 1):
            return 0.0, 0.0
        return wait_for_room(worker, min(need, worker.total_blocks), each_s)

    def _wait(self) -> None:
        context, worker = self.context, self.worker
        self.wait_s = self.wait_var = self.work_s = 0.0
        if worker.queued_tokens or worker.waiting or not worker.certain or worker.age_s > 0:
            self.wait_s, self.wait_var = self._queue()
        if self.whole:
            tokens = context.request.prompt_tokens + context.room_tokens
            each_s = context.output_tokens * max(self.step_s, FASTEST_STEP_S)
        else:
            tokens = context.request.prompt_tokens
            each_s = self.bias * context.cold_s(self.kind)
        room_s, room_var = self.room(tokens, each_s)
        self.wait_s, self.wait_var = max(self.wait_s, room_s), max(self.wait_var, room_var)

    def _queue(self) -> tuple[float, float]:
        """Seconds of prefill before us. Old figures are more, and less certain, never less."""
        context, worker, kind = self.context, self.worker, self.kind
        mean = var = 0.0
        if worker.queued_tokens or worker.waiting:
            depth = queued_depth(worker)
            work_s = kind.fixed_s * worker.waiting
            work_s += worker.queued_tokens * (kind.token_s + kind.pair_s * depth)
            self.work_s = self.bias * work_s
            mean, var = context.models.queues.wait(worker.name, self.work_s)
        if worker.certain and worker.age_s <= 0:
            return mean, var
        mean += min(STALE_S_PER_S * max(worker.age_s, 0.0), MAX_STALE_S)
        if not worker.certain:
            mean += UNCERTAIN_SHARE * self.bias * context.cold_s(kind)
        return mean, var + mean * mean


def queue_ratio(worker: WorkerView) -> float:
    """rho / (1 - rho): how many later requests one more second here delays, on average.

    Where the worker does not tell its utilisation, those that wait are as good a measure: they are
    the same number in an M/M/1 queue.
    """
    if worker.utilisation is None:
        return min(float(worker.waiting), MAX_QUEUE_RATIO)
    share = min(max(worker.utilisation, 0.0), 0.99)
    return min(share / (1 - share), MAX_QUEUE_RATIO)


def queued_depth(worker: WorkerView) -> float:
    """Where in their contexts a worker's queued tokens are, on average, as far as anybody knows."""
    if worker.queued_depth is not None:
        return worker.queued_depth
    return TYPICAL_CONTEXT_SHARE * worker.max_context_tokens
