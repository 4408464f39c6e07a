"""Two files of finished runs held against each other, arm by arm. Pure."""

from collections.abc import Sequence

from kimi_runtime.errors import ConfigError
from kimi_runtime.sim.saved import SavedRun
from kimi_runtime.sim.stats import METRICS, Ratio, Sample, Slo, level, ratio, sample_of
from kimi_runtime.sim.tables import figure, interval, table
from kimi_runtime.spec.base import SpecModel


class Compared(SpecModel):
    """One arm of the first file against the same, or the only one, of the second."""

    first: str
    second: str
    seeds: tuple[int, ...]
    figures: dict[str, tuple[float, float]]
    ratios: dict[str, Ratio]
    """How many times better the second is."""


def compared(
    first: Sequence[SavedRun], second: Sequence[SavedRun], *, slo: Slo | None = None
) -> tuple[Compared, ...]:
    """By label, or the only arm of each file whatever they are called. ConfigError without a pair.

    Two arms are compared over the seeds that both have.
    """
    ours, theirs = _by_label(first, slo or Slo()), _by_label(second, slo or Slo())
    pairs = [(label, label) for label in ours if label in theirs]
    if not pairs and len(ours) == len(theirs) == 1:
        pairs = [(next(iter(ours)), next(iter(theirs)))]
    if not pairs:
        raise ConfigError(
            f"nothing to compare: the first file has {', '.join(ours) or 'no runs'}, "
            f"the second {', '.join(theirs) or 'no runs'}"
        )
    return tuple(_pair(a, b, ours[a], theirs[b]) for a, b in pairs)


def markdown(made: Sequence[Compared]) -> str:
    """A line for each arm and figure."""
    parts = []
    for one in made:
        title = one.first if one.first == one.second else f"{one.second} over {one.first}"
        lines = [
            (
                METRICS[metric].label,
                *(figure(metric, value) for value in one.figures[metric]),
                interval(one.ratios[metric]),
            )
            for metric in one.ratios
        ]
        head = (f"{title}, {len(one.seeds)} seeds", "first", "second", "times better [95 %]")
        parts.append(table(head, lines))
    return "\n\n".join(parts) + "\n"


def _by_label(runs: Sequence[SavedRun], slo: Slo) -> dict[str, list[Sample]]:
    groups: dict[str, list[Sample]] = {}
    for run in runs:
        sample = sample_of(run.requests, seed=run.task.seed, slo=slo)
        groups.setdefault(run.label, []).append(sample)
    return groups


def _pair(first: str, second: str, ours: list[Sample], theirs: list[Sample]) -> Compared:
    ratios = {metric: ratio(theirs, ours, metric) for metric in METRICS}
    seeds = sorted({one.seed for one in ours} & {one.seed for one in theirs})
    both = [[one for one in samples if one.seed in seeds] for samples in (ours, theirs)]
    return Compared(
        first=first,
        second=second,
        seeds=tuple(seeds),
        figures={m: (level(both[0], m), level(both[1], m)) for m in METRICS},
        ratios=ratios,
    )
