"""What came true of a promise: cached tokens found over those predicted, and queues. Pure.

A ratio far below 1 means that the router and a worker do not agree on what a prompt is, or that an
index is wrong; it is not only a price, it is an alarm.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable

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

    def __init__(self, *, max_pairs: int = MAX_PAIRS) -> None:
        self._max_pairs = max_pairs
        self._known: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()

    def ratio(self, worker: str, tier: str) -> float:
        """The share of predicted tokens that will be there, on average."""
        return self._known.get((worker, tier), _PRIOR)[0]

    def ratios(self, workers: Iterable[str], tier: str) -> list[float]:
        """`ratio` of each worker."""
        known = self._known
        return [known.get((worker, tier), _PRIOR)[0] for worker in workers]

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
        if len(self._known) > self._max_pairs:
            self._known.popitem(last=False)

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


MAX_QUEUES = 8192
QUEUE_RATE = 0.05
QUEUE_COUNT = 10.0
QUEUE_VAR = 0.25
"""Of the logarithm of real over expected wait, before any was seen."""
MAX_LOG = math.log(8.0)
_UNSEEN = (0.0, QUEUE_VAR, QUEUE_COUNT, 1.0)


class QueueRatios:
    """Real over expected queueing, per worker: what the work of others really costs."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[float, float, float, float]] = OrderedDict()
        """The logarithm of the ratio, its variance, how often it was seen, and the ratio."""

    def factor(self, worker: str) -> tuple[float, float]:
        """Real over expected wait, and the variance relative to its square."""
        _, var, _, factor = self._known.get(worker, _UNSEEN)
        return factor, var

    def factors(self, workers: Iterable[str]) -> tuple[list[float], list[float]]:
        """`factor` of each worker: the ratios, and the variances."""
        known = self._known
        seen = [known.get(worker, _UNSEEN) for worker in workers]
        return [one[3] for one in seen], [one[1] for one in seen]

    def wait(self, worker: str, expected_s: float) -> Estimate:
        """The wait behind work that should take `expected_s`."""
        factor, var = self.factor(worker)
        mean = expected_s * factor
        return Estimate(mean, var * mean * mean)

    def observe(self, worker: str, *, expected_s: float, waited_s: float) -> None:
        """A request waited; what was expected to be less than 1 ms tells nothing of a ratio."""
        if expected_s < 1e-3 or not (math.isfinite(waited_s) and waited_s >= 0):
            return
        log, var, count, _ = self._known.get(worker, _UNSEEN)
        off = min(max(math.log(max(waited_s, 1e-4) / expected_s), -MAX_LOG), MAX_LOG) - log
        count += 1
        rate = max(1 / count, QUEUE_RATE)
        log += rate * off
        self._known[worker] = log, var + rate * (off * off - var), count, math.exp(log)
        self._known.move_to_end(worker)
        if len(self._known) > MAX_QUEUES:
            self._known.popitem(last=False)

    def forget(self, worker: str) -> None:
        """The worker restarted or is gone."""
        self._known.pop(worker, None)
