"""What of finished runs is drawn: a run's requests reduced to curves, spans and shares. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kimi_runtime.sim.report import FIRST_TURN, STRATA

CURVE_POINTS = 160
TIMELINE_SESSIONS = 32
SLOWEST = 0.01

Requests = Sequence[Mapping[str, Any]]

PARTS = ("deferred", "admission and reads", "queue", "computing the prompt", "answering")
SOURCES = ("own memory", "pool", "peer", "computed again", "new")


@dataclass(frozen=True, slots=True)
class Spans:
    """One session on its timeline: from a question to its first token, and on to the last."""

    name: str
    waits: tuple[tuple[float, float], ...]
    answers: tuple[tuple[float, float], ...]


@dataclass(slots=True)
class Picture:
    """One arm as it is drawn. Seconds, and shares of all prompt tokens."""

    label: str
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """By what was appended: (TTFT, share of requests that are not slower)."""
    timelines: list[Spans] = field(default_factory=list)
    over_s: float = 0.0
    sources: dict[str, float] = field(default_factory=dict)
    mean_parts: dict[str, float] = field(default_factory=dict)
    slow_parts: dict[str, float] = field(default_factory=dict)
    """Of the slowest 1 % by TTFT; their answering is left out."""
    terms: dict[str, float] = field(default_factory=dict)
    """Mean seconds of each term of the plans chosen, where a policy's terms are seconds."""


def picture_of(label: str, runs: Sequence[Requests], terms: Mapping[str, float]) -> Picture:
    """All seeds of an arm; the timeline is the first one's."""
    everything = [one for run in runs for one in run]
    done = [one for one in everything if one["ended_s"] is not None and one["first_s"] is not None]
    made = Picture(label, terms=dict(terms))
    made.curves = {name: _curve(values) for name, values in _by_appended(done).items()}
    if runs and done:
        made.timelines = _timelines(runs[0])
        made.over_s = max(one["ended_s"] or one["asked_s"] for one in runs[0])
    made.sources = _sources(done)
    made.mean_parts = parts_of(done)
    made.slow_parts = slow_parts(done) if done else {}
    return made


def parts_of(done: Requests) -> dict[str, float]:
    """Mean seconds of answered requests by what they went into."""
    sums = dict.fromkeys(PARTS, 0.0)
    for one in done:
        scheduled_s = _between(one["asked_s"], one["scheduled_s"], one["first_s"])
        computing_s = _between(scheduled_s, one.get("computing_s"), one["first_s"])
        before_s = scheduled_s - one["asked_s"]
        held_s = min(one["deferred_s"], before_s)
        spent = (
            held_s,
            before_s - held_s,
            computing_s - scheduled_s,
            one["first_s"] - computing_s,
            one["ended_s"] - one["first_s"],
        )
        for name, seconds in zip(PARTS, spent, strict=True):
            sums[name] += seconds
    return {name: total / max(len(done), 1) for name, total in sums.items()}


def slow_parts(done: Requests) -> dict[str, float]:
    """The same of the slowest 1 % by TTFT, until their first tokens."""
    slow = sorted(done, key=_ttft)[-max(round(SLOWEST * len(done)), 1) :]
    return {name: seconds for name, seconds in parts_of(slow).items() if name != PARTS[-1]}


def mean_of(some: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Name by name; what one lacks is 0 there."""
    names = dict.fromkeys(name for one in some for name in one)
    return {name: sum(one.get(name, 0.0) for one in some) / len(some) for name in names}


def stratum_of(request: Mapping[str, Any]) -> str:
    """By how much a request appended to what its session had said before."""
    if not request["turn"] and not request["child"]:
        return FIRST_TURN
    return next(name for most, name in STRATA if request["appended_tokens"] <= most)


def _by_appended(done: Requests) -> dict[str, list[float]]:
    groups: dict[str, list[float]] = {name: [] for name in (FIRST_TURN, *(n for _, n in STRATA))}
    for one in done:
        groups[stratum_of(one)].append(_ttft(one))
    return {name: values for name, values in groups.items() if values}


def _curve(values: Sequence[float]) -> list[tuple[float, float]]:
    """Points closer together where the tail is: by even steps of log(1 - share)."""
    known, count = sorted(values), len(values)
    ranks = {
        min(int(count * (1 - 10 ** (-3.2 * step / CURVE_POINTS))), count - 1)
        for step in range(CURVE_POINTS + 1)
    }
    return [(known[rank], (rank + 1) / (count + 1)) for rank in sorted(ranks)]


def _timelines(run: Requests) -> list[Spans]:
    turns: dict[str, list[Mapping[str, Any]]] = {}
    for one in run:
        if not one["child"]:
            turns.setdefault(one["session"], []).append(one)
    chosen = list(turns)[:TIMELINE_SESSIONS]
    return [
        Spans(
            name,
            tuple((one["asked_s"], one["first_s"]) for one in turns[name] if one["first_s"]),
            tuple(
                (one["first_s"], one["ended_s"])
                for one in turns[name]
                if one["first_s"] and one["ended_s"]
            ),
        )
        for name in chosen
    ]


def _sources(done: Requests) -> dict[str, float]:
    prompts = sum(one["prompt_tokens"] for one in done) or 1
    found = [
        sum(one[name] for one in done) for name in ("hbm_tokens", "pool_tokens", "peer_tokens")
    ]
    seen = max(sum(one["cached_ideally"] for one in done), sum(found))
    amounts = (*found, seen - sum(found), max(prompts - seen, 0))
    return {name: amount / prompts for name, amount in zip(SOURCES, amounts, strict=True)}


def _between(low_s: float, at_s: float | None, high_s: float) -> float:
    """A moment within bounds; unknown: the lower one."""
    return low_s if at_s is None else min(max(at_s, low_s), high_s)


def _ttft(request: Mapping[str, Any]) -> float:
    return float(request["first_s"] - request["asked_s"])
