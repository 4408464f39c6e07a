"""Recorded workloads as simulated ones. Pure: lines in, sessions out.

Formats: `mooncake` (kvcache-ai/Mooncake: timestamp in ms, input_length, output_length and hash_ids
of 512-token blocks), `tracelab` (uw-syfi/TraceLab's replay samples: CSV rows of one round each),
`abench` (agentic-bench: a session a line, with rounds of input_delta, tokens and pre_gap_ms) and
`kimistack` (our own recording: a `Session` a line, as `recorded` writes it).

A line that does not fit names file, line and field.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, assert_never

from pydantic import TypeAdapter, ValidationError

from kimi_runtime.errors import ConfigError
from kimi_runtime.sim.sessions import Pause, Session, Turn, Workload

Format = Literal["mooncake", "tracelab", "abench", "kimistack"]
MOONCAKE_BLOCK_TOKENS = 512
MOST_TOKENS = 1 << 24
_TEXTS_PER_SESSION = 1 << 16

_SESSION: TypeAdapter[Session] = TypeAdapter(Session)


class TraceError(ConfigError):
    """A line of a trace is not what its format says."""


def read_trace(
    lines: Iterable[str],
    kind: Format,
    *,
    name: str,
    limit: int | None = None,
    gap_cap_s: float | None = None,
) -> Workload:
    """The first `limit` sessions (None: all) of a trace; `name` is its file, for messages.

    `gap_cap_s` shortens longer pauses of tools and people. TraceError for a malformed line.
    """
    sessions: Iterable[Session]
    match kind:
        case "mooncake":
            sessions = _mooncake(lines, name)
        case "tracelab":
            sessions = _tracelab(lines, name)
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


class _Row:
    """One line's fields; what is wrong with them is said with file, line and field."""

    def __init__(self, name: str, number: int, fields: object) -> None:
        self._name, self._number = name, number
        if not isinstance(fields, dict):
            raise TraceError(f"{name}: line {number}: not an object with fields")
        self._fields: dict[str, Any] = fields

    def number(self, field: str, *, least: float = 0.0, most: float = float(MOST_TOKENS)) -> float:
        """A finite number within bounds."""
        value = self._get(field)
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise self._wrong(field, value, "a number") from None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(field, value, "a number")
        if not least <= value <= most:
            raise self._wrong(field, value, f"between {least:g} and {most:g}")
        return float(value)

    def whole(self, field: str, *, least: int = 0) -> int:
        """A whole number of tokens."""
        value = self.number(field, least=least)
        if value != int(value):
            raise self._wrong(field, value, "a whole number")
        return int(value)

    def text(self, field: str) -> str:
        """A string that says something."""
        value = self._get(field)
        if isinstance(value, int):
            value = str(value)
        if not isinstance(value, str) or not value:
            raise self._wrong(field, value, "a name")
        return value

    def wholes(self, field: str) -> list[int]:
        """A list of whole numbers."""
        value = self._get(field)
        if not isinstance(value, list):
            raise self._wrong(field, value, "a list")
        for index, one in enumerate(value):
            if isinstance(one, bool) or not isinstance(one, int) or one < 0:
                raise self._wrong(f"{field}[{index}]", one, "a whole number of at least 0")
        return value

    def rows(self, field: str) -> list["_Row"]:
        """A list of objects."""
        value = self._get(field)
        if not isinstance(value, list):
            raise self._wrong(field, value, "a list")
        return [
            _Row(f"{self._name}: {field}[{n}]", self._number, one) for n, one in enumerate(value)
        ]

    def wrong(self, field: str, why: str) -> TraceError:
        """An error about a field."""
        return TraceError(f"{self._name}: line {self._number}: {field} {why}")

    def _get(self, field: str) -> Any:
        if field not in self._fields:
            raise self.wrong(field, "is missing")
        return self._fields[field]

    def _wrong(self, field: str, value: object, wanted: str) -> TraceError:
        return self.wrong(field, f"is {str(value)[:40]!r}, not {wanted}")


def _json_rows(lines: Iterable[str], name: str) -> Iterator[_Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except ValueError as exc:
            raise TraceError(f"{name}: line {number}: not JSON: {exc}") from exc
        yield _Row(name, number, fields)


def _mooncake(lines: Iterable[str], name: str) -> Iterator[Session]:
    """Every line is a session of one turn: the trace has none. Equal hash ids are equal text."""
    last_s = 0.0
    for number, row in enumerate(_json_rows(lines, name)):
        start_s = row.number("timestamp", most=1e12) / 1e3
        if start_s < last_s:
            raise row.wrong("timestamp", f"is before that of the line before ({last_s:g} s)")
        last_s = start_s
        tokens, blocks = row.whole("input_length", least=1), row.wholes("hash_ids")
        needed = -(-tokens // MOONCAKE_BLOCK_TOKENS)
        if len(blocks) != needed:
            raise row.wrong(
                "hash_ids", f"has {len(blocks)} blocks, but {tokens} tokens are {needed}"
            )
        left = [MOONCAKE_BLOCK_TOKENS] * (needed - 1)
        sizes = [*left, tokens - MOONCAKE_BLOCK_TOKENS * (needed - 1)]
        yield Session(
            name=f"m{number}",
            text=(1 << 50) + number * _TEXTS_PER_SESSION,
            turns=(Turn(tokens, row.whole("output_length", least=1), Pause.END),),
            start_s=start_s,
            contexts=(tuple(zip(blocks, sizes, strict=True)),),
        )


def _tracelab(lines: Iterable[str], name: str) -> Iterator[Session]:
    """Rounds in the order of the file; a session's rounds need not be together."""
    reader = csv.DictReader(iter(lines))
    turns: dict[str, list[Turn]] = {}
    starts: dict[str, float] = {}
    for row_fields in reader:
        row = _Row(name, reader.line_num, row_fields)
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
        yield _session(session, number, rounds, starts[session])


def _abench(lines: Iterable[str], name: str) -> Iterator[Session]:
    """A session a line; `pre_gap_ms` is the pause before a round."""
    for number, row in enumerate(_json_rows(lines, name)):
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
        yield _session(row.text("session_id"), number, turns, gaps[0])


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


def _session(name: str, number: int, turns: Sequence[Turn], start_s: float) -> Session:
    ended = replace(turns[-1], pause=Pause.END, pause_s=0.0)
    text = (1 << 50) + number * _TEXTS_PER_SESSION
    return Session(name=name, text=text, turns=(*turns[:-1], ended), start_s=start_s)


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
