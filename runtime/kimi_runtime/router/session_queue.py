"""Which sessions may use the KV space: admission of whole sessions, not of single requests. Pure.

A session takes space from its first turn to its end. If more sessions run than there is space for,
each turn evicts what the next one needs (ThunderAgent, arXiv 2602.13692, measured up to 7x). So a
new session waits until its working set fits; a turn of a running session only needs what it grew
by, and goes before any start. Among the waiting: urgency, then the tenant that was given least
(start-time fair queueing, Goyal 1996), then arrival; waiting makes up for urgency in time.

A session between two turns is *paused*. If a turn finds no room, paused sessions give theirs up,
first those that are away for longer than expected; to a start only those. So whoever waits does so
for turns that run, which end: nobody waits for somebody who waits.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from kimi_runtime.router.view import RequestClass

AGEING_S = 30.0
"""After this long a background session is as urgent as an interactive one that just came."""
MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1.0, 60.0
RELEASE_RATE = 0.1
"""Weight of the newest release in the estimate of how fast space becomes free."""


class Outcome(StrEnum):
    """What became of an arrival."""

    ADMITTED = "admitted"
    WAITING = "waiting"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn that wants to run. `tokens`: the session's KV once the turn is over."""

    session: bytes
    tenant: str
    tokens: int
    urgency: RequestClass = RequestClass.INTERACTIVE
    weight: float = 1.0
    """Of its tenant: twice the weight, twice the share."""
    continues: bool = False
    """Its session had space before: it goes before starts even if that was given up."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of an arrival; `shed` is a waiting start that had to make room for it."""

    outcome: Outcome
    retry_after_s: float = 0.0
    shed: Turn | None = None


@dataclass(slots=True)
class _Waiting:
    turn: Turn
    since_s: float
    running: bool
    order: int


