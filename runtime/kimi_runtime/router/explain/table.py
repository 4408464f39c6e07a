"""Explain records as text for people, and as JSON values for programs. Pure."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from kimi_runtime.router.cost.terms import Terms
from kimi_runtime.router.explain.record import CandidateRecord, Record
from kimi_runtime.router.explain.replay import Replayed

QUANTILES = (0.5, 0.9, 0.99)
SHOWN_CANDIDATES = 16


def explained(record: Record) -> str:
    """One decision: what was asked, what came of it, and every plan's price, cheapest first."""
    at = datetime.fromtimestamp(record.unix_s, UTC).isoformat(timespec="milliseconds")
    asked = record.asked
    lines = [
        f"{record.request}, attempt {record.attempt}, decided by {record.router} "
        f"({record.policy.kind}), written {at}",
        f"asked    {asked.prompt_tokens} prompt tokens, {asked.max_tokens} at most, {asked.urgency}"
        f", {'new session' if asked.starts_session else 'owners ' + ', '.join(asked.owners)}",
        f"outcome  {_outcome(record)}",
        f"workers  {len(record.workers) + record.workers_left_out}; {record.considered} plans, "
        f"{len(record.candidates)} of them priced and written",
        "",
    ]
    return "\n".join(lines) + "\n" + _candidates(record)


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """How well first tokens were predicted: seconds and ratios at quantiles, by mode."""
    modes: dict[str, Any] = {}
    for mode in sorted({record.chosen.mode for record in records}):
        some = [record for record in records if record.chosen.mode == mode]
        pairs = [pair for record in some if (pair := first_tokens(record)) is not None]
        modes[mode] = {
            "decisions": len(some),
            "ended": {end: sum(one.outcome.ended == end for one in some) for end in _ends(some)},
            "predicted": len(pairs),
            "predicted_s": _quantiles(expected for expected, _ in pairs),
            "real_s": _quantiles(real for _, real in pairs),
            "ratio": _quantiles(real / expected for expected, real in pairs if expected > 0),
        }
    return {"decisions": len(records), "modes": modes}


def summary_text(records: Sequence[Record]) -> str:
    """`summary` as a table."""
    rows = [["mode", "decisions", "ended", "", "p50", "p90", "p99"]]
    for mode, told in summary(records)["modes"].items():
        ended = ", ".join(f"{count} {end}" for end, count in told["ended"].items())
        for number, (name, label) in enumerate(
            (("predicted_s", "predicted s"), ("real_s", "real s"), ("ratio", "real / predicted"))
        ):
            head = [mode, str(told["decisions"]), ended] if not number else ["", "", ""]
            rows.append([*head, label, *(_short(value) for value in told[name].values())])
    return _aligned(rows, left=4)


def worst(records: Iterable[Record], count: int) -> list[Record]:
    """Those whose first token came latest after it was predicted to, or after the decision."""

    def late_s(record: Record) -> float:
        expected_s = record.chosen.first_token_s or 0.0
        return (record.outcome.first_token_s or record.outcome.total_s) - expected_s

    return sorted(records, key=late_s, reverse=True)[:count]


def first_tokens(record: Record) -> tuple[float, float] | None:
    """Predicted and real seconds until the first token; None where either is not known."""
    expected_s, real_s = record.chosen.first_token_s, record.outcome.first_token_s
    return None if expected_s is None or real_s is None else (expected_s, real_s)


def replayed_text(replayed: Replayed) -> str:
    """What another policy would have done, as a table."""
    told = replayed.as_json()
    rows = [[name.replace("_", " "), _cell(value)] for name, value in told.items()]
    return _aligned(rows, left=1)


def _outcome(record: Record) -> str:
    outcome = record.outcome
    said = [outcome.ended + (f" ({outcome.why})" if outcome.why else "")]
    pair = first_tokens(record)
    if pair is not None:
        expected_s, real_s = pair
        ratio = f", {real_s / expected_s:.2f} times" if expected_s > 0 else ""
        said.append(f"first token after {real_s:.3f} s, predicted {expected_s:.3f} s{ratio}")
    elif outcome.first_token_s is not None:
        said.append(f"first token after {outcome.first_token_s:.3f} s")
    for name in ("prepared_s", "queued_s", "prefill_s"):
        value = getattr(outcome, name)
        if value is not None:
            said.append(f"{name[:-2]} {value:.3f} s")
    for name in ("hbm_tokens", "pool_tokens", "computed_tokens"):
        value = getattr(outcome, name)
        if value:
            said.append(f"{value} {name[:-7]} tokens")
    return "; ".join([*said, f"{outcome.output_tokens} ids in {outcome.total_s:.3f} s"])


def _candidates(record: Record) -> str:
    shown = record.candidates[:SHOWN_CANDIDATES] or (record.chosen,)
    names = [
        name
        for name in (*Terms._fields, *record.chosen.terms)
        if any(name in one.terms for one in shown)
    ]
    columns = list(dict.fromkeys(names))
    rows = [["", "plan", "mode", "source", "cached", "cost", "first", *columns]]
    rows += [_row(one, record.chosen, columns) for one in shown]
    return _aligned(rows, left=4)


def _row(one: CandidateRecord, chosen: CandidateRecord, terms: Sequence[str]) -> list[str]:
    return [
        "*" if _same(one, chosen) else "",
        " > ".join(one.workers),
        one.mode,
        one.source or "",
        str(one.cached_tokens),
        _short(one.cost_s),
        _short(one.first_token_s),
        *(_short(one.terms.get(name)) for name in terms),
    ]


def _same(one: CandidateRecord, other: CandidateRecord) -> bool:
    return (one.workers, one.source, one.cost_s) == (other.workers, other.source, other.cost_s)


def _ends(records: Iterable[Record]) -> list[str]:
    return sorted({record.outcome.ended for record in records})


def _quantiles(values: Iterable[float]) -> dict[str, float | None]:
    known = sorted(values)
    return {
        f"p{share * 100:.0f}": known[min(int(share * len(known)), len(known) - 1)]
        if known
        else None
        for share in QUANTILES
    }


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _cell(value: object) -> str:
    return _short(value) if isinstance(value, float) else str(value)


def _aligned(rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Columns side by side; the first `left` to the left, figures to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"
