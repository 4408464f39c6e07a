"""How fast workers compute: prefill and decode of a kind, and how each worker differs. Pure."""

import math
from collections import OrderedDict
from typing import NamedTuple

from kimi_runtime.router.estimate.changes import Changes
from kimi_runtime.router.estimate.moments import Estimate
from kimi_runtime.router.estimate.regression import Fit, Regression
from kimi_runtime.spec.speed import SpeedPrior

MAX_WORKERS = 8192
BIAS_COUNT = 8.0
"""Measurements that "this worker is like its kind" is worth."""
BIAS_RATE = 0.05
MAX_BIAS = math.log(8.0)
"""The most that one worker differs from its kind; beyond it is a lie or a fault."""
_USUAL = (0.0, BIAS_COUNT, 1.0)


class Curves(NamedTuple):
    """The fits of one kind at one moment."""

    prior: SpeedPrior
    prefill: Fit
    step: Fit

    def prefill_s(self, new_tokens: float, cached_tokens: float) -> Estimate:
        """Seconds to compute `new_tokens` after `cached_tokens`, alone on the worker."""
        if new_tokens <= 0:
            return Estimate(0.0)
        return self.prefill.at((1.0, new_tokens, new_tokens * (cached_tokens + new_tokens / 2)))

    def step_s(self, rows: float, kv_tokens: float) -> Estimate:
        """Seconds of one decode step of `rows` sequences that hold `kv_tokens` together."""
        return self.step.at(self.step_shape(rows, kv_tokens))

    def step_shape(self, rows: float, kv_tokens: float) -> tuple[float, float, float]:
        """What `step` is linear in: its fixed part, the part of the rows, the part of their KV."""
        return step_shape(self.prior, rows, kv_tokens)


def step_shape(prior: SpeedPrior, rows: float, kv_tokens: float) -> tuple[float, float, float]:
    """`(1, seconds of rows by the prior, tokens)`: the experts' curve keeps the prior's form."""
    awake = 1 - (1 - prior.expert_share) ** rows
    return 1.0, prior.step_row_s * rows + prior.step_experts_s * awake, kv_tokens


class Speeds:
    """One kind of worker: the same model, GPUs and parallelism."""

    def __init__(self, prior: SpeedPrior, *, changes: Changes | None = None) -> None:
        self.prior, self._changes = prior, changes or Changes()
        self._prefill = Regression(
            (prior.prefill_fixed_s, prior.prefill_token_s, prior.prefill_pair_s),
            relative_sd=prior.relative_sd,
        )
        self._step = Regression(
            (prior.step_fixed_s, 1.0, prior.step_kv_token_s), relative_sd=prior.relative_sd
        )
        self._bias: OrderedDict[str, tuple[float, float, float]] = OrderedDict()
        """By worker: the logarithm of its factor, how much that is worth, and the factor."""
        self._curves: Curves | None = None

    def curves(self, *, now_s: float) -> Curves:
        """The fits now."""
        prefill, step = self._prefill.fit(now_s=now_s), self._step.fit(now_s=now_s)
        known = self._curves
        if known is None or known.prefill is not prefill or known.step is not step:
            known = self._curves = Curves(self.prior, prefill, step)
        return known

    def step_s(self, worker: str, rows: float, kv_tokens: float, *, now_s: float) -> float:
        """Seconds of a decode step on this worker; see `Curves.step_s`."""
        self._prefill.fit(now_s=now_s)  # both fits are as old, whichever is asked for
        mean = self._step.fit(now_s=now_s).mean(step_shape(self.prior, rows, kv_tokens))
        return mean * self.bias(worker)

    def bias(self, worker: str) -> float:
        """What this worker's seconds are multiplied by, relative to its kind."""
        return self._bias.get(worker, _USUAL)[2]

    def prefilled(
        self, worker: str, new_tokens: int, cached_tokens: int, seconds: float, *, now_s: float
    ) -> bool:
        """A prefill took `seconds` once it ran; True if the kind's speed has changed."""
        x = (1.0, float(new_tokens), new_tokens * (cached_tokens + new_tokens / 2))
        expected = self._prefill.fit(now_s=now_s).mean(x)
        own = self._learn_bias(worker, seconds, expected)
        return self._prefill.observe(x, seconds / own, now_s=now_s)

    def stepped(
        self, worker: str, rows: int, kv_tokens: int, seconds: float, *, now_s: float
    ) -> bool:
        """A decode step without prefill took `seconds`; True if the kind's speed has changed."""
        x = step_shape(self.prior, rows, kv_tokens)
        own = self._learn_bias(worker, seconds, self._step.fit(now_s=now_s).mean(x))
        return self._step.observe(x, seconds / own, now_s=now_s)

    def forget(self, worker: str) -> None:
        """The worker restarted or is gone."""
        self._bias.pop(worker, None)
        self._changes.add(worker)

    def _learn_bias(self, worker: str, seconds: float, expected: float) -> float:
        """Update and return the worker's factor; its kind learns what remains."""
        bias, count, factor = self._bias.get(worker, _USUAL)
        if math.isfinite(seconds) and seconds > 0 and expected > 0:
            off = min(max(math.log(seconds / expected), -MAX_BIAS), MAX_BIAS)
            count += 1
            bias += max(1 / count, BIAS_RATE) * (off - bias)
            factor = math.exp(bias)
            self._bias[worker] = bias, count, factor
            self._bias.move_to_end(worker)
            self._changes.add(worker)
            if len(self._bias) > MAX_WORKERS:
                self._changes.add(self._bias.popitem(last=False)[0])
        return factor
