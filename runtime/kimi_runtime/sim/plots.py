"""Charts as inline SVG, readable without scripts and in light and dark. Pure.

Colours are Okabe and Ito's, which most colour-blind readers tell apart; text takes the page's.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from kimi_runtime.sim.pictures import PARTS, SOURCES, Picture, Spans
from kimi_runtime.sim.report import FIRST_TURN

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A8A00", "#777777")
PART_COLOURS = dict(
    zip(PARTS, ("#CC79A7", "#009E73", "#E69F00", "#D55E00", "#0072B2"), strict=True)
)
SOURCE_COLOURS = dict(
    zip(SOURCES, ("#0072B2", "#009E73", "#56B4E9", "#D55E00", "#B0B0B0"), strict=True)
)
WIDTH = 960
_PANEL_WIDTH, _PANEL_HEIGHT = 460, 260
_SHARES = (0.5, 0.9, 0.99, 0.999)
_MOST = 3.05
"""Largest -log10(1 - share) that is drawn."""


def curves(pictures: Sequence[Picture]) -> str:
    """TTFT by what was appended: a panel each, a curve for each arm, the tail spread out."""
    names = list(dict.fromkeys(name for one in pictures for name in one.curves))
    times = [x for one in pictures for points in one.curves.values() for x, _ in points if x > 0]
    if not times:
        return ""
    low, high = _decades(max(min(times), 1e-3), max(times))
    rows = -(-len(names) // 2)
    inner = []
    for number, name in enumerate(names):
        x, y = (number % 2) * (_PANEL_WIDTH + 40), (number // 2) * (_PANEL_HEIGHT + 30)
        drawn = _panel(name, [(one.label, one.curves.get(name, [])) for one in pictures], low, high)
        inner.append(f'<g transform="translate({x},{y})">{drawn}</g>')
    return _svg(rows * (_PANEL_HEIGHT + 30), inner, "TTFT by appended tokens")


def timelines(pictures: Sequence[Picture]) -> str:
    """Sessions over the run's time, arm under arm on one scale."""
    over_s = max((one.over_s for one in pictures), default=0.0)
    if not over_s:
        return ""
    inner, y = [], 0.0
    for one in pictures:
        inner.append(f'<text x="0" y="{y + 14:.0f}" class="label">{escape(one.label)}</text>')
        drawn, y = _sessions(one.timelines, y + 22, over_s)
        inner.append(drawn)
        y += 14
    inner.append(_time_axis(y - 8, over_s))
    return _svg(y + 24, inner, "Sessions over time")


def sources(pictures: Sequence[Picture]) -> str:
    """Where prompts' KV came from: what could be had, what was found, and where."""
    bars = [(one.label, one.sources) for one in pictures if one.sources]
    return _bars(bars, SOURCE_COLOURS, "Where prompts' KV came from", most=1.0, form=_percent)


def parts(pictures: Sequence[Picture], *, slowest: bool) -> str:
    """Mean seconds of a request by what they went into; or the slowest 1 % until first tokens."""
    bars = [(one.label, one.slow_parts if slowest else one.mean_parts) for one in pictures]
    title = "Time of the slowest 1 % until the first token" if slowest else "Mean time of a request"
    most = max((sum(values.values()) for _, values in bars), default=0.0)
    return _bars(bars, PART_COLOURS, title, most=most, form=_seconds)


def terms(pictures: Sequence[Picture]) -> str:
    """Mean seconds of the chosen plans' terms."""
    bars = [(one.label, _weighty(one.terms)) for one in pictures if one.terms]
    most = max((sum(values.values()) for _, values in bars), default=0.0)
    colours = term_colours(pictures)
    return _bars(bars, colours, "Terms of the chosen plans", most=most, form=_seconds)


def term_colours(pictures: Sequence[Picture]) -> dict[str, str]:
    """The colour of each term that takes time."""
    names = dict.fromkeys(name for one in pictures for name in _weighty(one.terms))
    return {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}


def legend(colours: Mapping[str, str]) -> str:
    """Names beside their colours, as HTML."""
    items = (
        f'<span class="key"><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in colours.items()
    )
    return f'<p class="legend">{"".join(items)}</p>'


def arm_colours(pictures: Sequence[Picture]) -> dict[str, str]:
    """The colour of each arm's curves."""
    return {one.label: COLOURS[n % len(COLOURS)] for n, one in enumerate(pictures)}


