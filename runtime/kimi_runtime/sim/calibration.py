"""The simulated MI355X against the published one: every point of every series, run again. Pure.

Each point is a closed loop of single requests on the series' system, through the same scheduler as
everything else. Series marked `fitted` gave the constants; the others show what those are worth.
"""

import math
from collections.abc import Callable, Iterable, Sequence

from pydantic import NonNegativeFloat

from kimi_runtime.sim.cluster import ClusterSpec
from kimi_runtime.sim.published import Point, Series, published_figures
from kimi_runtime.sim.record import Record
from kimi_runtime.sim.workload import closed_loop
from kimi_runtime.sim.world import World
from kimi_runtime.spec.base import SpecModel
from kimi_runtime.spec.router import LeastLoad

ROUNDS = 4
"""Requests for each lane: the first fill it, the last empty it, those between are counted."""
BENCHMARK_ROUNDS = 10
"""Requests for each lane in the published benchmarks: the first of them all come at once."""
LEAST_REQUESTS = 64
UP_TO = 256
"""Concurrency up to which a held-out error is held against the target."""


class Compared(SpecModel):
    """One point: measured by others, and simulated."""

    series: str
    fitted: bool
    measured: Point
    simulated: Point

    def error(self, what: str) -> float:
        """Simulated over measured, minus 1; `what` is a field of `Point`."""
        ours, theirs = getattr(self.simulated, what), getattr(self.measured, what)
        return float(ours / theirs - 1)


class Errors(SpecModel):
    """Mean absolute errors over some points, and the largest."""

    points: int
    tpot: NonNegativeFloat
    worst_tpot: NonNegativeFloat
    throughput: NonNegativeFloat
    worst_throughput: NonNegativeFloat
    ttft: NonNegativeFloat


def compared(
    series: Sequence[Series] | None = None,
    *,
    most: int = UP_TO,
    seed: int = 1,
    told: Callable[[Compared], None] = lambda one: None,
) -> list[Compared]:
    """Simulate all points of the series (None: all published ones) up to `most` lanes."""
    made = []
    for one in published_figures().series if series is None else series:
        for point in one.points:
            if point.concurrency <= most:
                simulated = simulate(one, point.concurrency, seed=seed)
                made.append(
                    Compared(
                        series=one.name, fitted=one.fitted, measured=point, simulated=simulated
                    )
                )
                told(made[-1])
    return made


def simulate(series: Series, lanes: int, *, seed: int) -> Point:
    """One closed loop on the series' system."""
    aggregated = not series.prefill
    cluster = ClusterSpec(
        model=series.model,
        tensor=series.tensor,
        workers=series.decode if aggregated else 0,
        prefill=series.prefill,
        decode=0 if aggregated else series.decode,
        pool=0,
        peers=False,
        speed_spread=0.0,
        max_running=1024,
    )
    count = max(ROUNDS * lanes, LEAST_REQUESTS)
    workload = closed_loop(lanes, count, seed, inputs=series.input, outputs=series.output)
    run = World(cluster, workload, LeastLoad(), seed=seed).run()
    return point_of(lanes, run.records)


def errors(some: Iterable[Compared]) -> Errors | None:
    """Of some points; None without any."""
    points = list(some)
    if not points:
        return None
    tpot = [abs(one.error("tpot_s")) for one in points]
    rate = [abs(one.error("total_tokens_per_s")) for one in points]
    ttft = [abs(one.error("ttft_s")) for one in points]
    return Errors(
        points=len(points),
        tpot=sum(tpot) / len(points),
        worst_tpot=max(tpot),
        throughput=sum(rate) / len(points),
        worst_throughput=max(rate),
        ttft=sum(ttft) / len(points),
    )


def point_of(lanes: int, records: Sequence[Record]) -> Point:
    """What a benchmark of so many lanes would have measured.

    Of the requests that neither filled nor emptied the lanes; TTFT of all a benchmark sends.
    """
    began_s = sorted(one.ended_s for one in records if one.ended_s is not None)[lanes - 1]
    ended_s = max(one.asked_s for one in records)
    inside = [one for one in records if one.asked_s >= began_s] or list(records)
    counted = [
        one
        for one in records
        if one.ended_s is not None and began_s < one.ended_s <= max(ended_s, began_s)
    ]
    tokens = sum(one.prompt_tokens + one.output_tokens for one in counted)
    seconds = ended_s - began_s
    if not counted or seconds <= 0:
        tokens = sum(one.prompt_tokens + one.output_tokens for one in records)
        seconds = max(one.ended_s or 0.0 for one in records)
    first_s = _mean(one.ttft_s for one in records[:lanes])
    later_s = _mean(one.ttft_s for one in inside)
    return Point(
        concurrency=lanes,
        total_tokens_per_s=tokens / seconds,
        ttft_s=(first_s + (BENCHMARK_ROUNDS - 1) * later_s) / BENCHMARK_ROUNDS,
        tpot_s=_mean(one.tpot_s for one in inside),
    )


def _mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known)
