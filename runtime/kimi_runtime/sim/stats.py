"""Figures of runs with their uncertainty: paired seeds, bootstrapped sessions. Pure.

Two arms of a seed saw the same sessions, so that their ratio varies far less than either does. A
resample draws seeds, and within each seed sessions, with replacement; both arms get the same draw.
Turns of a session depend on each other: sessions are drawn, never requests. Every figure is
computed from requests weighted by how often their session was drawn.

Resamples of a figure are an array [R + 1] whose element 0 is the figure of the run as it was.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import NonNegativeInt, PositiveFloat

from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.base import SpecModel

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

RESAMPLES = 1000
CONFIDENCE = 0.95
_TINY = 1e-9


class Slo(SpecModel):
    """What a request must keep to count for goodput. Seconds."""

    ttft_s: PositiveFloat = 5.0
    tpot_s: PositiveFloat = 0.1


class Ratio(SpecModel):
    """How many times better one arm is than another: above 1 is better, for every metric."""

    mean: float
    """Geometric mean over the seeds."""
    low: float
    high: float
    seeds: NonNegativeInt


@dataclass(slots=True)
class Sample:
    """The requests of one run as arrays [N], and their sessions as numbers [N] below `sessions`.

    A request that was refused, or never ended, counts as answered when the run ended: refusing
    must not look fast.
    """

    seed: int
    slo: Slo
    names: tuple[str, ...]
    """Of the sessions; subagents belong to the session that started them."""
    session: Ints
    asked_s: Floats
    ttft_s: Floats
    e2e_s: Floats
    ended_s: Floats
    tpot_s: Floats
    outputs: Floats
    refused: npt.NDArray[np.bool_]
    weights: Floats = field(init=False)
    """[R + 1, sessions]: how often each session was drawn; first the run as it was."""
    _known: dict[str, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Draw; equal names and seeds give equal draws."""
        count = len(self.names)
        chance = np.random.default_rng((self.seed, zlib.crc32("\n".join(self.names).encode())))
        drawn = chance.multinomial(count, [1 / count] * count, size=RESAMPLES)
        self.weights = np.vstack([np.ones((1, count)), drawn]).astype(np.float64)

    def resamples(self, metric: str) -> Floats:
        """[R + 1] of a figure; `metric` is a name of `METRICS`."""
        known = self._known.get(metric)
        if known is None:
            if metric not in METRICS:
                raise ConfigError(f"metric {metric!r} is not one of {', '.join(METRICS)}")
            known = self._known[metric] = METRICS[metric].measure(self)
        return known

    def figure(self, metric: str) -> float:
        """The figure of the run as it was."""
        return float(self.resamples(metric)[0])


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure: how it is measured, whether more of it is better, and how it is printed."""

    measure: Callable[[Sample], Floats]
    more_is_better: bool
    label: str
    unit: str


def sample_of(requests: Sequence[Mapping[str, Any]], *, seed: int, slo: Slo) -> Sample:
    """A run's requests, each with the fields of `sim.record.Record`. ConfigError for none."""
    if not requests:
        raise ConfigError("a run of no requests has no figures; give it sessions")
    over_s = max(max(one["asked_s"], one["ended_s"] or 0.0) for one in requests)
    roots = [_root(one) for one in requests]
    names = tuple(sorted(set(roots)))
    number = {name: index for index, name in enumerate(names)}
    asked = np.array([one["asked_s"] for one in requests], dtype=np.float64)
    ended = _times(requests, "ended_s", over_s)
    first = _times(requests, "first_s", over_s)
    outputs = np.array([one["output_tokens"] for one in requests], dtype=np.float64)
    return Sample(
        seed=seed,
        slo=slo,
        names=names,
        session=np.array([number[root] for root in roots], dtype=np.int64),
        asked_s=asked,
        ttft_s=first - asked,
        e2e_s=ended - asked,
        ended_s=ended,
        tpot_s=(ended - first) / np.maximum(outputs - 1, 1),
        outputs=outputs,
        refused=np.array([one["ended_s"] is None for one in requests]),
    )


def ratio(arm: Sequence[Sample], against: Sequence[Sample], metric: str) -> Ratio:
    """How many times better `arm` is, by seeds that both have. ConfigError without any."""
    ours = {sample.seed: sample for sample in arm}
    theirs = {sample.seed: sample for sample in against}
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        raise ConfigError(
            f"no seed in common to compare {metric} by: {sorted(ours)} and {sorted(theirs)}; "
            "run both with the same seeds"
        )
    logs = np.stack([_log_ratio(ours[seed], theirs[seed], metric) for seed in seeds])
    chance = np.random.default_rng(len(seeds))
    drawn = chance.integers(0, len(seeds), size=(RESAMPLES, len(seeds)))
    means = logs[drawn, np.arange(1, RESAMPLES + 1)[:, None]].mean(axis=1)
    margin = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(means, [margin, 100 - margin])
    mean = float(logs[:, 0].mean())
    return Ratio(
        mean=math.exp(mean), low=math.exp(float(low)), high=math.exp(float(high)), seeds=len(seeds)
    )


