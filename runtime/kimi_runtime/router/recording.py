"""Sessions as they were served, in the simulator's own format: a session a line. Pure.

What `kimistack sim run --format kimistack` reads (lengths, pauses, what was kept, who left) makes a
workload; other fields say what came of it. No text, token id, block key, tenant or client's word is
in it: names, tenants, prefixes and blocks are hashed with a salt that only this file's writer had,
so that equal things of one file can be told, and nothing can be looked up.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_SESSIONS = 20_000
MAX_TURNS = 2_000
"""A session of more is cut in two."""
TEXTS_PER_SESSION = 1 << 16
FIRST_TEXT = 1 << 50
"""Prefixes are below, so that no session's own words are another's prefix."""


@dataclass(frozen=True, slots=True)
class Served:
    """One turn. Times are seconds on the router's clock; tokens as the session counts them.

    `prefix` is the front that ends with its first message, and the key that names it.
    """

    session: bytes
    tenant: str
    prompt_tokens: int
    kept_tokens: int
    """Of the prompt, those that the session had before."""
    history_tokens: int
    """That it had before, whether or not it kept them."""
    output_tokens: int
    asked_s: float
    ended_s: float
    outcome: str
    """`finished`, `left` (the client did) or `failed`."""
    waited_s: float = 0.0
    first_token_s: float | None = None
    phase: str = ""
    tools: Sequence[str] = ()
    background: bool = False
    parent: bytes | None = None
    prefix: tuple[int, bytes] | None = None
    block_tokens: int = 0
    blocks: Sequence[bytes] = ()
    """Keys of all full blocks of prompt and output."""


@dataclass(slots=True)
class _Open:
    number: int
    first: Served
    turns: list[dict[str, Any]] = field(default_factory=list)
    ended_s: float = 0.0
    blocks: int = 0
    context: list[tuple[int, int]] = field(default_factory=list)
    """What the session says so far, as (text, tokens)."""
    contexts: list[list[tuple[int, int]]] = field(default_factory=list)
    """Of each turn's prompt."""
    shrank: bool = False

    @property
    def text(self) -> int:
        """Of turn i's own words the number is `text + 2i`, of its answer one more."""
        return FIRST_TEXT + self.number * TEXTS_PER_SESSION


class Recording:
    """Collects turns; `tell` gets a session's line once it is over, or too long ago or too long."""

    def __init__(
        self,
        tell: Callable[[bytes], None],
        *,
        salt: bytes,
        started_s: float,
        max_sessions: int = MAX_SESSIONS,
        max_turns: int = MAX_TURNS,
    ) -> None:
        self._tell, self._salt, self._started_s = tell, salt, started_s
        self._max_sessions, self._max_turns = max_sessions, max_turns
        self._open: OrderedDict[bytes, _Open] = OrderedDict()
        self._numbers = 0

    def __len__(self) -> int:
        """How many sessions go on."""
        return len(self._open)

    def served(self, turn: Served) -> None:
        """A turn with an answer ended."""
        known = self._open.get(turn.session)
        if known is not None and len(known.turns) >= self._max_turns:
            self.over(turn.session)
            known = None
        if known is None:
            known = self._open[turn.session] = _Open(self._numbers, turn)
            self._numbers += 1
        else:
            before = known.turns[-1]
            before["pause_s"] = round(max(turn.asked_s - known.ended_s, 0.0), 4)
        known.turns.append(self._turn(turn, known))
        known.ended_s = turn.ended_s
        self._open.move_to_end(turn.session)
        if len(self._open) > self._max_sessions:
            self.over(next(iter(self._open)))

    def over(self, session: bytes) -> None:
        """The session will not go on: its line is written."""
        known = self._open.pop(session, None)
        if known is None:
            return
        first = known.first
        known.turns[-1] |= {"pause": "end", "pause_s": 0.0}
        line: dict[str, Any] = {
            "name": self._named(first.session),
            "text": known.text,
            "turns": known.turns,
            "start_s": round(max(first.asked_s - self._started_s, 0.0), 4),
            "tenant": self._named(first.tenant.encode()),
            "background": first.background,
            "block_tokens": first.block_tokens,
        }
        if first.parent is not None:
            line["parent"] = self._named(first.parent)
        prefix_tokens = _prefix_tokens(first)
        if first.prefix is not None and prefix_tokens:
            name = self._prefix_text(first.prefix[1])
            line |= {"prefix": name, "prefix_tokens": prefix_tokens}
        if known.shrank:  # what was kept of a history cannot be told by lengths alone
            line["contexts"] = known.contexts
        self._tell(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def close(self, *, pause: Callable[[], None] = lambda: None) -> None:
        """Nothing more comes: all lines are told, with a `pause` after each."""
        for session in list(self._open):
            self.over(session)
            pause()

    def _turn(self, turn: Served, known: _Open) -> dict[str, Any]:
        starts, number = not known.turns, len(known.turns)
        kept = _prefix_tokens(turn) if starts else turn.kept_tokens
        if starts and kept and turn.prefix is not None:
            known.context = [(self._prefix_text(turn.prefix[1]), kept)]
        prompt = [
            *_front(known.context, kept),
            (known.text + 2 * number, turn.prompt_tokens - kept),
        ]
        known.contexts.append(prompt)
        known.context = [*prompt, (known.text + 2 * number + 1, max(turn.output_tokens, 1))]
        told: dict[str, Any] = {
            "append_tokens": max(turn.prompt_tokens - kept, 1),
            "output_tokens": max(turn.output_tokens, 1),
            "pause": "tool" if turn.tools else "human",
            "calls": max(len(turn.tools), 1),
        }
        if not starts and turn.kept_tokens < turn.history_tokens:
            told["keep_tokens"], known.shrank = turn.kept_tokens, True
        if turn.outcome == "left":
            told["aborted_after"] = max(turn.output_tokens, 1)
        size = max(turn.block_tokens, 1)
        same = min(known.blocks, kept // size) if not starts else 0
        known.blocks = len(turn.blocks)
        return told | {
            "prompt_tokens": turn.prompt_tokens,
            "outcome": turn.outcome,
            "phase": turn.phase,
            "tools": list(turn.tools),
            "asked_s": round(turn.asked_s - self._started_s, 4),
            "waited_s": round(turn.waited_s, 4),
            "first_token_s": _rounded(turn.first_token_s),
            "total_s": round(turn.ended_s - turn.asked_s, 4),
            "same_blocks": same,
            "new_blocks": [self._named(key) for key in turn.blocks[same:]],
        }

    def _prefix_text(self, key: bytes) -> int:
        return int(self._named(key)[:12], 16)

    def _named(self, what: bytes) -> str:
        return hashlib.blake2b(what, key=self._salt, digest_size=8).hexdigest()


def _front(context: Sequence[tuple[int, int]], tokens: int) -> list[tuple[int, int]]:
    """The first `tokens` of a context."""
    front: list[tuple[int, int]] = []
    for text, length in context:
        if tokens <= 0:
            break
        front.append((text, min(length, tokens)))
        tokens -= length
    return front


def _prefix_tokens(first: Served) -> int:
    """One token at least is the session's own."""
    return 0 if first.prefix is None else min(first.prefix[0], first.prompt_tokens - 1)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
