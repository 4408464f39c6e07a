"""Virtual time: a heap of timed callbacks. Pure and deterministic.

What is due at the same moment happens in the order it was asked for.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

Act = Callable[[], None]


@dataclass(slots=True, eq=False)
class Timer:
    """A callback that is still to come, unless it is cancelled."""

    due_s: float
    act: Act | None

    def cancel(self) -> None:
        """Never call it. Cancelling twice, or too late, changes nothing."""
        self.act = None


@dataclass(slots=True)
class Timeline:
    """Calls what is due, in order; `now_s` is the time of whatever runs now."""

    now_s: float = 0.0
    happened: int = 0
    _heap: list[tuple[float, int, Timer]] = field(default_factory=list)
    _number: int = 0

    def at(self, due_s: float, act: Act) -> Timer:
        """Call `act` at that time; what should have been earlier is called now."""
        timer = Timer(max(due_s, self.now_s), act)
        self._number += 1
        heapq.heappush(self._heap, (timer.due_s, self._number, timer))
        return timer

    def after(self, delay_s: float, act: Act) -> Timer:
        """Call `act` in `delay_s` seconds."""
        return self.at(self.now_s + delay_s, act)

    def run(self, until_s: float = math.inf, *, stop: Callable[[], bool] | None = None) -> None:
        """Go on until nothing is left, `until_s` has come, or `stop` says so after a callback."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            due_s, _, timer = heapq.heappop(heap)
            act = timer.act
            if act is None:
                continue
            self.now_s = due_s
            self.happened += 1
            timer.act = None
            act()
            if stop is not None and stop():
                return
        if math.isfinite(until_s):
            self.now_s = max(self.now_s, until_s)
