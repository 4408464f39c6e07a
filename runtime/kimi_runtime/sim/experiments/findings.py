"""What an experiment's runs show: figures by scenario and arm, ratios, anchors, ladders. Pure."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Self

from pydantic import NonNegativeInt

from kimi_runtime.sim.experiments.regime import Anchor, Cell, Contrast, Regime
from kimi_runtime.sim.pictures import mean_of, parts_of, slow_parts
from kimi_runtime.sim.report import Share
from kimi_runtime.sim.stats import Ratio, Sample, best, level, ratio, sample_of
from kimi_runtime.spec.base import SpecModel

Runs = dict[tuple[str, str], list[Sample]]
"""Samples by scenario and arm, a sample for each seed."""


class Row(SpecModel):
    """One arm in one scenario, over its seeds."""

    scenario: str
    arm: str
    seeds: NonNegativeInt
    requests: NonNegativeInt
    refused: NonNegativeInt
    figures: dict[str, float]
    prompt_tokens: Share
    terms: dict[str, float]
    """Mean seconds of the chosen plans' terms."""
    parts: dict[str, float]
    """Mean seconds of a request, by what they went into."""
    slow_parts: dict[str, float]
    """The same of the slowest 1 % until their first tokens."""


class Finding(SpecModel):
    """A ratio that was asked for."""

    name: str
    metric: str
    scenario: str
    arm: str
    against: str
    """Of those to be held against, the best."""
    ratio: Ratio
    target: float | None
    published: float | None

    @property
    def met(self) -> bool | None:
        """Whether the target is; None without one."""
        return None if self.target is None else self.ratio.mean >= self.target

    @property
    def sure(self) -> bool:
        """Whether the interval leaves no doubt which of the two is better."""
        return self.ratio.low > 1 or self.ratio.high < 1


class Anchored(SpecModel):
    """Whether the regime is the situation it stands for."""

    name: str
    metric: str
    arm: str
    value: float
    wanted: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether it is within the tolerance."""
        return abs(self.value / self.wanted - 1) <= self.tolerance


class Step(SpecModel):
    """What one part adds: an arm against the one before it on the ladder."""

    ladder: str
    scenario: str
    arm: str
    before: str
    ratios: dict[str, Ratio]


class Findings(SpecModel):
    """All of an experiment."""

    experiment: str
    says: str
    regime_digest: str
    code_digest: str
    seeds: tuple[int, ...]
    complete: bool
    """Whether all of the regime ran; else what ran."""
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    anchors: tuple[Anchored, ...]
    steps: tuple[Step, ...]

    @property
    def ratios(self) -> dict[str, Ratio]:
        """By name."""
        return {one.name: one.ratio for one in self.findings}


def findings(
    regime: Regime,
    cells: Sequence[Cell],
    read: Callable[[Cell], Mapping[str, Any]],
    *,
    regime_digest: str,
    code_digest: str,
    told: Callable[[int], None] = lambda done: None,
) -> Findings:
    """Of finished runs. What an absent run would be needed for is left out."""
    runs: Runs = {}
    told_of: dict[tuple[str, str], list[_Told]] = {}
    for number, cell in enumerate(cells):
        run, key = read(cell), (cell.scenario, cell.arm)
        sample = sample_of(run["requests"], seed=cell.task.seed, slo=regime.slo)
        runs.setdefault(key, []).append(sample)
        told_of.setdefault(key, []).append(_Told.of(run))
        told(number + 1)
    rows = [_row(regime, *key, runs[key], told_of[key]) for key in runs]
    places = {name: number for number, name in enumerate(regime.scenarios)}
    rows.sort(key=lambda row: places[row.scenario])
    everything = {(name, arm) for name in regime.scenarios for arm in regime.arms_in(name)}
    return Findings(
        experiment=regime.name,
        says=regime.says,
        regime_digest=regime_digest,
        code_digest=code_digest,
        seeds=tuple(dict.fromkeys(cell.task.seed for cell in cells)),
        complete=everything == runs.keys(),
        rows=tuple(rows),
        findings=tuple(_findings(regime, runs)),
        anchors=tuple(_anchors(regime, runs)),
        steps=tuple(_steps(regime, runs)),
    )


def _row(
    regime: Regime,
    scenario: str,
    arm: str,
    samples: Sequence[Sample],
    runs: Sequence["_Told"],
) -> Row:
    summaries = [one.summary for one in runs]
    shares = [Share.model_validate(one["prompt_tokens"]) for one in summaries]
    count = len(summaries)
    return Row(
        scenario=scenario,
        arm=arm,
        seeds=len(samples),
        requests=sum(one["requests"] for one in summaries),
        refused=sum(one["refused"] for one in summaries),
        figures={metric: level(samples, metric) for metric in regime.metrics},
        prompt_tokens=Share(
            **{
                name: sum(getattr(share, name) for share in shares) / count
                for name in Share.model_fields
            }
        ),
        terms=mean_of([one["terms"] for one in summaries]),
        parts=mean_of([one.parts for one in runs]),
        slow_parts=mean_of([one.slow_parts for one in runs]),
    )


class _Told(NamedTuple):
    """What is kept of a run besides its sample."""

    summary: Mapping[str, Any]
    parts: dict[str, float]
    slow_parts: dict[str, float]

    @classmethod
    def of(cls, run: Mapping[str, Any]) -> Self:
        done = [one for one in run["requests"] if one["ended_s"] is not None]
        return cls(run["summary"], parts_of(done), slow_parts(done) if done else {})


def _findings(regime: Regime, runs: Runs) -> list[Finding]:
    made = []
    for name, one in regime.contrasts.items():
        asked = regime.scenarios if one.scenario is None else (one.scenario,)
        for scenario in asked:
            full = name if one.scenario is not None else f"{name}.{scenario}"
            found = _finding(full, one, scenario, runs)
            if found is not None:
                made.append(found)
    return made


def _finding(name: str, one: Contrast, scenario: str, runs: Runs) -> Finding | None:
    ours = runs.get((scenario, one.arm))
    others = {arm: runs[scenario, arm] for arm in one.against if (scenario, arm) in runs}
    if ours is None or not others:
        return None
    rival = best(others, one.metric)
    return Finding(
        name=name,
        metric=one.metric,
        scenario=scenario,
        arm=one.arm,
        against=rival,
        ratio=ratio(ours, others[rival], one.metric),
        target=one.target,
        published=one.published,
    )


def _anchors(regime: Regime, runs: Runs) -> list[Anchored]:
    return [
        anchored
        for name, one in regime.anchors.items()
        if (anchored := _anchor(name, one, runs)) is not None
    ]


def _anchor(name: str, one: Anchor, runs: Runs) -> Anchored | None:
    arms = {arm: runs[one.scenario, arm] for arm in one.arms if (one.scenario, arm) in runs}
    if not arms:
        return None
    arm = best(arms, one.metric)
    return Anchored(
        name=name,
        metric=one.metric,
        arm=arm,
        value=level(arms[arm], one.metric),
        wanted=one.value,
        tolerance=one.tolerance,
    )


def _steps(regime: Regime, runs: Runs) -> list[Step]:
    return [
        Step(
            ladder=ladder,
            scenario=scenario,
            arm=arm,
            before=before,
            ratios={
                metric: ratio(runs[scenario, arm], runs[scenario, before], metric)
                for metric in regime.metrics
            },
        )
        for ladder, arms in regime.ladders.items()
        for scenario in regime.scenarios
        for before, arm in pairwise(arms)
        if (scenario, arm) in runs and (scenario, before) in runs
    ]
