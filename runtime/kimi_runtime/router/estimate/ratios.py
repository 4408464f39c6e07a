"""What came true of a promise: cached tokens found over those predicted, and queues. Pure.

A ratio far below 1 means that the router and a worker do not agree on what a prompt is, or that an
index is wrong; it is not only a price, it is an alarm.
"""

import math
from collections import OrderedDict
from typing import NamedTuple

from kimi_runtime.router.estimate.changes import Changes
from kimi_runtime.router.estimate.moments import Estimate

MAX_PAIRS = 65_536
PRIOR_COUNT = 20.0
PRIOR_RATIO = 0.995
RATE = 0.03
ALARM_RATIO = 0.9
ALARM_COUNT = 30.0
_PRIOR = (PRIOR_RATIO, PRIOR_COUNT)


class HitRatios:
    """Realised over predicted tokens, between 0 and 1. What is missing is missing at the end."""

    def __init__(self, *, max_pairs: int = MAX_PAIRS, changes: Changes | None = None) -> None:
        self._max_pairs, self._changes = max_pairs, changes or Changes()
        self._known: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()

    def ratio(self, worker: str, tier: str) -> float:
        """The share of predicted tokens that will be there, on average."""
        return self._known.get((worker, tier), _PRIOR)[0]

    def observe(self, worker: str, tier: str, *, predicted: int, found: int) -> None:
        """Of `predicted` tokens `found` were there; more than predicted counts as all."""
        if predicted <= 0:
            return
        mean, count = self._known.get((worker, tier), _PRIOR)
        share = min(max(found / predicted, 0.0), 1.0)
        count += 1
        mean += max(1 / count, RATE) * (share - mean)
        self._known[worker, tier] = mean, count
        self._known.move_to_end((worker, tier))
        self._changes.add(worker)
        if len(self._known) > self._max_pairs:
            self._changes.add(self._known.popitem(last=False)[0][0])

    def alarms(self) -> dict[tuple[str, str], float]:
        """Pairs that keep less than 90 % of what was predicted, after enough requests to tell."""
        return {
            pair: mean
            for pair, (mean, count) in self._known.items()
            if mean < ALARM_RATIO and count - PRIOR_COUNT >= ALARM_COUNT
        }

    def forget(self, worker: str) -> None:
        """The worker restarted or is gone."""
        for pair in [pair for pair in self._known if pair[0] == worker]:
            del self._known[pair]
        self._changes.add(worker)


MAX_QUEUES = 8192
QUEUE_PRIOR_S = 5.0
"""Seconds of queueing that "it takes what it should" is worth."""
QUEUE_KEPT_S = 30.0
"""Seconds of expected queueing that are remembered; older ones fade."""
MAX_RATIO = 8.0
"""The most that one wait counts for, over what was expected."""
QUEUE_VAR = 0.25
"""Of real over expected wait, relative to the square, before any was seen."""


class _Queue(NamedTuple):
    """Of one worker; `errors` and `squares` are of waits around what was expected then."""

    expected_s: float = 0.0
    waited_s: float = 0.0
    errors: float = 0.0
    squares: float = 0.0
    factor: float = 1.0
    var: float = QUEUE_VAR


_UNSEEN = _Queue()


class QueueRatios:
    """Real over expected queueing, per worker: what the work of others really costs.

    A ratio of sums: queues of seconds decide it, and not the many that are gone on arrival.
    """

    def __init__(self, *, changes: Changes | None = None) -> None:
        self._changes = changes or Changes()
        self._known: OrderedDict[str, _Queue] = OrderedDict()

    def factor(self, worker: str) -> tuple[float, float]:
        """Real over expected wait, and the variance relative to its square."""
        return self._known.get(worker, _UNSEEN)[4:]

    def wait(self, worker: str, expected_s: float) -> Estimate:
        """The wait behind work that should take `expected_s`."""
        factor, var = self.factor(worker)
        mean = expected_s * factor
        return Estimate(mean, var * mean * mean)

    def observe(self, worker: str, *, expected_s: float, waited_s: float) -> None:
        """A request waited."""
        if not (expected_s > 0 and math.isfinite(waited_s) and waited_s >= 0):
            return
        last = self._known.get(worker, _UNSEEN)
        waited_s = min(waited_s, MAX_RATIO * expected_s)
        off = waited_s / last.factor - expected_s
        kept = min(QUEUE_KEPT_S / (last.expected_s + expected_s), 1.0)
        expected, waited = kept * (last.expected_s + expected_s), kept * (last.waited_s + waited_s)
        errors = kept * (last.errors + off * off)
        squares = kept * (last.squares + expected_s * expected_s)
        self._known[worker] = _Queue(
            expected,
            waited,
            errors,
            squares,
            (waited + QUEUE_PRIOR_S) / (expected + QUEUE_PRIOR_S),
            (errors + QUEUE_VAR * QUEUE_PRIOR_S) / (squares + QUEUE_PRIOR_S),
        )
        self._known.move_to_end(worker)
        self._changes.add(worker)
        if len(self._known) > MAX_QUEUES:
            self._changes.add(self._known.popitem(last=False)[0])

    def forget(self, worker: str) -> None:
        """The worker restarted or is gone."""
        self._known.pop(worker, None)
        self._changes.add(worker)
