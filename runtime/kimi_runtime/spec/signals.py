"""What a router tells of its last minute (`GET /signals`), and what several of them say together.

No prompt, no id, no key and no address is in it: counts, seconds and the names of workers. A field
that is not known here is ignored, so that a newer router can be read. Pure.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge
from pydantic import BaseModel, ConfigDict, NonNegativeInt

from kimi_runtime.spec.worker import Role

FIRST_S = 1e-4
GROWTH = 1.1
BUCKETS = 176
"""Bucket i holds (FIRST_S·GROWTH^(i-1), FIRST_S·GROWTH^i]: from 0.1 ms to half an hour."""
FORMER_S = 600.0
"""For how long a router names workers that it follows no more."""

Amount = Annotated[float, Ge(0)]


class _Told(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


def bucket_of(value: float) -> int:
    """The bucket of a duration in seconds (or of any positive number on the same scale)."""
    if value <= FIRST_S:
        return 0
    return min(math.ceil(math.log(value / FIRST_S) / math.log(GROWTH) - 1e-9), BUCKETS - 1)


def value_of(bucket: int) -> float:
    """The geometric middle of a bucket: at most 5% off any value in it."""
    return float(FIRST_S * GROWTH ** (bucket - 0.5))


def quantile(counts: Mapping[int, int], share: float) -> float | None:
    """The value below which `share` of the samples lie; None without a sample."""
    total = sum(counts.values())
    if not total:
        return None
    rank, seen = share * total, 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= rank:
            return value_of(bucket)
    raise AssertionError("the counts add up to their total")


class Spread(_Told):
    """Durations of the window: how many by bucket, and what that comes to."""

    counts: dict[int, NonNegativeInt] = {}
    p90_s: float | None = None
    p95_s: float | None = None

    @classmethod
    def of(cls, counts: Mapping[int, int]) -> "Spread":
        """With its quantiles."""
        return cls(counts=dict(counts), p90_s=quantile(counts, 0.9), p95_s=quantile(counts, 0.95))


class WorkerSignal(_Told):
    """One worker as one router knows it; None is not known, since its last report is old.

    `in_flight` counts the requests of all routers, `silent_s` the seconds since its last answer to
    this router (None: it never answered). `left`: it was taken off the router's list.
    `tokens_per_s` is what it sampled for this router's requests in the window.
    """

    name: str
    role: Role
    ready: bool
    draining: bool
    left: bool = False
    silent_s: Amount | None = None
    in_flight: NonNegativeInt | None = None
    waiting: NonNegativeInt | None = None
    queued_tokens: NonNegativeInt | None = None
    free_blocks: NonNegativeInt | None = None
    total_blocks: NonNegativeInt | None = None
    cached_tokens: NonNegativeInt | None = None
    tokens_per_s: Amount | None = None


class FleetSignals(_Told):
    """The load of a deployment; None where it is not known.

    `queue_s`: how long a request that comes now waits before its prefill, the queued tokens of all
    workers over the rate of all of them; while nothing runs, how long the oldest has waited.
    `kv_use`: the used share of the memory of workers that decode, or where sessions are held for
    want of it what all sessions need of what they may have, which is then about 1 or more.
    """

    queue_s: Amount | None = None
    ttft_p90_s: Amount | None = None
    ttft_p95_s: Amount | None = None
    itl_p90_s: Amount | None = None
    itl_p95_s: Amount | None = None
    kv_use: Annotated[float, Ge(0)] | None = None
    transfer_backlog_s: Amount | None = None
    waiting_requests: NonNegativeInt = 0
    waiting_tokens: NonNegativeInt = 0


class RouterSignals(_Told):
    """One router's document.

    `known_for_s`: since when every answer of every worker is remembered, so that one which is
    named neither in `workers` nor in `former` (seconds since its last answer, up to FORMER_S) has
    not answered for min(known_for_s, FORMER_S). `parked` requests wait for a worker to come, `held`
    ones for KV memory: `held_tokens` of it beyond the `session_tokens` that admitted sessions are
    counted with, of `session_capacity_tokens` (None: not known).
    `prefill_tokens_per_s` is of one worker. `fleet` is what this router alone makes of it.
    """

    router: str
    uptime_s: Amount
    known_for_s: Amount
    window_s: Amount
    in_flight: NonNegativeInt
    ttft: Spread
    itl: Spread
    hand_off: Spread
    hand_off_pending_s: Amount = 0.0
    prefill_tokens_per_s: Amount | None = None
    parked_requests: NonNegativeInt = 0
    parked_tokens: NonNegativeInt = 0
    oldest_parked_s: Amount = 0.0
    held_requests: NonNegativeInt = 0
    held_tokens: NonNegativeInt = 0
    session_tokens: NonNegativeInt = 0
    session_capacity_tokens: NonNegativeInt | None = None
    workers: tuple[WorkerSignal, ...] = ()
    former: dict[str, Amount] = {}
    fleet: FleetSignals = FleetSignals()

    def silent_s(self, worker: str) -> float:
        """Seconds for which the worker certainly gave this router no answer."""
        unheard_s = min(self.known_for_s, FORMER_S)
        known = {one.name: one.silent_s for one in self.workers}
        told = known.get(worker) if worker in known else self.former.get(worker)
        return unheard_s if told is None else told


@dataclass(frozen=True)
class _Work:
    """What workers that prefill have to do."""

    workers: int
    queued_tokens: int


def workers_of(routers: Iterable[RouterSignals]) -> dict[str, WorkerSignal]:
    """Each worker by name: what the router says that heard of it last, and the most in flight.

    A router may have sent what the worker had not seen at its last report to another one.
    """
    best: dict[str, WorkerSignal] = {}
    for router in routers:
        for one in router.workers:
            other = best.get(one.name)
            best[one.name] = one if other is None else _joined(one, other)
    return best


def _joined(one: WorkerSignal, other: WorkerSignal) -> WorkerSignal:
    newer, older = sorted(
        (one, other),
        key=lambda w: (w.in_flight is None, math.inf if w.silent_s is None else w.silent_s),
    )
    known = [w.in_flight for w in (one, other) if w.in_flight is not None]
    cached = [w.cached_tokens for w in (one, other) if w.cached_tokens is not None]
    rates = [w.tokens_per_s for w in (one, other) if w.tokens_per_s is not None]
    return newer.model_copy(
        update={
            "in_flight": max(known, default=None),
            "cached_tokens": max(cached, default=None),
            "draining": newer.draining or older.draining,
            "tokens_per_s": sum(rates) if rates else None,
        }
    )


def fleet_signals(routers: Sequence[RouterSignals]) -> FleetSignals:
    """What the routers of one deployment say together.

    Times are taken from all samples of all routers; workers report the requests of every router,
    so their load is counted once; what is parked or held belongs to a single router.
    """
    workers = list(workers_of(routers).values())
    parked = sum(router.parked_requests for router in routers)
    parked_tokens = sum(router.parked_tokens for router in routers)
    held = sum(router.held_requests for router in routers)
    held_tokens = sum(router.held_tokens for router in routers)
    ttft = Spread.of(_summed(router.ttft for router in routers))
    itl = Spread.of(_summed(router.itl for router in routers))
    usable = [one for one in workers if one.ready and not one.left]
    return FleetSignals(
        queue_s=_queue_s(routers, usable, parked_tokens),
        ttft_p90_s=ttft.p90_s,
        ttft_p95_s=ttft.p95_s,
        itl_p90_s=itl.p90_s,
        itl_p95_s=itl.p95_s,
        kv_use=_kv_use(routers, usable),
        transfer_backlog_s=_backlog_s(routers, usable),
        waiting_requests=parked + held + sum(one.waiting or 0 for one in workers),
        waiting_tokens=parked_tokens + held_tokens + sum(one.queued_tokens or 0 for one in workers),
    )


def _summed(spreads: Iterable[Spread]) -> dict[int, int]:
    total: dict[int, int] = {}
    for spread in spreads:
        for bucket, count in spread.counts.items():
            total[bucket] = total.get(bucket, 0) + count
    return total


def _queue_s(
    routers: Sequence[RouterSignals], usable: Sequence[WorkerSignal], parked_tokens: int
) -> float | None:
    oldest_s = max((router.oldest_parked_s for router in routers), default=0.0)
    work = _prefill_work(usable)
    if work is None:
        return oldest_s
    tokens = work.queued_tokens + parked_tokens
    if not tokens:
        return oldest_s
    rates = [r.prefill_tokens_per_s for r in routers if r.prefill_tokens_per_s]
    return max(tokens / (max(rates) * work.workers), oldest_s) if rates else (oldest_s or None)


def _prefill_work(usable: Sequence[WorkerSignal]) -> _Work | None:
    """The queues of those that prefill; None where there are none or none reports."""
    reported = [one for one in usable if one.queued_tokens is not None]
    prefill = [one for one in reported if one.role is not Role.DECODE] or reported
    if not prefill:
        return None
    return _Work(len(prefill), sum(one.queued_tokens or 0 for one in prefill))


def _kv_use(routers: Sequence[RouterSignals], usable: Sequence[WorkerSignal]) -> float | None:
    """The used share of the memory of those that decode; what is only cached counts as free.

    To whoever holds sessions back what is cached for others is not free: their demand counts.
    """
    decode = [one for one in usable if one.role is not Role.PREFILL and one.total_blocks]
    total = sum(one.total_blocks or 0 for one in decode)
    if not total:
        return None
    used = 1.0 - sum(min(one.free_blocks or 0, one.total_blocks or 0) for one in decode) / total
    known = [router for router in routers if router.session_capacity_tokens]
    if not any(router.held_requests for router in known):
        return used
    wanted = sum(router.session_tokens + router.held_tokens for router in known)
    return max(used, wanted / sum(router.session_capacity_tokens or 0 for router in known))


def _backlog_s(routers: Sequence[RouterSignals], usable: Sequence[WorkerSignal]) -> float | None:
    """How long hand-offs wait for their first output; None where nothing is handed over."""
    if not any(one.role is Role.PREFILL for one in usable):
        return None
    pending_s = max((router.hand_off_pending_s for router in routers), default=0.0)
    taken_s = Spread.of(_summed(router.hand_off for router in routers)).p90_s
    return max(pending_s, taken_s or 0.0)
