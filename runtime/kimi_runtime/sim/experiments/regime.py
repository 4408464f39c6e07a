"""What an experiment is, read from `NAME.json` beside this file. Pure.

A run is a `sim.tasks.Task`: the regime's `base`, over it the scenario's `set`, over it the arm's,
field by field, objects merged. Equal regimes give equal runs: the digest of the file says which.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from kimi_runtime.errors import ConfigError
from kimi_runtime.sim.stats import METRICS, Slo
from kimi_runtime.sim.tasks import Task, policy_of
from kimi_runtime.spec.base import SpecModel

FOLDER = Path(__file__).parent
NAMES = ("pool", "migration", "overall", "peers", "pd")

Fields = dict[str, Any]


class Scenario(SpecModel):
    """One regime of the sweep."""

    says: str
    set: Fields = Field({}, description="Fields of a Task that differ from `base`.")
    seeds: PositiveInt | None = Field(None, description="Only the first so many; None: all.")


class Arm(SpecModel):
    """One way to serve it."""

    says: str
    set: Fields = Field({}, description="Fields of a Task, over the scenario's.")
    scenarios: tuple[str, ...] | None = Field(None, description="Only there; None: in all.")


class Contrast(SpecModel):
    """`ratios.NAME`: how many times better an arm is than the best of others.

    Without a scenario it is asked in each where the arm runs, as `NAME.SCENARIO`.
    """

    metric: str
    arm: str
    against: Annotated[tuple[str, ...], Field(min_length=1)]
    scenario: str | None = None
    target: PositiveFloat | None = Field(None, description="At least this.")
    published: PositiveFloat | None = Field(None, description="What others published.")


class Anchor(SpecModel):
    """A figure the regime was chosen to have: it is what makes it the published situation."""

    metric: str
    arms: Annotated[tuple[str, ...], Field(min_length=1)] = Field(description="The best of them.")
    scenario: str
    value: PositiveFloat
    tolerance: Annotated[float, Field(gt=0, lt=1)]


class Regime(SpecModel):
    """A whole experiment."""

    name: str
    says: str
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = Field(description="Reported.")
    tuning_seeds: tuple[int, ...] = Field(description="Everything was chosen on these.")
    slo: Slo = Slo()
    base: Fields = Field({}, description="Fields of a Task that all runs share.")
    scenarios: Annotated[dict[str, Scenario], Field(min_length=1)]
    arms: Annotated[dict[str, Arm], Field(min_length=1)]
    contrasts: dict[str, Contrast] = Field({}, description="The ratios asked for, by name.")
    anchors: dict[str, Anchor] = Field({}, description="By name.")
    ladders: dict[str, tuple[str, ...]] = Field(
        {}, description="Arms that add one part after another; each is held against the one before."
    )
    metrics: tuple[str, ...] = tuple(METRICS)
    drawn: dict[str, tuple[str, ...]] = Field(
        {}, description="Arms on the page, by scenario: few enough to be told apart."
    )

    @model_validator(mode="after")
    def _names_what_is_there(self) -> Self:
        if set(self.seeds) & set(self.tuning_seeds):
            raise ValueError("seeds: a seed is both reported and tuned on")
        named: list[tuple[str, str]] = []
        for name, arm in self.arms.items():
            named += [(f"arms.{name}.scenarios: scenario", one) for one in arm.scenarios or ()]
        for name, contrast in self.contrasts.items():
            named += _named(name, contrast, (contrast.arm, *contrast.against))
        for name, anchor in self.anchors.items():
            named += _named(name, anchor, anchor.arms)
        for name, arms in self.ladders.items():
            named += [(f"ladders.{name}: arm", arm) for arm in arms]
        for scenario, arms in self.drawn.items():
            named.append(("drawn: scenario", scenario))
            named += [(f"drawn.{scenario}: arm", arm) for arm in arms]
        named += [("metrics: metric", metric) for metric in self.metrics]
        known: dict[str, Collection[str]] = {
            "scenario": self.scenarios,
            "metric": METRICS,
            "arm": self.arms,
        }
        for where, name in named:
            there = known[where.rsplit(" ", 1)[1]]
            if name not in there:
                raise ValueError(f"{where} {name!r} is not one of {', '.join(there)}")
        return self

    def arms_in(self, scenario: str) -> tuple[str, ...]:
        """The arms that run there."""
        return tuple(
            name
            for name, arm in self.arms.items()
            if arm.scenarios is None or scenario in arm.scenarios
        )

    def task(self, scenario: str, arm: str, seed: int) -> Task:
        """One run. ConfigError naming scenario, arm and field that do not fit a Task."""
        fields = merged(merged(self.base, self.scenarios[scenario].set), self.arms[arm].set)
        try:
            task = Task.model_validate(fields | {"seed": seed})
        except ValidationError as exc:
            first = exc.errors(include_url=False, include_context=False)[0]
            where = ".".join(map(str, first["loc"])) or "it"
            raise ConfigError(
                f"{self.name}: scenario {scenario}, arm {arm}: {where}: {first['msg']}"
            ) from exc
        policy_of(task.policy, task.cluster)
        return task


class Cell(SpecModel):
    """One run of a regime."""

    scenario: str
    arm: str
    task: Task


def cells_of(
    regime: Regime,
    *,
    seeds: Sequence[int] | None = None,
    scenarios: Sequence[str] = (),
    arms: Sequence[str] = (),
) -> tuple[Cell, ...]:
    """All runs, seed by seed, so that what is there after a while is whole pairs.

    `seeds` None: the reported ones. `scenarios` and `arms`, if any, choose among the regime's;
    ConfigError for one that it lacks.
    """
    for what, chosen, there in (
        ("scenario", scenarios, regime.scenarios),
        ("arm", arms, regime.arms),
    ):
        for name in chosen:
            if name not in there:
                raise ConfigError(f"{regime.name}: no {what} {name!r}; it has {', '.join(there)}")
    return tuple(_cells(regime, seeds or regime.seeds, scenarios, arms))


def _cells(
    regime: Regime, seeds: Sequence[int], scenarios: Sequence[str], arms: Sequence[str]
) -> Iterator[Cell]:
    for number, seed in enumerate(seeds):
        for scenario, one in regime.scenarios.items():
            if one.seeds is not None and number >= one.seeds:
                continue
            if scenarios and scenario not in scenarios:
                continue
            for arm in regime.arms_in(scenario):
                if not arms or arm in arms:
                    yield Cell(scenario=scenario, arm=arm, task=regime.task(scenario, arm, seed))


def _named(name: str, one: Contrast | Anchor, arms: Sequence[str]) -> list[tuple[str, str]]:
    """What a contrast or an anchor speaks of, each with where it does."""
    scenario = [] if one.scenario is None else [(f"{name}: scenario", one.scenario)]
    return [*scenario, (f"{name}: metric", one.metric), *((f"{name}: arm", arm) for arm in arms)]


def merged(under: Fields, over: Fields) -> Fields:
    """`over` on top of `under`: objects are merged field by field, all else is replaced."""
    both = dict(under)
    for name, value in over.items():
        beneath = both.get(name)
        if isinstance(value, dict) and isinstance(beneath, dict):
            value = merged(beneath, value)
        both[name] = value
    return both


def load(name: str) -> tuple[Regime, str]:
    """A packaged regime (by name), or one in a file, and the SHA-256 of its text."""
    path = FOLDER / f"{name}.json" if name in NAMES else Path(name)
    try:
        text = path.read_bytes()
        regime = Regime.model_validate_json(text)
    except OSError as exc:
        raise ConfigError(
            f"experiment {name!r} is not one of {', '.join(NAMES)}, nor a file that can be read: "
            f"{exc.strerror}"
        ) from exc
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise ConfigError(f"{path}: {where}: {first['msg']}") from exc
    for scenario in regime.scenarios:
        for arm in regime.arms_in(scenario):
            regime.task(scenario, arm, regime.seeds[0])
    return regime, hashlib.sha256(text).hexdigest()


def seeds_of(text: str) -> tuple[int, ...]:
    """`101-110` or `1,3,7-9` as numbers. ConfigError for anything else."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        try:
            low = int(first)
            high = int(last) if last else low
        except ValueError:
            raise ConfigError(
                f"seeds {text!r}: {part!r} is neither a number nor a range such as 101-110"
            ) from None
        if high < low:
            raise ConfigError(f"seeds {text!r}: {part!r} counts down; write {high}-{low}")
        found += range(low, high + 1)
    if len(set(found)) < len(found):
        raise ConfigError(f"seeds {text!r}: a seed is named twice")
    return tuple(found)


def cell_key(cell: Cell, code: str) -> str:
    """Names a run: what it depends on, and the code that makes it."""
    text = json.dumps(cell.task.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(f"{code}\n{text}".encode()).hexdigest()[:32]
