"""Moving a session with its KV from one worker to another while its tool runs. Pure.

`worth_moving` says whether; `Move` is the order of steps, PREPARE, COPY, VERIFY, compare-and-swap
of the owner, RELEASE of the source. Until the swap the owner is who it was, whatever fails; after
it the source has nothing left that anybody would ask for. `Owners` holds who has which session.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from kimi_runtime.router.estimate.gaps import Curve

LEAST_SURE = 0.8
"""The probability that the gap outlasts the copy, at least."""
LINK_SHARE = 0.25
"""Of a link, what copies may take; a copy is that much slower than a fetch in a hurry."""
MAX_SESSIONS = 200_000


@dataclass(frozen=True, slots=True)
class Offer:
    """What moving one session would bring."""

    turns_left: float
    saved_s_per_turn: float
    """J here minus J there, as the planner prices the session's next turn."""
    copy_s: float
    """Alone on its links."""
    link_delay_s: float
    """What transfers of others lose."""
    risk_s: float
    """One standard deviation of `saved_s_per_turn` times the turns left."""
    load_here_s: float
    load_there_s: float
    """Seconds of work queued on either side."""
    session_load_s: float
    """What of it goes with the session."""


def worth_moving(offer: Offer, gap: Curve, *, since_s: float, draining: bool = False) -> bool:
    """Whether to move now. `draining`: the source has to go, so only time matters.

    The copy must be paid back by the turns to come, its gap must outlast it, and the move must not
    make the target the busier of the two: the session would only be moved back.
    """
    copy_s = offer.copy_s / LINK_SHARE
    if not math.isfinite(copy_s) or gap.survival(since_s + copy_s, since_s=since_s) < LEAST_SURE:
        return False
    if draining:
        return True
    if offer.load_there_s + offer.session_load_s > offer.load_here_s - offer.session_load_s:
        return False
    gain_s = offer.turns_left * offer.saved_s_per_turn
    return gain_s > copy_s + offer.link_delay_s + offer.risk_s


class Step(StrEnum):
    """Where a move stands."""

    PREPARE = "prepare"
    COPY = "copy"
    VERIFY = "verify"
    SWAP = "swap"
    RELEASE = "release"
    DONE = "done"
    ABORTED = "aborted"


_NEXT = {
    Step.PREPARE: Step.COPY,
    Step.COPY: Step.VERIFY,
    Step.VERIFY: Step.SWAP,
    Step.RELEASE: Step.DONE,
}


@dataclass(frozen=True, slots=True)
class Owner:
    """Who has a session. Every change makes a new epoch, so an old one can be told from it."""

    worker: str
    epoch: int


class Owners:
    """Who has which session; the longest untouched are forgotten beyond `max_sessions`."""

    def __init__(self, *, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._owners: OrderedDict[bytes, Owner] = OrderedDict()
        self._epoch = 0

    def of(self, session: bytes) -> Owner | None:
        """Who has it; None if nobody does, or it was forgotten."""
        return self._owners.get(session)

    def claim(self, session: bytes, worker: str) -> Owner:
        """A turn was served by `worker`: it has the session now, and moves of it are void."""
        known = self._owners.get(session)
        if known is None or known.worker != worker:
            self._epoch += 1
            known = Owner(worker, self._epoch)
        self._owners[session] = known
        self._owners.move_to_end(session)
        if len(self._owners) > self._max_sessions:
            self._owners.popitem(last=False)
        return known

    def swap(self, session: bytes, expected: Owner, worker: str) -> bool:
        """Make `worker` the owner if the owner is still `expected`."""
        if self._owners.get(session) != expected:
            return False
        self.claim(session, worker)
        return True

    def lose(self, worker: str) -> None:
        """The worker is gone, with all it had."""
        for session in [s for s, owner in self._owners.items() if owner.worker == worker]:
            del self._owners[session]


class Move:
    """One session's move. Whoever carries it out reports each step's end; `step` says what is next.

    Aborted before the swap, the target's copy is to be dropped (`drop_copy`) and the owner is
    unchanged. After the swap only `RELEASE` remains; if it fails the source's own eviction ends it.
    """

    def __init__(
        self, session: bytes, source: Owner, target: str, *, now_s: float, deadline_s: float
    ) -> None:
        self.session, self.source, self.target = session, source, target
        self.deadline_s = now_s + deadline_s
        self.step = Step.PREPARE
        self.why = ""

    @property
    def over(self) -> bool:
        """Whether nothing more is to be done."""
        return self.step in (Step.DONE, Step.ABORTED)

    @property
    def drop_copy(self) -> bool:
        """Whether what was copied is of no use."""
        return self.step is Step.ABORTED

    def finished(self, step: Step, *, now_s: float) -> None:
        """A step other than the swap is done. A late or repeated report changes nothing."""
        if step is not self.step or step not in _NEXT:
            return
        if step is not Step.RELEASE and now_s > self.deadline_s:
            self.abort("it took too long")
            return
        self.step = _NEXT[step]

    def swap(self, owners: Owners, *, now_s: float) -> bool:
        """Hand the session over, if nobody else served it since; False aborts."""
        if self.step is not Step.SWAP:
            return False
        if now_s > self.deadline_s:
            self.abort("it took too long")
            return False
        if not owners.swap(self.session, self.source, self.target):
            self.abort("the session was served meanwhile")
            return False
        self.step = Step.RELEASE
        return True

    def asked(self, *, there_s: float, here_s: float, now_s: float) -> bool:
        """A turn arrived during the move: True if it should wait for it.

        `there_s` is until its first token if the move goes on, `here_s` at the owner now. If it
        doesn't wait, the owner serves it and the move ends: the copy would be behind.
        """
        if self.step in (Step.RELEASE, Step.DONE):
            return True
        if self.over:
            return False
        if there_s < here_s and now_s <= self.deadline_s:
            return True
        self.abort("a turn arrived that its owner serves sooner")
        return False

    def tick(self, now_s: float) -> None:
        """Time passes: a move that is late ends, unless the session has been handed over."""
        if not self.over and self.step is not Step.RELEASE and now_s > self.deadline_s:
            self.abort("it took too long")

    def abort(self, why: str) -> None:
        """Give up. After the swap there is nothing to give up."""
        if not self.over and self.step is not Step.RELEASE:
            self.step, self.why = Step.ABORTED, why


def may_start(moves: Iterable[Move], source: str, target: str) -> bool:
    """One move out of a worker and one into it at a time: copies must not become the load."""
    return all(
        move.over or (move.source.worker != source and move.target != target) for move in moves
    )
