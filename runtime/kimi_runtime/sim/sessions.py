"""What simulated clients do: sessions of turns, as plain data. Pure.

A turn appends some text to the session's context, has an answer made and then pauses: its tools
run, or a person thinks. Texts are numbers; the same number is the same text (`sim.content`).
"""

from dataclasses import dataclass, field
from enum import StrEnum


class Pause(StrEnum):
    """What a session waits for after a turn."""

    TOOL = "tool"
    HUMAN = "human"
    END = "end"


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. Tokens."""

    append_tokens: int
    output_tokens: int
    pause: Pause = Pause.TOOL
    pause_s: float = 0.0
    """From the end of the answer; of parallel tool calls the longest."""
    calls: int = 1
    """Tool calls that the answer makes."""
    keep_tokens: int | None = None
    """The context was compacted before this turn: of it, this front was kept. None: all."""
    aborted_after: int | None = None
    """The client leaves after so many tokens of the answer; None: it stays."""
    children: "tuple[Session, ...]" = ()
    """Subagents that this turn's tool calls start; the session goes on when they have ended."""


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation.

    It begins with the first `prefix_tokens` of the text `prefix` (a system prompt and tools that
    others have too), or with what its parent's context says so far if it is a `child`.
    """

    name: str
    text: int
    """Of its own words: turn i appends text `text + 2i` and its answer is `text + 2i + 1`."""
    turns: tuple[Turn, ...]
    start_s: float = 0.0
    tenant: str = "default"
    prefix: int = 0
    prefix_tokens: int = 0
    background: bool = False
    child: bool = False
    contexts: tuple[tuple[tuple[int, int], ...], ...] = field(default=())
    """For traces: the whole prompt of each turn as (text, tokens); empty: what turns append."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions, and what they were made with."""

    name: str
    sessions: tuple[Session, ...]
    lanes: int | None = None
    """So many sessions run at a time, the next starting when one ends; None: all by `start_s`."""

    @property
    def turns(self) -> int:
        """Requests in all, those of subagents included."""
        return sum(turns_of(session) for session in self.sessions)


def turns_of(session: Session) -> int:
    """Requests of a session and its subagents."""
    inner = sum(turns_of(child) for turn in session.turns for child in turn.children)
    return len(session.turns) + inner
