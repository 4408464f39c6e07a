"""Requests that come while no worker runs: held until one does, if somebody will start one.

A deployment that was scaled to zero has an empty list of workers, and its routers stay in service:
a request is what wakes it, and waits here. Whoever starts workers reads how many wait from the
router's signals. Without a `wake_s` nobody will: such a request is refused at once, by the planner.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from kimi_runtime import clock
from kimi_runtime.errors import StillStarting
from kimi_runtime.router.discovery import Fleet
from kimi_runtime.router.readiness import Readiness

RETRY_AFTER_S = 10.0


class Parking:
    """Holds requests while nothing can serve them. Call `look` whenever the workers change."""

    def __init__(self, fleet: Fleet, readiness: Readiness) -> None:
        self._fleet, self._readiness = fleet, readiness
        self._opened = asyncio.Event()
        self._parked: dict[int, tuple[float, int]] = {}
        self._numbers = 0
        self.wake_s: float | None = None
        """How long a request may wait; None: none waits."""
        self.asleep = False
        """The deployment was scaled to zero, and no generation has passed since."""
        self._opened.set()

    @property
    def requests(self) -> int:
        """How many wait."""
        return len(self._parked)

    @property
    def tokens(self) -> int:
        """Prompt tokens of those that wait."""
        return sum(tokens for _, tokens in self._parked.values())

    def oldest_s(self, now_s: float) -> float:
        """For how long the first of them has waited; 0 where none waits."""
        return max((now_s - since_s for since_s, _ in self._parked.values()), default=0.0)

    def allow(self, wake_s: float | None) -> None:
        """From now on requests may wait for so long."""
        self.wake_s = wake_s
        self.look()

    def look(self) -> None:
        """The list of workers, one of them, or the readiness changed."""
        someone = bool(self._fleet.generation)
        listed = any(member.left_s is None for member in self._fleet.members)
        if self.wake_s is None or (someone and self._readiness.obstacle is None):
            self.asleep = False
        elif not listed:
            self.asleep = True
        if self.wake_s is not None and (self.asleep or not someone):
            self._opened.clear()
        else:
            self._opened.set()

    async def wait(self, *, tokens: int) -> None:
        """Return once the request can be planned; StillStarting if that takes too long."""
        if self._opened.is_set() or self.wake_s is None:
            return
        wake_s = self.wake_s
        with self._place(tokens):
            try:
                async with asyncio.timeout(wake_s):
                    await self._opened.wait()
            except TimeoutError as exc:
                raise StillStarting(
                    f"no worker ran when the request came, and none got ready within {wake_s:.0f} "
                    "s; they are being started: send the request again",
                    retry_after_s=RETRY_AFTER_S,
                ) from exc

    @contextmanager
    def _place(self, tokens: int) -> Iterator[None]:
        self._numbers += 1
        number = self._numbers
        self._parked[number] = (clock.now_s(), tokens)
        try:
            yield
        finally:
            del self._parked[number]
