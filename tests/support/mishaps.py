"""What goes wrong in a simulated cluster, and at which step.

A step is a message, a copy or a piece of work in a thread. They are numbered in the order in which
they begin, so that "this fault at step k" names one run.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kimi_runtime.transfer.chaos import Fault


class Kind(StrEnum):
    """What a step is."""

    SOCKET = "socket"
    """A frame between an engine and its daemon. The kernel keeps their order and their bytes."""
    CALL = "call"
    """A daemon's request to another."""
    ANSWER = "answer"
    FEED = "feed"
    """A line of a feed."""
    COPY = "copy"
    """A batch of one-sided reads from another's memory."""
    THREAD = "thread"
    """A copy, a check or disk I/O beside a loop."""
    CLAIM = "claim"
    """The locks of an engine on pages of its stock."""


class Mishap(StrEnum):
    """What can happen to a step."""

    DELAY = "delay"
    DROP = "drop"
    REORDER = "reorder"
    """What comes after it overtakes it."""
    DUPLICATE = "duplicate"
    CORRUPT = "corrupt"
    """A bit is flipped on the way."""
    STALL = "stall"
    """It takes longer than any lease, reservation, call or connection lasts."""
    CUT = "cut"
    """The connection breaks."""
    REHOME = "rehome"
    """The memory is another's."""
    REFUSED = "refused"
    """Somebody else has the lock."""


class Upset(StrEnum):
    """What can happen to a process, as a step begins."""

    KILLED = "killed"
    RESTARTED = "restarted"
    MOVED = "moved"
    """Restarted at another address, of which the others hear later."""
    DOUBLED = "doubled"
    """A second daemon of its name answers every other call to its address."""
    LEAPT = "leapt"
    """Its monotonic clock is 20 s ahead, as when it did not run for so long."""
    SET_BACK = "set back"
    """Its wall clock is an hour behind."""
    SET_AHEAD = "set ahead"
    SHORT = "short"
    """A daemon has use for every page: it takes back each stock that is not claimed."""
    CLEARED = "cleared"
    """It forgets every block in its memory."""


_ON_A_WIRE = tuple(m for m in Mishap if m not in (Mishap.REHOME, Mishap.REFUSED))

DAMAGE = {Mishap.CORRUPT, Mishap.REHOME}
"""What makes bytes wrong. Without it, no block in memory ever fails its tags."""

MEETS: dict[Kind, tuple[Mishap, ...]] = {
    Kind.SOCKET: (Mishap.DELAY, Mishap.STALL, Mishap.CUT),
    Kind.CALL: _ON_A_WIRE,
    Kind.ANSWER: _ON_A_WIRE,
    Kind.FEED: _ON_A_WIRE,
    Kind.COPY: tuple(Mishap(fault) for fault in Fault),
    Kind.THREAD: (Mishap.DELAY, Mishap.STALL),
    Kind.CLAIM: (Mishap.REFUSED,),
}


class Step(NamedTuple):
    """One line of a trace."""

    at_s: float
    kind: Kind
    who: str
    what: str


class Blow(NamedTuple):
    """A mishap of a step, or an upset of the process that is named."""

    what: Mishap | Upset
    whom: str = ""


Plan = Callable[[int, Step], Blow | None]


def none(number: int, step: Step) -> None:
    """Nothing goes wrong."""


def at(number: int, blow: Blow) -> Plan:
    """One blow, at step `number`."""
    return lambda current, step: blow if current == number else None


ONE_IN = {
    Kind.SOCKET: 30,
    Kind.CALL: 8,
    Kind.ANSWER: 8,
    Kind.FEED: 8,
    Kind.COPY: 3,
    Kind.THREAD: 12,
    Kind.CLAIM: 4,
}
"""How many steps of a kind a storm leaves alone for each that it hits: the rarer, the fewer."""


@dataclass(slots=True)
class Storm:
    """Blows drawn from a seed."""

    dice: random.Random
    upsets: tuple[tuple[Upset, str], ...]
    upset_in: int = 150

    def __call__(self, number: int, step: Step) -> Blow | None:
        """What happens at this step."""
        if self.dice.randrange(self.upset_in) == 0:
            return Blow(*self.dice.choice(self.upsets))
        if self.dice.randrange(ONE_IN[step.kind]) == 0:
            return Blow(self.dice.choice(MEETS[step.kind]))
        return None


def flipped(data: bytes, dice: random.Random) -> bytes:
    """With one bit wrong."""
    if not data:
        return data
    wrong = bytearray(data)
    wrong[dice.randrange(len(wrong))] ^= 1 << dice.randrange(8)
    return bytes(wrong)


def every(trace: Iterable[Step]) -> list[tuple[int, Mishap]]:
    """Each step with each mishap that it can meet."""
    return [(n, mishap) for n, step in enumerate(trace) for mishap in MEETS[step.kind]]
