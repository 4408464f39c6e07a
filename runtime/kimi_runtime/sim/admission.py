"""Sessions before the simulated router: let in as a whole, as far as there is KV space. Pure."""

import math
from collections.abc import Callable

from kimi_runtime.router.estimate.gaps import Curve
from kimi_runtime.router.session_queue import Outcome, SessionQueue, Turn
from kimi_runtime.sim.timeline import Timeline, Timer

SURELY_BACK = 0.9
"""A session's space is kept for it until so many of its like are back, or `hold_s` are over."""


class Admission:
    """Holds turns back until their session may run. A refused start comes again, as it was told."""

    def __init__(self, timeline: Timeline, capacity_tokens: int, hold_s: float) -> None:
        self._timeline, self._hold_s = timeline, hold_s
        self.queue = SessionQueue(capacity_tokens)
        self.refused = 0
        self._held_back: dict[bytes, tuple[Turn, Callable[[], None]]] = {}
        self._timer: Timer | None = None

    def ask(self, turn: Turn, go: Callable[[], None]) -> None:
        """A turn wants to run; `go` is called when it may."""
        answer = self.queue.arrive(turn, now_s=self._timeline.now_s)
        if answer.shed is not None:
            shed, again = self._held_back.pop(answer.shed.session)
            self._refuse(shed, again, answer.retry_after_s)
        match answer.outcome:
            case Outcome.ADMITTED:
                go()
            case Outcome.WAITING:
                self._held_back[turn.session] = turn, go
            case Outcome.REFUSED:
                self._refuse(turn, go, answer.retry_after_s)
        self._look()

    def pause(self, session: bytes, tokens: int, gap: Curve) -> None:
        """A turn ended and the session holds `tokens`, which it will want again after the gap."""
        now_s = self._timeline.now_s
        hold_s = min(gap.quantile(SURELY_BACK), self._hold_s)
        self.queue.pause(session, tokens=tokens, until_s=now_s + hold_s)
        self._look()

    def end(self, session: bytes) -> None:
        """The session is over."""
        self.queue.end(session, now_s=self._timeline.now_s)
        self._look()

    def _refuse(self, turn: Turn, go: Callable[[], None], after_s: float) -> None:
        self.refused += 1
        self._timeline.after(max(after_s, 1.0), lambda: self.ask(turn, go))

    def _look(self) -> None:
        """Let in whoever fits now."""
        now_s = self._timeline.now_s
        for turn in self.queue.ready(now_s=now_s):
            _, go = self._held_back.pop(turn.session)
            self._timeline.after(0.0, go)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        later_s = self.queue.next_s(now_s=now_s)
        if later_s is not None and math.isfinite(later_s):
            self._timer = self._timeline.at(later_s, self._woken)

    def _woken(self) -> None:
        self._timer = None
        self._look()