def _panel(
    title: str, lines: Sequence[tuple[str, Sequence[tuple[float, float]]]], low: int, high: int
) -> str:
    left, top, width, height = 48, 24, _PANEL_WIDTH - 60, _PANEL_HEIGHT - 62
    span = high - low

    def place(seconds: float, share: float) -> tuple[float, float]:
        across = (math.log10(max(seconds, 10.0**low)) - low) / span
        up = min(-math.log10(max(1 - share, 1e-9)), _MOST) / _MOST
        return left + across * width, top + (1 - up) * height

    made = [f'<text x="{left}" y="14" class="label">{escape(_titled(title))}</text>']
    for share in (0.0, *_SHARES):
        _, y = place(1.0, share)
        made.append(f'<path d="M{left} {y:.1f}h{width}" class="grid"/>')
        made.append(
            f'<text x="{left - 6}" y="{y + 4:.1f}" class="tick end">{100 * share:.3g} %</text>'
        )
    for decade in range(low, high + 1):
        x, _ = place(10.0**decade, 0.0)
        made.append(f'<path d="M{x:.1f} {top}v{height}" class="grid"/>')
        text = f"{10.0**decade:g} s"
        made.append(f'<text x="{x:.1f}" y="{top + height + 16}" class="tick mid">{text}</text>')
    middle = left + width / 2
    made.append(f'<text x="{middle}" y="{top + height + 32}" class="tick mid">TTFT</text>')
    for number, (_, points) in enumerate(lines):
        if points:
            path = "L".join("{:.1f} {:.1f}".format(*place(*point)) for point in points)
            colour = COLOURS[number % len(COLOURS)]
            made.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
    return "".join(made)


def _sessions(sessions: Sequence[Spans], top: float, over_s: float) -> tuple[str, float]:
    step, scale = 7, WIDTH / over_s

    def path(colour: str, width: int, kind: str) -> str:
        moves = []
        for number, session in enumerate(sessions):
            y = top + step * number
            for start_s, end_s in getattr(session, kind):
                moves.append(f"M{scale * start_s:.1f} {y:.0f}h{scale * (end_s - start_s):.2f}")
        return f'<path d="{"".join(moves)}" stroke="{colour}" stroke-width="{width}" fill="none"/>'

    lives = "".join(
        f"M{scale * one.waits[0][0]:.1f} {top + step * n:.0f}H{scale * _end(one):.1f}"
        for n, one in enumerate(sessions)
        if one.waits
    )
    drawn = f'<path d="{lives}" class="grid"/>'
    drawn += path("#0072B2", 4, "answers") + path("#D55E00", 4, "waits")
    return drawn, top + step * len(sessions)


def _end(session: Spans) -> float:
    return max(end_s for _, end_s in (*session.waits, *session.answers))


def _time_axis(y: float, over_s: float) -> str:
    step = next(
        (s for s in (1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600) if over_s / s <= 10), 7200
    )
    ticks = range(0, int(over_s) + 1, step)
    marks = (
        f'<text x="{WIDTH * tick / over_s:.1f}" y="{y + 18:.0f}" '
        f'class="tick {"mid" if tick else ""}">{tick} s</text>'
        for tick in ticks
    )
    return f'<path d="M0 {y:.0f}H{WIDTH}" class="axis"/>{"".join(marks)}'


def _bars(
    bars: Sequence[tuple[str, Mapping[str, float]]],
    colours: Mapping[str, str],
    title: str,
    *,
    most: float,
    form: Callable[[float], str],
) -> str:
    if not bars or most <= 0:
        return ""
    left, step, width = 220, 30, WIDTH - 220 - 90
    inner = []
    for number, (label, values) in enumerate(bars):
        y, x = 8 + number * step, float(left)
        inner.append(f'<text x="{left - 8}" y="{y + 15}" class="label end">{escape(label)}</text>')
        for name, value in values.items():
            wide = width * max(value, 0.0) / most
            tip = f"{escape(name)}: {form(value)}"
            inner.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="22" '
                f'fill="{colours[name]}"><title>{tip}</title></rect>'
            )
            if wide > 46:
                text = form(value)
                inner.append(
                    f'<text x="{x + wide / 2:.1f}" y="{y + 15}" class="inside">{text}</text>'
                )
            x += wide
        total = sum(values.values())
        if form is _seconds:
            inner.append(f'<text x="{x + 6:.1f}" y="{y + 15}" class="tick">{form(total)}</text>')
    return _svg(16 + step * len(bars), inner, title)


def _weighty(values: Mapping[str, float]) -> dict[str, float]:
    """Terms that take time at all; what a term gives back is not drawn."""
    total = sum(value for value in values.values() if value > 0)
    return {name: value for name, value in values.items() if value > 0.002 * total}


def _svg(height: float, inner: Sequence[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="{escape(title)}">{"".join(inner)}</svg>'
    )


def _titled(stratum: str) -> str:
    return stratum if stratum == FIRST_TURN else f"{stratum} tokens appended"


def _decades(low: float, high: float) -> tuple[int, int]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return first, max(last, first + 1)


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _seconds(value: float) -> str:
    return f"{value:.2f} s"