@dataclass(slots=True)
class SessionQueue:
    """`capacity_tokens` of KV for all sessions; at most `max_waiting` turns wait."""

    capacity_tokens: int
    max_waiting: int = 1024
    used_tokens: int = 0
    _held: dict[bytes, int] = field(default_factory=dict)
    _paused: dict[bytes, float] = field(default_factory=dict)
    """Sessions without a turn that runs, and until when starts may not have their space."""
    _waiting: dict[bytes, _Waiting] = field(default_factory=dict)
    _given: dict[str, float] = field(default_factory=dict)
    """Virtual time of each tenant: tokens admitted over weight."""
    _virtual: float = 0.0
    _released_s: float | None = None
    _tokens_per_s: float = 0.0
    _order: int = 0

    @property
    def waiting(self) -> int:
        """How many turns wait."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """What they need beyond what their sessions hold."""
        return sum(
            max(one.turn.tokens - self.holds(one.turn.session), 0) for one in self._waiting.values()
        )

    @property
    def paused(self) -> int:
        """How many sessions hold space without a turn that runs."""
        return len(self._paused)

    def holds(self, session: bytes) -> int:
        """Tokens that the session may use; 0 if it is not admitted."""
        return self._held.get(session, 0)

    def arrive(self, turn: Turn, *, now_s: float) -> Answer:
        """A turn wants to run: at once, later (`ready` will name it), or not at all.

        A turn of a running session is never refused: if the queue is full, the start that would be
        admitted last makes room for it.
        """
        running = turn.continues or turn.session in self._held
        if turn.tokens > self.capacity_tokens and not running:
            return Answer(Outcome.REFUSED, MAX_RETRY_AFTER_S)
        if not self._before(turn, running=running) and self._fits(turn, running, now_s):
            self._admit(turn)
            return Answer(Outcome.ADMITTED)
        shed = None
        if len(self._waiting) >= self.max_waiting and turn.session not in self._waiting:
            if not running:
                return Answer(Outcome.REFUSED, self.retry_after_s(turn.tokens, now_s=now_s))
            shed = self._shed(now_s)
        self._order += 1
        self._waiting[turn.session] = _Waiting(turn, now_s, running, self._order)
        return Answer(Outcome.WAITING, self.retry_after_s(turn.tokens, now_s=now_s), shed)

    def ready(self, *, now_s: float) -> list[Turn]:
        """Admit whoever fits now, in order; the first that does not fit holds back later starts.

        Otherwise small sessions would pass a large one for ever.
        """
        admitted = []
        for waiting in self._in_order(now_s):
            if not self._fits(waiting.turn, waiting.running, now_s):
                break
            del self._waiting[waiting.turn.session]
            self._admit(waiting.turn)
            admitted.append(waiting.turn)
        return admitted

    def pause(self, session: bytes, *, tokens: int, until_s: float) -> None:
        """Its turn is over and it holds `tokens`; from `until_s` on starts may have its space."""
        if session in self._held:
            self.used_tokens += tokens - self._held[session]
            self._held[session] = tokens
            self._paused[session] = until_s

    def next_s(self, *, now_s: float) -> float | None:
        """When `ready` may admit somebody though nothing is reported; None: never."""
        later = (until_s for until_s in self._paused.values() if until_s > now_s)
        return min(later, default=None) if self._waiting else None

    def end(self, session: bytes, *, now_s: float) -> None:
        """The session is over, or its KV is dropped: its space is free."""
        self._waiting.pop(session, None)
        self._free(session, now_s)

    def give_up(self, session: bytes) -> None:
        """Whoever waited has left; what the session holds stays."""
        self._waiting.pop(session, None)

    def retry_after_s(self, tokens: int, *, now_s: float = -math.inf) -> float:
        """When space for `tokens` should be free, behind all who wait; 1 to 60 s, whole seconds."""
        idle = sum(self._held[one] for one, until_s in self._paused.items() if until_s <= now_s)
        short = self.used_tokens - idle + self.waiting_tokens + tokens - self.capacity_tokens
        if short <= 0:
            return MIN_RETRY_AFTER_S
        if self._tokens_per_s <= 0:
            return MAX_RETRY_AFTER_S
        wait_s = math.ceil(short / self._tokens_per_s)
        return float(min(max(wait_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S))

    def _fits(self, turn: Turn, running: bool, now_s: float) -> bool:
        """Whether there is room, which paused sessions have then made."""
        held = self.holds(turn.session)
        short = self.used_tokens + turn.tokens - held - self.capacity_tokens
        # a session that alone needs more than there is runs anyway: nobody else can help it
        if turn.tokens <= held or short <= 0 or self.used_tokens == held:
            return True
        freed, given_up = 0, []
        for session in self._idle(now_s, starts=not running):
            if session == turn.session:
                continue
            given_up.append(session)
            freed += self._held[session]
            if freed >= short:
                break
        if freed < short and self.used_tokens - freed > held:
            return False
        for session in given_up:
            self._free(session, now_s)
        return True

    def _idle(self, now_s: float, *, starts: bool) -> list[bytes]:
        """Sessions that may lose their space, first to go first."""
        late = sorted((until_s, one) for one, until_s in self._paused.items() if until_s <= now_s)
        due = [] if starts else [one for one in self._paused.items() if one[1] > now_s]
        due.sort(key=lambda one: -one[1])
        return [*(session for _, session in late), *(session for session, _ in due)]

    def _free(self, session: bytes, now_s: float) -> None:
        tokens = self._held.pop(session, 0)
        self._paused.pop(session, None)
        self.used_tokens -= tokens
        if tokens:
            self._learn(tokens, now_s)

    def _before(self, turn: Turn, *, running: bool) -> bool:
        """Whether somebody who waits has a better right than a turn that just came."""
        if running:
            return any(one.running for one in self._waiting.values())
        return bool(self._waiting)

    def _admit(self, turn: Turn) -> None:
        more = max(turn.tokens - self.holds(turn.session), 0)
        self._held[turn.session] = self.holds(turn.session) + more
        self._paused.pop(turn.session, None)
        self.used_tokens += more
        start = max(self._given.get(turn.tenant, 0.0), self._virtual)
        self._virtual = start
        self._given[turn.tenant] = start + more / turn.weight
        if len(self._given) > 4 * max(len(self._held) + len(self._waiting), 256):
            # a tenant that is no further than the virtual time starts there anyway
            self._given = {t: at for t, at in self._given.items() if at > self._virtual}

    def _in_order(self, now_s: float) -> Iterator[_Waiting]:
        """Those who wait, best first; each tenant's virtual time moves on as its turns pass."""
        left = sorted(self._waiting.values(), key=lambda one: one.order)
        given = dict(self._given)
        while left:
            best = min(left, key=lambda one: self._rank(one, given, now_s))
            left.remove(best)
            yield best
            turn = best.turn
            start = max(given.get(turn.tenant, 0.0), self._virtual)
            given[turn.tenant] = start + turn.tokens / turn.weight

    def _rank(
        self, one: _Waiting, given: dict[str, float], now_s: float
    ) -> tuple[bool, int, float, int]:
        background = one.turn.urgency is RequestClass.BACKGROUND
        urgency = int(background) - int(max(now_s - one.since_s, 0.0) / AGEING_S)
        share = max(given.get(one.turn.tenant, 0.0), self._virtual)
        return not one.running, urgency, share, one.order

    def _shed(self, now_s: float) -> Turn | None:
        starts = [one for one in self._in_order(now_s) if not one.running]
        if not starts:
            return None
        del self._waiting[starts[-1].turn.session]
        return starts[-1].turn

    def _learn(self, tokens: int, now_s: float) -> None:
        if self._released_s is not None and now_s > self._released_s:
            rate = tokens / (now_s - self._released_s)
            if self._tokens_per_s:
                rate = self._tokens_per_s + RELEASE_RATE * (rate - self._tokens_per_s)
            self._tokens_per_s = rate
        self._released_s = now_s if self._released_s is None else max(now_s, self._released_s)