def level(samples: Sequence[Sample], metric: str) -> float:
    """A figure over seeds: the geometric mean."""
    figures = [max(sample.figure(metric), _TINY) for sample in samples]
    return math.exp(sum(map(math.log, figures)) / len(figures))


def best(arms: Mapping[str, Sequence[Sample]], metric: str) -> str:
    """The arm that is best by a metric."""
    sign = 1 if METRICS[metric].more_is_better else -1
    return max(arms, key=lambda name: sign * level(arms[name], metric))


def _log_ratio(ours: Sample, theirs: Sample, metric: str) -> Floats:
    if ours.names != theirs.names:
        raise ConfigError(
            f"seed {ours.seed}: the two arms ran different sessions, so they are no pair; "
            "change what the cluster is, not the mix"
        )
    logs = np.log(np.maximum(ours.resamples(metric), _TINY))
    logs -= np.log(np.maximum(theirs.resamples(metric), _TINY))
    return logs if METRICS[metric].more_is_better else -logs


def _root(request: Mapping[str, Any]) -> str:
    name = str(request["session"])
    return name.split(".", 1)[0] if request["child"] else name


def _times(requests: Sequence[Mapping[str, Any]], name: str, over_s: float) -> Floats:
    lost = [one["ended_s"] is None or one[name] is None for one in requests]
    values = [over_s if gone else one[name] for one, gone in zip(requests, lost, strict=True)]
    return np.array(values, dtype=np.float64)


def _quantile(values: str, q: float) -> Callable[[Sample], Floats]:
    """Weighted nearest rank: the least value that a share `q` of the weight does not exceed."""

    def measure(sample: Sample) -> Floats:
        known: Floats = getattr(sample, values)
        order = np.argsort(known, kind="stable")
        ranked = known[order]
        weight = np.cumsum(sample.weights[:, sample.session[order]], axis=1)
        index = np.argmax(weight >= (q * weight[:, -1] - _TINY)[:, None], axis=1)
        return np.asarray(ranked[index], dtype=np.float64)

    return measure


def _rate(counted: Callable[[Sample], Floats]) -> Callable[[Sample], Floats]:
    """What was counted for each request, per second of the whole run."""

    def measure(sample: Sample) -> Floats:
        totals = sample.weights @ _by_session(sample, counted(sample))
        return np.asarray(totals / max(float(sample.ended_s.max()), _TINY), dtype=np.float64)

    return measure


def _middle_rate(sample: Sample) -> Floats:
    """Output tokens per second while the middle 80 % of them were made: no warm-up, no drain."""
    order = np.argsort(sample.ended_s, kind="stable")
    ended = sample.ended_s[order]
    made = sample.weights[:, sample.session[order]] * sample.outputs[order]
    made = np.cumsum(made, axis=1)
    total = made[:, -1]
    from_s = ended[np.argmax(made >= (0.1 * total)[:, None], axis=1)]
    until_s = ended[np.argmax(made >= (0.9 * total - _TINY)[:, None], axis=1)]
    return np.asarray(0.8 * total / np.maximum(until_s - from_s, _TINY), dtype=np.float64)


def _good(sample: Sample) -> Floats:
    slo = sample.slo
    kept = (sample.ttft_s <= slo.ttft_s) & (sample.tpot_s <= slo.tpot_s) & ~sample.refused
    return kept.astype(np.float64)


def _fairness(sample: Sample) -> Floats:
    """Jain's index of the sessions' output tokens per second that they waited for answers."""
    tokens = _by_session(sample, sample.outputs)
    rates = tokens / np.maximum(_by_session(sample, sample.e2e_s), _TINY)
    weights = sample.weights
    squares = np.maximum((weights @ rates**2) * weights.sum(axis=1), _TINY)
    return np.asarray((weights @ rates) ** 2 / squares, dtype=np.float64)


def _by_session(sample: Sample, values: Floats) -> Floats:
    sums = np.bincount(sample.session, weights=values, minlength=len(sample.names))
    return np.asarray(sums, dtype=np.float64)


METRICS: dict[str, Metric] = {
    "ttft_p50": Metric(_quantile("ttft_s", 0.5), False, "TTFT p50", "s"),
    "ttft_p90": Metric(_quantile("ttft_s", 0.9), False, "TTFT p90", "s"),
    "ttft_p99": Metric(_quantile("ttft_s", 0.99), False, "TTFT p99", "s"),
    "e2e_p50": Metric(_quantile("e2e_s", 0.5), False, "e2e p50", "s"),
    "e2e_p90": Metric(_quantile("e2e_s", 0.9), False, "e2e p90", "s"),
    "e2e_p99": Metric(_quantile("e2e_s", 0.99), False, "e2e p99", "s"),
    "tpot_p90": Metric(_quantile("tpot_s", 0.9), False, "TPOT p90", "s"),
    "throughput": Metric(_rate(lambda sample: sample.outputs), True, "out tok/s", ""),
    "steady_throughput": Metric(_middle_rate, True, "steady out tok/s", ""),
    "goodput": Metric(_rate(_good), True, "good requests/s", ""),
    "fairness": Metric(_fairness, True, "fairness", ""),
}
"""By name. Throughput counts the drain; steady throughput neither warm-up nor drain."""
