"""What a block in memory is worth: how likely it is wanted soon, times what losing it costs. Pure.

`worth = P(wanted within the horizon) × seconds to get one of its bytes again`. P is one function,
`ReuseProbability`, which whoever knows the workload supplies; `tool_gap_reuse` is used where nobody
does. It sees how often and how lately a block was used, and the sessions it belongs to: where a
session stands (a tool runs and is expected back in so many seconds, or it is over) is told by
*hints*. A block that its sessions have given up is *forsaken*: it goes first, unless used again.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from kimi_connect.wire import HintKind

HORIZON_S = 120.0
"""What "soon" is: about as long as a block stays in a memory under pressure."""

MAX_SESSIONS = 65_536
MAX_MEMBERS = 4_000_000
"""Keys of all sessions together; the sessions not heard of for longest are forgotten first."""

PRIORITY_WEIGHTS = (0.25, 1.0, 4.0)
"""By `wire.Priority`: it scales a block's worth, so that a dead block of a high priority goes."""

_FOREVER_S = 1e7


class SessionView(NamedTuple):
    """A session of a block: seconds since its last hint, and seconds its pause was said to take."""

    since_s: float
    expected_s: float | None
    paused: bool


class ReuseView(NamedTuple):
    """What is known of a block's use. `sessions` are those that go on and include it."""

    idle_s: float
    uses: int
    sessions: tuple[SessionView, ...] = ()


ReuseProbability = Callable[[ReuseView], float]
"""The chance that a block is wanted within `HORIZON_S`; the router's one input to retention."""

_PRIOR_USES, _PRIOR_S = 0.2, 60.0
_TOOL_GAP_S, _RETURNS = 20.0, 0.9


def tool_gap_reuse(view: ReuseView) -> float:
    """The default. Sessions come back after tool gaps; the rest is recency and frequency.

    A pause is log-logistic with shape 2 around its expected length, and one session in ten never
    comes back, so that waiting far beyond the expectation makes a return unlikely. Uses without a
    session are Poisson with a gamma prior: idle for t after n uses, the chance of none within h is
    ((b + t) / (b + t + h)) ** (a + n - 1).
    """
    idle_s = min(max(view.idle_s, 0.0), _FOREVER_S)
    past_s = _PRIOR_S + idle_s
    uses = _PRIOR_USES + min(view.uses, 16) - 1
    unwanted = math.exp(uses * math.log(past_s / (past_s + HORIZON_S)))
    for session in view.sessions:
        unwanted *= 1.0 - _returns(session)
    return 1.0 - unwanted


def _returns(session: SessionView) -> float:
    """The chance that a session comes back within the horizon, given that it has not yet."""
    median_s = max(1.0, _TOOL_GAP_S if session.expected_s is None else session.expected_s)
    since_s = min(max(session.since_s, 0.0), _FOREVER_S)
    away = 1.0 / (1.0 + (since_s / median_s) ** 2)
    later = 1.0 / (1.0 + ((since_s + HORIZON_S) / median_s) ** 2)
    waiting = _RETURNS * away
    return waiting / (waiting + 1.0 - _RETURNS) * (1.0 - later / away)


class Standing(IntEnum):
    """Which queue of blocks one waits in; within a queue the coldest comes first."""

    FORSAKEN = 0
    ONCE = 1
    AGAIN = 2
    IN_SESSION = 3


