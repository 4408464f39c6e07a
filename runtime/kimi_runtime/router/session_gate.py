"""Requests wait here until the KV memory of the fleet has room for their session.

`session_queue` decides; this holds the requests, each within its deadline, and tells the queue of
turns that end. A turn in the middle of a session waits for turns that run, a session start also
until other sessions have been away for longer than expected; it is refused after `max_wait`.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kimi_runtime import clock
from kimi_runtime.errors import DeadlineExceeded, Overloaded
from kimi_runtime.router.session_queue import Outcome, SessionQueue, Turn
from kimi_runtime.router.view import RequestClass
from kimi_runtime.spec.router import SessionAdmission

UNKNOWN_CAPACITY = 1 << 62
"""Without a worker to ask nobody is held back here: whoever plans says what is wrong."""
LOOK_S = 1.0
"""While somebody waits, memory that came or went is noticed within this time."""
MAX_PAUSED = 100_000


@dataclass(frozen=True, slots=True)
class Entry:
    """A turn at the gate. `tokens`: its session's KV once it is over, as far as one can know."""

    session: bytes
    tenant: str
    tokens: int
    continues: bool
    deadline_s: float
    urgency: RequestClass = RequestClass.INTERACTIVE


@dataclass(slots=True)
class Seat:
    """The room of one turn. Without `pause_s` its session is taken to be over when it ends."""

    tokens: int
    pause_s: float | None = None
    """How long starts may not have the session's room after the turn."""
    waited_s: float = 0.0


