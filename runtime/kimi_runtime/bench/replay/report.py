"""Figures of a replay, as a table and for JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from pydantic import NonNegativeFloat, NonNegativeInt

from kimi_runtime.bench.replay.outcome import Outcome
from kimi_runtime.sim.report import Spread, spread
from kimi_runtime.spec.base import SpecModel

NOTHING = "-"
"""What was not seen once has no quantiles."""


class ReplaySummary(SpecModel):
    """One replay. Cached tokens are those the endpoint did not compute again."""

    requests: NonNegativeInt
    failed: NonNegativeInt
    aborted: NonNegativeInt
    makespan_s: NonNegativeFloat
    ttft: Spread
    e2e: Spread
    itl: Spread
    prompt_tokens: NonNegativeInt
    cached_tokens: NonNegativeInt
    output_tokens: NonNegativeInt

    @property
    def cached_share(self) -> float:
        """Of all prompt tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def requests_per_s(self) -> float:
        """Answered to their ends, over the whole replay."""
        return (self.requests - self.failed) / self.makespan_s if self.makespan_s else 0.0


def summary(outcomes: Sequence[Outcome]) -> ReplaySummary:
    """The figures. Times are of requests that were answered to their end."""
    whole = [one for one in outcomes if one.ok and not one.aborted]
    ends = [one.ended_s for one in outcomes if one.ended_s is not None]
    return ReplaySummary(
        requests=len(outcomes),
        failed=sum(not one.ok for one in outcomes),
        aborted=sum(one.aborted for one in outcomes),
        makespan_s=max(ends, default=0.0) - min((one.asked_s for one in outcomes), default=0.0),
        ttft=spread(one.ttft_s for one in whole),
        e2e=spread(one.e2e_s for one in whole),
        itl=spread(after - before for one in whole for before, after in pairwise(one.chunk_s)),
        prompt_tokens=sum(one.prompt_tokens for one in whole),
        cached_tokens=sum(one.cached_tokens for one in whole),
        output_tokens=sum(one.output_tokens for one in whole),
    )


def markdown(arms: dict[str, ReplaySummary]) -> str:
    """A line for each arm."""
    head = (
        *("", "requests", "failed", "TTFT p50", "p90", "p99", "e2e p50", "p90", "p99"),
        *("ITL p99", "makespan", "requests/s", "prompt tokens", "cached"),
    )
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for name, one in arms.items():
        cells = [
            *(name, str(one.requests), str(one.failed)),
            *_seconds(one.ttft),
            *_seconds(one.e2e),
            f"{1e3 * one.itl.p99:.0f} ms" if one.itl.count else NOTHING,
            f"{one.makespan_s:.0f} s",
            f"{one.requests_per_s:.2f}",
            str(one.prompt_tokens),
            f"{one.cached_share:.1%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _seconds(one: Spread) -> Iterator[str]:
    for value in (one.p50, one.p90, one.p99):
        yield f"{value:.2f} s" if one.count else NOTHING


def rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Every request, for JSON, without what was said."""
    return [{k: v for k, v in asdict(one).items() if k != "text"} for one in outcomes]
