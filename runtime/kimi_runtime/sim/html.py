"""One self-contained page: tables and charts, no script, nothing fetched. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from kimi_runtime.sim import plots
from kimi_runtime.sim.pictures import Picture

_STYLE = """
:root{color-scheme:light dark;--ink:#1d2733;--soft:#5b6875;--rule:#d9dee4;--page:#fff;
--band:#f5f7f9}
@media(prefers-color-scheme:dark){:root{--ink:#e6eaee;--soft:#9aa7b4;--rule:#37424d;--page:#14191f;
--band:#1c232b}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:1080px;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2.2rem;border-top:1px solid var(--rule);
padding-top:1rem}h3{font-size:1rem;margin:1.4rem 0 .4rem}
p{max-width:75ch}.soft{color:var(--soft)}
.wide{overflow-x:auto;margin:1.1rem 0}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--rule)}
th:first-child,td:first-child{text-align:left}thead th{color:var(--soft);font-weight:600}
tbody tr:nth-child(odd){background:var(--band)}
svg{width:100%;height:auto;display:block;margin:.4rem 0}
svg text{font:12px system-ui,sans-serif;fill:var(--ink)}svg .tick{fill:var(--soft);font-size:11px}
svg .label{font-size:13px;font-weight:600}svg .inside{fill:#fff;text-anchor:middle;font-size:11px}
svg .mid{text-anchor:middle}svg .end{text-anchor:end}
svg .grid{stroke:var(--rule);fill:none}svg .axis{stroke:var(--soft);fill:none}
.legend{display:flex;flex-wrap:wrap;gap:.3rem 1.1rem;font-size:13px;max-width:none}
.key i{display:inline-block;width:.85em;height:.85em;border-radius:2px;margin-right:.4em}
""".strip()


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, paragraphs or tables in Markdown, and the arms to draw."""

    title: str
    text: str = ""
    pictures: Sequence[Picture] = field(default=())


def page(title: str, sections: Sequence[Section]) -> str:
    """The whole page."""
    body = "".join(_section(one) for one in sections)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def of_markdown(text: str) -> str:
    """Paragraphs and tables as HTML: what the reports of this package are written in."""
    blocks = [block for block in text.strip().split("\n\n") if block.strip()]
    return "".join(
        _table(block) if block.startswith("|") else _paragraph(block) for block in blocks
    )


def _section(one: Section) -> str:
    made = [f"<h2>{escape(one.title)}</h2>" if one.title else "", of_markdown(one.text)]
    shown = one.pictures
    if shown:
        made += _chart(
            "TTFT by what a request appended",
            "Share of requests that had their first token by then; the scale spreads the tail.",
            plots.legend(plots.arm_colours(shown)) + plots.curves(shown),
        )
        made += _chart(
            "Where prompts' KV came from",
            "Computed again: another cache would have had it. New: nobody could have.",
            plots.legend(plots.SOURCE_COLOURS) + plots.sources(shown),
        )
        made += _chart(
            "Where the time goes",
            "First the mean of all requests, then the slowest 1 % until their first tokens.",
            plots.legend(plots.PART_COLOURS)
            + plots.parts(shown, slowest=False)
            + plots.parts(shown, slowest=True),
        )
        made += _terms(shown)
        waits = {"waits for the first token": "#D55E00", "is answered": "#0072B2"}
        made += _chart(
            "Sessions over the run",
            "The first sessions of the first seed, a line each; between answers tools run.",
            plots.legend(waits) + plots.timelines(shown),
        )
    return "".join(made)


def _terms(shown: Sequence[Picture]) -> list[str]:
    colours = plots.term_colours(shown)
    if not colours:
        return []
    says = "What the planner expected of the plans it chose."
    return _chart("Cost of time per term", says, plots.legend(colours) + plots.terms(shown))


def _chart(title: str, says: str, drawn: str) -> list[str]:
    return [f'<h3>{escape(title)}</h3><p class="soft">{escape(says)}</p>{drawn}']


def _paragraph(block: str) -> str:
    return f"<p>{_inline(' '.join(block.splitlines()))}</p>"


def _table(block: str) -> str:
    rows = [line.strip().strip("|").split("|") for line in block.splitlines()]
    head, lines = rows[0], rows[2:]
    made = "".join(f"<th>{_inline(cell.strip())}</th>" for cell in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{_inline(cell.strip())}</td>' for cell in line)}</tr>"
        for line in lines
    )
    table = f"<table><thead><tr>{made}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{table}</div>'


def _inline(text: str) -> str:
    """Bold and code."""
    made = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", escape(text))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", made)
