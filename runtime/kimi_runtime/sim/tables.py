"""Figures as text, and tables of them as Markdown. Pure."""

from collections.abc import Iterable, Sequence

from kimi_runtime.sim.stats import METRICS, Ratio


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def figure(metric: str, value: float) -> str:
    """With its unit, to three digits or so."""
    unit = METRICS[metric].unit
    digits = 0 if value >= 1000 else 1 if value >= 100 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}{' ' if unit else ''}{unit}"


def interval(one: Ratio) -> str:
    """`1.23 [1.10, 1.35]`, to the digits that matter."""
    digits = 3 if one.mean < 3 else 2
    return f"{one.mean:.{digits}f} [{one.low:.{digits}f}, {one.high:.{digits}f}]"
