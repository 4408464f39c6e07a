"""Who is being served right now: what a load report says about the requests themselves."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kimi_runtime.errors import Unavailable
from kimi_runtime.spec.request import GenerateRequest

_ROUTERS_REMEMBERED = 256


class Intake:
    """Counts requests in and out, per router replica, and refuses them while draining."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.draining = False
        self.in_flight: Counter[str] = Counter()
        self.last_request: dict[str, str] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._seq = 0

    def next_seq(self) -> int:
        """The number of the next load report."""
        self._seq += 1
        return self._seq

    @contextmanager
    def entered(self, request: GenerateRequest) -> Iterator[None]:
        """Count the request in, and out when the block ends. Unavailable while draining."""
        if self.draining:
            raise Unavailable(f"worker {self.worker} is draining; send the request to another one")
        self.last_request.pop(request.router, None)
        self.last_request[request.router] = request.request_id
        if len(self.last_request) > _ROUTERS_REMEMBERED:  # router names come from outside
            del self.last_request[next(iter(self.last_request))]
        self.in_flight[request.router] += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.in_flight[request.router] -= 1
            if not self.in_flight[request.router]:
                del self.in_flight[request.router]
            if not self.in_flight:
                self._empty.set()

    async def emptied(self, *, within_s: float) -> bool:
        """Wait until nobody is in flight; False if that took longer than `within_s`."""
        try:
            async with asyncio.timeout(within_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True
