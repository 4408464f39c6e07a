"""Lines of recorded workloads, field by field: what does not fit names file, line, field. Pure."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from kimi_runtime.errors import ConfigError
from kimi_runtime.sim.sessions import Pause, Session, Turn

MOST_TOKENS = 1 << 24
TEXTS_PER_SESSION = 1 << 16
_FIRST_TEXT = 1 << 50


class TraceError(ConfigError):
    """A line of a trace is not what its format says."""


class Row:
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

    def texts(self, field: str) -> list[str]:
        """A list of strings."""
        value = self._get(field)
        if not isinstance(value, list):
            raise self._wrong(field, value, "a list")
        for index, one in enumerate(value):
            if not isinstance(one, str) or not one:
                raise self._wrong(f"{field}[{index}]", one, "a name")
        return value

    def rows(self, field: str) -> list["Row"]:
        """A list of objects."""
        value = self._get(field)
        if not isinstance(value, list):
            raise self._wrong(field, value, "a list")
        return [
            Row(f"{self._name}: {field}[{n}]", self._number, one) for n, one in enumerate(value)
        ]

    def wrong(self, field: str, why: str) -> TraceError:
        """An error about a field."""
        return TraceError(f"{self._name}: line {self._number}: {field} {why}")

    def has(self, field: str) -> bool:
        """Whether the field is there, and not null."""
        return self._fields.get(field) is not None

    def time(self, field: str) -> float:
        """An ISO 8601 time as seconds since 1970."""
        value = self._get(field)
        try:
            return datetime.fromisoformat(value).timestamp()
        except (TypeError, ValueError):
            raise self._wrong(field, value, "a time such as 2026-06-08T12:00:00Z") from None

    def _get(self, field: str) -> Any:
        if field not in self._fields:
            raise self.wrong(field, "is missing")
        return self._fields[field]

    def _wrong(self, field: str, value: object, wanted: str) -> TraceError:
        return self.wrong(field, f"is {str(value)[:40]!r}, not {wanted}")


def json_rows(lines: Iterable[str], name: str) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except ValueError as exc:
            raise TraceError(f"{name}: line {number}: not JSON: {exc}") from exc
        yield Row(name, number, fields)


def session_of(name: str, number: int, turns: Sequence[Turn], start_s: float) -> Session:
    ended = replace(turns[-1], pause=Pause.END, pause_s=0.0)
    text = own_text(number)
    return Session(name=name, text=text, turns=(*turns[:-1], ended), start_s=start_s)


def own_text(number: int) -> int:
    """The text of a trace's session of that number: no other's, nor any hash id's."""
    return _FIRST_TEXT + number * TEXTS_PER_SESSION


def blocks_of(
    row: Row, tokens: int, block_tokens: int, *, tail_text: int | None = None
) -> tuple[tuple[int, int], ...]:
    """A prompt named by hash ids, as (text, tokens).

    With `tail_text`, a last block that is not full may have no id: it is that text. TraceError
    where there are more or fewer ids than blocks.
    """
    ids = row.wholes("hash_ids")
    full, left = divmod(tokens, block_tokens)
    needed = full + bool(left)
    if len(ids) != needed and (tail_text is None or len(ids) != full):
        raise row.wrong(
            "hash_ids",
            f"has {len(ids)} blocks, but {tokens} tokens are {needed} of {block_tokens}",
        )
    made = [(one, block_tokens) for one in ids[:full]]
    if left:
        made.append((ids[full] if tail_text is None or len(ids) > full else tail_text, left))
    return tuple(made)