class SessionGate:
    """`capacity`: tokens of KV memory for this router's sessions; None while nobody knows."""

    def __init__(
        self, spec: SessionAdmission, capacity: Callable[[], int | None], *, enabled: bool
    ) -> None:
        self._spec, self._capacity, self.enabled = spec, capacity, enabled
        self._queue = SessionQueue(UNKNOWN_CAPACITY, max_waiting=spec.max_waiting)
        self._waiters: dict[bytes, asyncio.Future[None]] = {}
        self._busy: set[bytes] = set()
        self._woken = asyncio.Event()
        self._numbers = 0
        self.outcomes: Counter[str] = Counter()
        """Turns by what became of them here."""
        self.waited_s = 0.0
        """Of all turns together."""

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return self._queue.waiting

    @property
    def waiting_tokens(self) -> int:
        """KV that they need beyond what their sessions have."""
        return self._queue.waiting_tokens

    @property
    def used_tokens(self) -> int:
        """KV that admitted sessions are counted with."""
        return self._queue.used_tokens

    @property
    def capacity_tokens(self) -> int | None:
        """KV that sessions may be let in for; None while nobody knows."""
        known = self._capacity()
        return None if known is None else max(int(known * self._spec.oversubscribe), 1)

    @asynccontextmanager
    async def turn(self, entry: Entry) -> AsyncIterator[Seat]:
        """Room for a turn while the block runs.

        Raises Overloaded for a start that finds no room in time, DeadlineExceeded for any turn.
        """
        seat = Seat(entry.tokens)
        if not self.enabled:
            yield seat
            return
        # twins, and children that go on from one parent at once, need room of their own
        twin = entry.session in self._busy
        name = self._twin(entry.session) if twin else entry.session
        self._busy.add(name)
        started_s = clock.now_s()
        admitted = False
        try:
            try:
                await self._room(name, entry, now_s=started_s)
                admitted = True
            finally:
                seat.waited_s = clock.now_s() - started_s
                self.waited_s += seat.waited_s
            yield seat
        finally:
            self._busy.discard(name)
            if admitted:
                self._leave(name, seat, pauses=not twin)

    def end(self, session: bytes) -> None:
        """The session is over; one with a turn that runs keeps its room until that ends."""
        if session not in self._busy:
            self._queue.end(session, now_s=clock.now_s())
            self.look()

    def wake(self) -> None:
        """The workers changed."""
        self._woken.set()

    async def watch(self) -> None:
        """Let those in for whom time or other workers made room, until cancelled."""
        while True:
            self._woken.clear()
            self.look()
            wait_s = None
            if self._queue.waiting:
                now_s = clock.now_s()
                next_s = self._queue.next_s(now_s=now_s)
                wait_s = LOOK_S if next_s is None else min(max(next_s - now_s, 0.0), LOOK_S)
            try:
                async with asyncio.timeout(wait_s):
                    await self._woken.wait()
            except TimeoutError:
                continue

    def look(self) -> None:
        """Admit everybody there is room for now."""
        known = self.capacity_tokens
        self._queue.capacity_tokens = UNKNOWN_CAPACITY if known is None else known
        for turn in self._queue.ready(now_s=clock.now_s()):
            waiter = self._waiters.get(turn.session)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    async def _room(self, name: bytes, entry: Entry, *, now_s: float) -> None:
        self.look()
        tokens = min(entry.tokens, self._queue.capacity_tokens)  # alone it may run anyway
        asked = Turn(name, entry.tenant, tokens, entry.urgency, continues=entry.continues)
        answer = self._queue.arrive(asked, now_s=now_s)
        if answer.shed is not None:
            self._shed(answer.shed, answer.retry_after_s)
        if answer.outcome is Outcome.ADMITTED:
            self.outcomes["at_once"] += 1
            return
        if answer.outcome is Outcome.REFUSED:
            self.outcomes["refused"] += 1
            raise _refusal(answer.retry_after_s)
        await self._wait(name, entry, now_s=now_s)
        self.outcomes["waited"] += 1

    async def _wait(self, name: bytes, entry: Entry, *, now_s: float) -> None:
        longest_s = float("inf") if entry.continues else self._spec.max_wait
        until_s = min(entry.deadline_s, now_s + longest_s)
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[name] = waiter
        self.wake()  # who watches must know when to look again
        came_in = False
        try:
            async with asyncio.timeout(until_s - now_s):
                await waiter
            came_in = True
        except TimeoutError as exc:
            self.outcomes["late"] += 1
            if until_s >= entry.deadline_s:
                raise DeadlineExceeded(
                    "no KV memory became free for the request by its deadline"
                ) from exc
            retry_after_s = self._queue.retry_after_s(entry.tokens, now_s=clock.now_s())
            raise _refusal(retry_after_s) from exc
        except asyncio.CancelledError:
            self.outcomes["left"] += 1
            raise
        finally:
            del self._waiters[name]
            if not came_in:
                self._withdraw(name, waiter)

    def _withdraw(self, name: bytes, waiter: "asyncio.Future[None]") -> None:
        """It will not run, although it may have been let in just now."""
        if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
            self._queue.end(name, now_s=clock.now_s())
        else:
            self._queue.give_up(name)
        self.look()  # it may have been the one that held others back

    def _leave(self, name: bytes, seat: Seat, *, pauses: bool) -> None:
        now_s = clock.now_s()
        if seat.pause_s is None or not pauses or self._queue.paused >= MAX_PAUSED:
            self._queue.end(name, now_s=now_s)
        else:
            self._queue.pause(name, tokens=seat.tokens, until_s=now_s + seat.pause_s)
        self.look()

    def _shed(self, turn: Turn, retry_after_s: float) -> None:
        waiter = self._waiters.get(turn.session)
        if waiter is not None and not waiter.done():
            self.outcomes["shed"] += 1
            waiter.set_exception(_refusal(retry_after_s))

    def _twin(self, session: bytes) -> bytes:
        self._numbers += 1
        return session + b"#%d" % self._numbers


def _refusal(retry_after_s: float) -> Overloaded:
    return Overloaded(
        "the KV memory is in use by sessions that run, and has no room for one more; "
        f"send the request again after {retry_after_s:.0f} s",
        retry_after_s=retry_after_s,
    )
