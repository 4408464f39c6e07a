"""Blocks on their way into memory, and who waits for them.

Whoever wants a block that is under way waits for its flight, so that it is brought once however
many ask. Until its last waiter has gone, nothing a flight brought can be evicted.
"""

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kimi_runtime import clock
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.tiers.dram import OWN_READER

Failure = TypeVar("Failure")


@dataclass(slots=True, eq=False)
class Flight(Generic[Failure]):
    """`failure` is why the first block that did not come has not, once the flight has `ended`."""

    keys: list[bytes]
    failure: Failure
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0
    landed: int = 0
    """How many blocks it brought."""
    _pin: int = 0

    def end(self, pool: Pool, landed: Sequence[bytes]) -> None:
        """It brought `landed`, which stay as long as somebody waits."""
        self.landed = len(landed)
        if self.waiting and landed:
            own = pool.pin(landed, reader=OWN_READER, now_s=math.inf)
            self._pin = own.number
        self.ended.set()

    @contextmanager
    def awaited(self, pool: Pool) -> Iterator[None]:
        """Around a wait for it: what it brings stays in memory."""
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1
            if not self.waiting:
                pool.unpin(self._pin, (), reader=OWN_READER, now_s=clock.now_s())

    async def wait(self, ends_s: float) -> bool:
        """Whether it ended by then."""
        try:
            async with asyncio.timeout(max(0.0, ends_s - clock.now_s())):
                await self.ended.wait()
        except TimeoutError:
            return False
        return True


@contextmanager
def kept(pool: Pool, keys: Sequence[bytes]) -> Iterator[None]:
    """What is in memory of `keys` stays there."""
    here = [key for key in keys if pool.block(key) is not None]
    own = pool.pin(here, reader=OWN_READER, now_s=math.inf)
    try:
        yield
    finally:
        pool.unpin(own.number, (), reader=OWN_READER, now_s=clock.now_s())