@dataclass(slots=True, eq=False)
class Session:
    """What hints told of one session of a tenant."""

    heard_s: float
    expected_s: float | None = None
    paused: bool = False
    keys: dict[bytes, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hint:
    """What somebody knows of a session.

    `keys` are the session's blocks in order: all it has now (ACTIVE, PAUSED; none: those told
    before), those it gives up (COMPACTED), or those it shares with `child` (FORKED; none: all).
    `expected_s` is how long a pause is likely to take.
    """

    tenant: str
    session: bytes
    kind: HintKind
    keys: Sequence[bytes] = ()
    expected_s: float | None = None
    child: bytes = b""


class Retention:
    """The sessions, and the worth of blocks by them.

    `seconds_per_byte` says what it takes to have a byte of a lost block again: a load from the next
    tier if it has the block, else to compute it.
    """

    def __init__(
        self,
        *,
        reuse: ReuseProbability = tool_gap_reuse,
        seconds_per_byte: Callable[[bytes], float] = lambda key: 1e-9,
        max_sessions: int = MAX_SESSIONS,
        max_members: int = MAX_MEMBERS,
    ) -> None:
        self.reuse, self.seconds_per_byte = reuse, seconds_per_byte
        self.hints = dict.fromkeys(HintKind, 0)
        self._max_sessions, self._max_members = max_sessions, max_members
        self._sessions: OrderedDict[tuple[str, bytes], Session] = OrderedDict()
        self._of_key: dict[bytes, tuple[Session, ...]] = {}
        self._forsaken: set[bytes] = set()
        self._members = 0

    @property
    def sessions(self) -> int:
        """Sessions known of."""
        return len(self._sessions)

    def standing(self, key: bytes, uses: int) -> Standing:
        """The queue a block belongs into now."""
        if key in self._of_key:
            return Standing.IN_SESSION
        if key in self._forsaken:
            return Standing.FORSAKEN
        return Standing.AGAIN if uses > 1 else Standing.ONCE

    def worth(self, key: bytes, *, uses: int, used_s: float, priority: int, now_s: float) -> float:
        """Expected seconds lost per byte, if the block is lost now; 0 for one that is forsaken."""
        wanted = self.wanted(key, uses=uses, used_s=used_s, priority=priority, now_s=now_s)
        return wanted * self.seconds_per_byte(key) if wanted else 0.0

    def wanted(self, key: bytes, *, uses: int, used_s: float, priority: int, now_s: float) -> float:
        """The chance that a block is wanted within the horizon, weighted by its priority."""
        if key in self._forsaken:
            return 0.0
        sessions = tuple(
            SessionView(now_s - session.heard_s, session.expected_s, session.paused)
            for session in self._of_key.get(key, ())
        )
        chance = self.reuse(ReuseView(now_s - used_s, uses, sessions))
        return PRIORITY_WEIGHTS[priority] * chance

    def used(self, key: bytes) -> None:
        """A block was used: whatever gave it up, somebody wants it."""
        self._forsaken.discard(key)

    def gone(self, key: bytes) -> None:
        """A block is no longer in memory. Its sessions still want it when it comes back."""
        self._forsaken.discard(key)

    def hint(self, hint: Hint, now_s: float) -> list[bytes]:
        """Take a hint in; keys whose standing may have changed, in the order of the session."""
        self.hints[hint.kind] += 1
        name = (hint.tenant, hint.session)
        match hint.kind:
            case HintKind.ENDED:
                session = self._sessions.pop(name, None)
                return [] if session is None else self._leave(session, session.keys)
            case HintKind.COMPACTED:
                session = self._known(name, now_s)
                given_up = [key for key in dict.fromkeys(hint.keys) if key in session.keys]
                return self._leave(session, given_up)
            case HintKind.FORKED:
                child = self._known((hint.tenant, hint.child), now_s)
                parent = self._sessions.get(name)
                shared = hint.keys or (() if parent is None else parent.keys)
                return self._join(child, shared)
            case HintKind.ACTIVE | HintKind.PAUSED:
                session = self._known(name, now_s)
                session.paused = hint.kind is HintKind.PAUSED
                session.expected_s = hint.expected_s if session.paused else None
                if not hint.keys:
                    return list(session.keys)
                left = session.keys.keys() - set(hint.keys)
                return self._leave(session, left) + self._join(session, hint.keys)

    def _known(self, name: tuple[str, bytes], now_s: float) -> Session:
        session = self._sessions.pop(name, None) or Session(now_s)
        session.heard_s = now_s
        self._sessions[name] = session
        if len(self._sessions) > self._max_sessions:
            self._forget_oldest()
        return session

    def _join(self, session: Session, keys: Iterable[bytes]) -> list[bytes]:
        keys = list(keys)
        for key in keys:
            if key not in session.keys:
                session.keys[key] = None
                self._of_key[key] = (*self._of_key.get(key, ()), session)
                self._forsaken.discard(key)
                self._members += 1
        while self._members > self._max_members and len(self._sessions) > 1:
            self._forget_oldest()
        return keys

    def _leave(
        self, session: Session, keys: Iterable[bytes], *, forsake: bool = True
    ) -> list[bytes]:
        keys = list(keys)
        for key in keys:
            del session.keys[key]
            self._members -= 1
            others = tuple(one for one in self._of_key[key] if one is not session)
            if others:
                self._of_key[key] = others
                continue
            del self._of_key[key]
            if forsake:
                self._forsaken.add(key)
        return keys

    def _forget_oldest(self) -> None:
        """Silence is no end: its blocks are as good as those of no session."""
        _, session = self._sessions.popitem(last=False)
        self._leave(session, list(session.keys), forsake=False)

    def check_integrity(self) -> None:
        """AssertionError unless sessions and their keys agree."""
        members = 0
        for session in self._sessions.values():
            members += len(session.keys)
            for key in session.keys:
                assert session in self._of_key[key], "a session's key does not know it"
        assert members == self._members == sum(len(of) for of in self._of_key.values())
        assert not self._forsaken & self._of_key.keys(), "wanted and forsaken"
        assert math.isfinite(members)
