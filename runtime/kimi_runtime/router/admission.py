"""How many requests this router carries at once, and what it tells those it refuses."""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager

from kimi_runtime.errors import Overloaded, Unavailable

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0
RESERVED_SHARE = 16
"""One slot in 16 is kept for turns of running sessions: they own KV, a new session does not."""


class Slot:
    """One admitted request."""

    def __init__(self, admission: "Admission") -> None:
        self._admission = admission

    def starts_session(self) -> None:
        """It turned out to be a new session: refused (Overloaded) if only reserved slots are left.

        So a turn in the middle of a session is never refused before the start of one.
        """
        self._admission.check_start()


class Admission:
    """Counts requests in flight against `limit`. The time a slot is held is learned."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._reserved = limit // RESERVED_SHARE
        self._held_s = 1.0
        self._empty = asyncio.Event()
        self._empty.set()
        self.in_flight = 0
        self.closing = False
        """Whoever keeps a connection open should open the next one elsewhere."""
        self.draining = False

    @contextmanager
    def slot(self) -> Iterator[Slot]:
        """Hold a slot; Overloaded if there is none, Unavailable while the router drains."""
        if self.draining:
            raise Unavailable("this router is shutting down; send the request again")
        if self.in_flight >= self._limit:
            raise self._refusal()
        self.in_flight += 1
        self._empty.clear()
        try:
            yield Slot(self)
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._empty.set()

    async def drain(self, *, within_s: float, linger_s: float = 0.0) -> None:
        """Refuse new requests; return when the others have ended, or after `within_s`.

        For `linger_s` of that they are still taken: from clients that have not heard yet.
        """
        self.closing = True
        try:
            async with asyncio.timeout(within_s):
                if linger_s:
                    await asyncio.sleep(linger_s)
                self.draining = True
                await self._empty.wait()
        except TimeoutError:
            return

    def check_start(self) -> None:
        """Overloaded unless an unreserved slot was free for this request."""
        if self.in_flight > self._limit - self._reserved:
            raise self._refusal()

    def served(self, seconds: float) -> None:
        """A request was served in `seconds`: the estimate of Retry-After follows."""
        self._held_s += 0.1 * (seconds - self._held_s)

    def retry_after_s(self) -> float:
        """When a slot should be free: with n in flight one ends every held/n seconds."""
        wait_s = self._held_s / max(self.in_flight, 1)
        return float(min(max(math.ceil(wait_s), MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S))

    def _refusal(self) -> Overloaded:
        return Overloaded(
            f"this router already serves {self.in_flight} of {self._limit} requests; "
            f"send the request again after {self.retry_after_s():.0f} s",
            retry_after_s=self.retry_after_s(),
        )
