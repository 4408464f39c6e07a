"""Recorded workloads as simulated ones. Pure: lines in, sessions out.

| format | source | a line is |
| --- | --- | --- |
| `mooncake` | kvcache-ai/Mooncake | a request: time in ms, lengths, hash ids of 512-token blocks |
| `agentic_mooncake` | ai-dynamo/dynamo | the same, of a session, with what it waits for |
| `weka` | SemiAnalysis' and Weka's Claude Code traces | a session with subagents |
| `tracelab` | uw-syfi/TraceLab's replay samples | a round, as CSV |
| `tracelab_rounds` | uw-syfi/TraceLab's release | a round, as JSON |
| `abench` | agentic-bench | a session of rounds |
| `kimistack` | our own recording | a `Session`, as `recorded` writes it |

A line that does not fit names file, line and field.
"""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal, assert_never

from pydantic import TypeAdapter, ValidationError

from kimi_runtime.sim.sessions import Pause, Session, Turn, Workload
from kimi_runtime.sim.trace_agents import agentic_mooncake, tracelab_rounds, weka
from kimi_runtime.sim.trace_rows import Row, TraceError, blocks_of, json_rows, own_text, session_of

Format = Literal[
    "mooncake", "agentic_mooncake", "weka", "tracelab", "tracelab_rounds", "abench", "kimistack"
]
MOONCAKE_BLOCK_TOKENS = 512

_SESSION: TypeAdapter[Session] = TypeAdapter(Session)


def read_trace(
    lines: Iterable[str],
    kind: Format,
    *,
    name: str,
    limit: int | None = None,
    gap_cap_s: float | None = None,
    block_tokens: int = MOONCAKE_BLOCK_TOKENS,
) -> Workload:
    """The first `limit` sessions (None: all) of a trace; `name` is its file, for messages.

    `gap_cap_s` shortens longer pauses of tools and people. `block_tokens` is what one of
    Mooncake's hash ids stands for. TraceError for a malformed line.
    """
    sessions: Iterable[Session]
    match kind:
        case "mooncake":
            sessions = _mooncake(lines, name, block_tokens)
        case "agentic_mooncake":
            sessions = agentic_mooncake(lines, name, block_tokens)
        case "weka":
            sessions = weka(lines, name)
        case "tracelab":
            sessions = _tracelab(lines, name)
        case "tracelab_rounds":
            sessions = tracelab_rounds(lines, name)
        case "abench":
            sessions = _abench(lines, name)
        case "kimistack":
            sessions = _kimistack(lines, name)
        case _:
            assert_never(kind)
    taken: list[Session] = []
    for session in sessions:
        if limit is not None and len(taken) >= limit:
            break
        taken.append(session if gap_cap_s is None else _capped(session, gap_cap_s))
    if not taken:
        raise TraceError(f"{name}: no sessions in it; is it of the format {kind}?")
    return Workload(name, tuple(taken))


def recorded(session: Session) -> str:
    """One line of our own format."""
    return _SESSION.dump_json(session, exclude_defaults=True).decode()


def _mooncake(lines: Iterable[str], name: str, block_tokens: int) -> Iterator[Session]:
    """Every line is a session of one turn: the trace has none. Equal hash ids are equal text."""
    last_s = 0.0
    for number, row in enumerate(json_rows(lines, name)):
        start_s = row.number("timestamp", most=1e12) / 1e3
        if start_s < last_s:
            raise row.wrong("timestamp", f"is before that of the line before ({last_s:g} s)")
        last_s = start_s
        tokens = row.whole("input_length", least=1)
        yield Session(
            name=f"m{number}",
            text=own_text(number),
            turns=(Turn(tokens, row.whole("output_length", least=1), Pause.END),),
            start_s=start_s,
            contexts=(blocks_of(row, tokens, block_tokens),),
        )


def _tracelab(lines: Iterable[str], name: str) -> Iterator[Session]:
    """Rounds in the order of the file; a session's rounds need not be together."""
    reader = csv.DictReader(iter(lines))
    turns: dict[str, list[Turn]] = {}
    starts: dict[str, float] = {}
    for row_fields in reader:
        row = Row(name, reader.line_num, row_fields)
        session = row.text("session_id")
        index, known = row.whole("round_idx"), turns.setdefault(session, [])
        if index != len(known):
            raise row.wrong("round_idx", f"is {index}, but round {len(known)} comes next")
        prefix, tokens = row.whole("prefix_len"), row.whole("input_len", least=1)
        if not known:
            starts[session] = row.number("arrival_time", most=1e12)
            tokens, prefix = tokens + prefix, 0
        output = row.whole("output_len", least=1)
        gap_s = row.number("tool_wait_after_ms", most=1e12) / 1e3
        length = sum(turn.append_tokens + turn.output_tokens for turn in known)
        keep = prefix if known and prefix < length else None
        known.append(Turn(tokens, output, Pause.TOOL, gap_s, keep_tokens=keep))
    for number, (session, rounds) in enumerate(turns.items()):
        yield session_of(session, number, rounds, starts[session])


def _abench(lines: Iterable[str], name: str) -> Iterator[Session]:
    """A session a line; `pre_gap_ms` is the pause before a round."""
    for number, row in enumerate(json_rows(lines, name)):
        rounds = row.rows("rounds")
        if not rounds:
            raise row.wrong("rounds", "is empty")
        gaps = [one.number("pre_gap_ms", most=1e12) / 1e3 for one in rounds]
        turns = [
            Turn(
                one.whole("input_delta", least=1),
                one.whole("output_tokens", least=1),
                Pause.TOOL,
                gap_s,
            )
            for one, gap_s in zip(rounds, [*gaps[1:], 0.0], strict=True)
        ]
        yield session_of(row.text("session_id"), number, turns, gaps[0])


def _kimistack(lines: Iterable[str], name: str) -> Iterator[Session]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _SESSION.validate_json(line)
        except ValidationError as exc:
            first = exc.errors(include_url=False, include_context=False)[0]
            where = ".".join(map(str, first["loc"])) or "the line"
            raise TraceError(f"{name}: line {number}: {where}: {first['msg']}") from exc


def _capped(session: Session, gap_cap_s: float) -> Session:
    turns = tuple(
        replace(
            turn,
            pause_s=min(turn.pause_s, gap_cap_s),
            children=tuple(_capped(child, gap_cap_s) for child in turn.children),
        )
        for turn in session.turns
    )
    return replace(session, turns=turns)
