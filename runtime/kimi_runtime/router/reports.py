"""What a series of load reports tells that one of them does not. Pure.

Reports come at an even pace, whatever the worker does, so the share of them that find prefill under
way is the share of its time that prefill takes. Two reports between which nothing but the same
answers ran tell how long their steps were.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from kimi_runtime.spec.worker import LoadReport

SMOOTHING_S = 30.0
ENOUGH_S = 5.0
"""Of reports, before a share is told."""
MIN_STEPS = 5
"""Fewer steps between two reports are less than the jitter of their arrival."""
MAX_GAP_S = 2.0


class Steps(NamedTuple):
    """Decode steps without prefill: rows, KV tokens that they hold together, seconds of one."""

    rows: int
    kv_tokens: int
    seconds: float


@dataclass(slots=True)
class _Worker:
    report: LoadReport
    at_s: float
    since_s: float
    busy: float = 0.0
    share: float | None = None
    """See `utilisation`."""


class Reports:
    """The newest report of each worker, and the share of its time that prefill took lately."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}

    def take(
        self,
        worker: str,
        report: LoadReport,
        *,
        block_tokens: int,
        now_s: float,
        step_s: float | None = None,
    ) -> Steps | None:
        """A report came; what it and the one before it say of decode steps. `step_s` is what one
        without prefill takes there now, as far as it is known.
        """
        known = self._workers.get(worker)
        if known is None or known.report.epoch != report.epoch:
            self._workers[worker] = _Worker(report, now_s, now_s)
            return None
        before, passed_s = known.report, now_s - known.at_s
        if report.seq <= before.seq or passed_s <= 0:
            return None
        weight = 1 - math.exp(-passed_s / SMOOTHING_S)
        known.busy += weight * (_prefill_share(before, report, passed_s, step_s) - known.busy)
        known.report, known.at_s = report, now_s
        known_s = now_s - known.since_s
        if known_s >= ENOUGH_S:
            # the average began at 0, which is worth less the longer it ran
            known.share = known.busy / (1 - math.exp(-known_s / SMOOTHING_S))
        return _steps(before, report, passed_s, block_tokens)

    def seen(self, worker: str, *, now_s: float) -> tuple[float | None, float | None]:
        """`age_s` and `utilisation`."""
        known = self._workers.get(worker)
        if known is None:
            return None, None
        age_s = now_s - known.at_s
        return (age_s if age_s > 0 else 0.0), known.share

    def at_s(self, worker: str) -> float | None:
        """When the newest report came; None without any."""
        known = self._workers.get(worker)
        return None if known is None else known.at_s

    def utilisation(self, worker: str) -> float | None:
        """Share of its time that prefill takes; None before enough is known."""
        known = self._workers.get(worker)
        return None if known is None else known.share

    def typical_utilisation(self) -> float | None:
        """That of all workers, on average; None while it is known of none."""
        known = [one.share for one in self._workers.values() if one.share is not None]
        return sum(known) / len(known) if known else None

    def age_s(self, worker: str, *, now_s: float) -> float | None:
        """How old the newest report is; None without any."""
        return self.seen(worker, now_s=now_s)[0]

    def forget(self, worker: str) -> None:
        """The worker restarted or is gone."""
        self._workers.pop(worker, None)


def _prefill_share(
    before: LoadReport, now: LoadReport, passed_s: float, step_s: float | None
) -> float:
    """Of the time between two reports, the share in which prompts were computed: what is left
    beside its decode steps. Prompts that wait, for room say, take none.
    """
    if step_s is None or not (before.running and now.running):
        return float(now.queued_tokens > 0)
    return min(max(1 - (now.steps - before.steps) * step_s / passed_s, 0.0), 1.0)


def _steps(before: LoadReport, now: LoadReport, passed_s: float, block_tokens: int) -> Steps | None:
    same = (
        before.running == now.running
        and before.last_request == now.last_request
        and before.in_flight == now.in_flight
    )
    prompts = before.queued_tokens + now.queued_tokens + before.waiting + now.waiting
    steps = now.steps - before.steps
    if not now.running or not same or prompts or steps < MIN_STEPS or passed_s > MAX_GAP_S:
        return None
    held = (before.total_blocks - before.free_blocks + now.total_blocks - now.free_blocks) // 2
    return Steps(now.running, held * block_tokens, passed_s / steps)
