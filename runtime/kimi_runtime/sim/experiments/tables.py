"""An experiment's findings as Markdown. Pure."""

from collections.abc import Iterable, Sequence

from kimi_runtime.sim.experiments.findings import Finding, Findings, Row, Step
from kimi_runtime.sim.pictures import PARTS
from kimi_runtime.sim.stats import METRICS
from kimi_runtime.sim.tables import figure, interval, table


def markdown(found: Findings) -> str:
    """Everything, in sections."""
    parts = [_head(found), *_anchors(found), *_ratios(found.findings)]
    parts += _steps(found.steps)
    for name, rows in by_scenario(found.rows).items():
        parts += [_rows(name, rows), _times(name, rows)]
    return "\n\n".join(parts) + "\n"


def by_scenario(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows in their order, scenario by scenario."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.scenario, []).append(row)
    return groups


def verdict(one: Finding) -> str:
    """In a word or two."""
    if one.met is not None:
        return "met" if one.met else "**missed**"
    if not one.sure:
        return "no difference shown"
    return "better" if one.ratio.mean > 1 else "**worse**"


def _head(found: Findings) -> str:
    part = "" if found.complete else " Not all of the regime's scenarios and arms ran."
    return (
        f"{found.says}\n\n"
        f"Seeds {_listed(found.seeds)}; regime {found.regime_digest[:16]}; "
        f"code {found.code_digest[:16]}. Figures are geometric means over seeds; ratios are above "
        f"1 where the arm is better, with 95 % intervals from resampled seeds and sessions.{part}"
    )


def _anchors(found: Findings) -> list[str]:
    lines = [
        (
            METRICS[one.metric].label,
            one.arm,
            figure(one.metric, one.value),
            f"{figure(one.metric, one.wanted)} ± {one.tolerance:.0%}",
            "yes" if one.holds else "**no**",
        )
        for one in found.anchors
    ]
    head = ("the regime's anchor", "best arm", "value", "wanted", "holds")
    return [table(head, lines)] if lines else []


def _ratios(findings: Sequence[Finding]) -> list[str]:
    lines = [
        (
            one.name,
            f"{one.arm} over {one.against}",
            METRICS[one.metric].label,
            interval(one.ratio),
            "" if one.target is None else f"{one.target:g}",
            "" if one.published is None else f"{one.published:g}",
            verdict(one),
        )
        for one in findings
    ]
    head = ("ratio", "arms", "of", "mean [95 %]", "target", "published", "verdict")
    return [table(head, lines)] if lines else []


def _steps(steps: Sequence[Step]) -> list[str]:
    if not steps:
        return []
    metrics = [name for name in _SHOWN if name in steps[0].ratios]
    lines = [
        (one.scenario, f"{one.before} → {one.arm}", *(interval(one.ratios[m]) for m in metrics))
        for one in steps
    ]
    head = ("scenario", "what each part adds", *(METRICS[metric].label for metric in metrics))
    return [table(head, lines)]


def _rows(scenario: str, rows: Sequence[Row]) -> str:
    metrics = list(rows[0].figures)
    head = (
        f"{scenario}: arm",
        *(METRICS[metric].label for metric in metrics),
        *("HBM", "pool", "peer", "computed", "ideal hit", "refused"),
    )
    lines = [
        (
            row.arm,
            *(figure(metric, row.figures[metric]) for metric in metrics),
            *(
                f"{share:.1%}"
                for share in (
                    row.prompt_tokens.hbm,
                    row.prompt_tokens.pool,
                    row.prompt_tokens.peer,
                    row.prompt_tokens.computed,
                    row.prompt_tokens.ideal,
                )
            ),
            f"{row.refused} of {row.requests}",
        )
        for row in rows
    ]
    return table(head, lines)


def _times(scenario: str, rows: Sequence[Row]) -> str:
    head = (
        f"{scenario}: where the time goes",
        *(f"mean: {name}" for name in PARTS),
        *(f"slowest 1 %: {name}" for name in PARTS[:-1]),
    )
    lines = [
        (
            row.arm,
            *(f"{row.parts.get(name, 0.0):.2f} s" for name in PARTS),
            *(f"{row.slow_parts.get(name, 0.0):.2f} s" for name in PARTS[:-1]),
        )
        for row in rows
    ]
    return table(head, lines)


def _listed(seeds: Sequence[int]) -> str:
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds))


_SHOWN = ("ttft_p50", "ttft_p99", "e2e_p90", "throughput", "steady_throughput")
