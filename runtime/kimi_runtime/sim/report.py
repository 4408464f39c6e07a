"""What a run looked like, as figures: for a table, and for JSON. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import NonNegativeFloat, NonNegativeInt

from kimi_runtime.sim.record import Record
from kimi_runtime.sim.worker import PAUSE_BINS, SimWorker
from kimi_runtime.sim.world import Run
from kimi_runtime.spec.base import SpecModel

FIRST_TURN, STRATA = "first turn", ((2_048, "<= 2k"), (16_384, "2k - 16k"), (math.inf, "> 16k"))


class Spread(SpecModel):
    """Quantiles of some seconds."""

    p50: NonNegativeFloat
    p90: NonNegativeFloat
    p99: NonNegativeFloat
    mean: NonNegativeFloat
    count: NonNegativeInt


class Share(SpecModel):
    """Of all prompt tokens, where their KV came from."""

    hbm: float
    pool: float
    peer: float
    computed: float
    ideal: float
    """What a cache without limits would have had."""


class Summary(SpecModel):
    """One run."""

    policy: str
    seed: int
    requests: NonNegativeInt
    refused: NonNegativeInt
    retries: NonNegativeInt
    makespan_s: NonNegativeFloat
    finished: bool
    ttft: Spread
    ttft_by_appended: dict[str, Spread]
    e2e: Spread
    itl: Spread
    output_tokens_per_s: NonNegativeFloat
    total_tokens_per_s_per_gpu: NonNegativeFloat
    sessions: Spread
    """How long they lasted, pauses included."""
    jain_fairness: NonNegativeFloat
    """Of sessions' output tokens per second of service."""
    prompt_tokens: Share
    modes: dict[str, int]
    expected_ttft_error: float | None
    """Median of what the policy expected over what came, minus 1; None if it expects nothing."""
    terms: dict[str, float]
    """Mean seconds of every term of the chosen plans, for policies whose terms are seconds."""


def summary(run: Run, *, policy: str, seed: int) -> Summary:
    """The figures of one run."""
    records = run.records
    done = [one for one in records if one.ended_s is not None]
    prompts = sum(one.prompt_tokens for one in done) or 1
    outputs = sum(one.output_tokens for one in done)
    span_s = max(run.makespan_s, 1e-9)
    spans = [end - start for start, end in run.sessions_s.values() if math.isfinite(end)]
    off = [one.expected_s / one.ttft_s - 1 for one in done if one.expected_s and one.ttft_s]
    return Summary(
        policy=policy,
        seed=seed,
        requests=len(records),
        refused=sum(one.refused is not None for one in records),
        retries=sum(one.retries for one in records),
        makespan_s=run.makespan_s,
        finished=run.finished,
        ttft=spread(one.ttft_s for one in done),
        ttft_by_appended=_by_appended(done),
        e2e=spread(one.e2e_s for one in done),
        itl=_pauses([*run.cluster.workers.values(), *run.cluster.retired]),
        output_tokens_per_s=outputs / span_s,
        total_tokens_per_s_per_gpu=(prompts + outputs) / span_s / run.cluster.spec.gpus,
        sessions=spread(spans),
        jain_fairness=_fairness(done),
        prompt_tokens=Share(
            hbm=sum(one.hbm_tokens for one in done) / prompts,
            pool=sum(one.pool_tokens for one in done) / prompts,
            peer=sum(one.peer_tokens for one in done) / prompts,
            computed=sum(one.computed_tokens for one in done) / prompts,
            ideal=sum(one.cached_ideally for one in done) / prompts,
        ),
        modes=_counted(one.mode for one in done),
        expected_ttft_error=_median(off),
        terms=_terms(done) if off else {},
    )


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Every request, for JSON."""
    return [asdict(one) for one in records]


def spread(values: Iterable[float | None]) -> Spread:
    """Quantiles by nearest rank; all 0 without values."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return Spread(p50=0, p90=0, p99=0, mean=0, count=0)
    p50, p90, p99 = (_ranked(known, q) for q in (0.5, 0.9, 0.99))
    return Spread(p50=p50, p90=p90, p99=p99, mean=sum(known) / len(known), count=len(known))


def markdown(summaries: Sequence[Summary]) -> str:
    """A table with a line for each run."""
    head = (
        "policy", "seed", "requests", "TTFT p50", "p90", "p99", "e2e p50", "p90", "p99", "ITL p99",
        "makespan", "out tok/s", "tok/s/GPU", "HBM", "pool", "peer", "computed", "ideal hit",
    )  # fmt: skip
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    for one in summaries:
        seconds = (
            *(one.ttft.p50, one.ttft.p90, one.ttft.p99),
            *(one.e2e.p50, one.e2e.p90, one.e2e.p99),
        )
        share = one.prompt_tokens
        cells = [
            *(one.policy, str(one.seed), str(one.requests)),
            *(f"{value:.2f} s" for value in seconds),
            f"{1e3 * one.itl.p99:.0f} ms",
            f"{one.makespan_s:.0f} s",
            f"{one.output_tokens_per_s:.0f}",
            f"{one.total_tokens_per_s_per_gpu:.0f}",
            *(f"{value:.1%}" for value in (share.hbm, share.pool, share.peer, share.computed)),
            f"{share.ideal:.1%}",
        ]
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def _by_appended(done: Sequence[Record]) -> dict[str, Spread]:
    groups: dict[str, list[float]] = {}
    for one in done:
        name = FIRST_TURN
        if one.turn or one.child:
            name = next(name for most, name in STRATA if one.appended_tokens <= most)
        if one.ttft_s is not None:
            groups.setdefault(name, []).append(one.ttft_s)
    return {name: spread(values) for name, values in sorted(groups.items())}


def _pauses(workers: Iterable[SimWorker]) -> Spread:
    counts: dict[int, int] = {}
    for worker in workers:
        for step, tokens in worker.pauses.items():
            counts[step] = counts.get(step, 0) + tokens
    total = sum(counts.values())
    if not total:
        return spread(())
    seconds = {step: float(2 ** (step / PAUSE_BINS)) for step in counts}
    found = []
    for q in (0.5, 0.9, 0.99):
        left = q * total
        for step in sorted(counts):
            left -= counts[step]
            if left <= 0:
                found.append(seconds[step])
                break
    mean = sum(seconds[step] * tokens for step, tokens in counts.items()) / total
    return Spread(p50=found[0], p90=found[1], p99=found[2], mean=mean, count=total)


def _fairness(done: Sequence[Record]) -> float:
    """Jain's index of the sessions' output tokens per second that they waited for answers."""
    tokens: dict[str, int] = {}
    waited: dict[str, float] = {}
    for one in done:
        tokens[one.session] = tokens.get(one.session, 0) + one.output_tokens
        waited[one.session] = waited.get(one.session, 0.0) + (one.e2e_s or 0.0)
    rates = [tokens[name] / max(waited[name], 1e-9) for name in tokens]
    squares = sum(rate * rate for rate in rates)
    return sum(rates) ** 2 / (len(rates) * squares) if squares else 1.0


def _terms(done: Sequence[Record]) -> dict[str, float]:
    names = dict.fromkeys(name for one in done for name in one.terms)
    return {name: sum(one.terms.get(name, 0.0) for one in done) / len(done) for name in names}


def _counted(values: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return dict(sorted(counts.items()))


def _median(values: Sequence[float]) -> float | None:
    return _ranked(sorted(values), 0.5) if values else None


def _ranked(known: Sequence[float], q: float) -> float:
    return known[min(max(math.ceil(q * len(known)) - 1, 0), len(known) - 1)]
