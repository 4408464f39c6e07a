"""What of a fetch gets pages here, and what the pool is to think of it."""

import math
from collections.abc import Sequence
from typing import Protocol

from kimi_connect.wire import Granted
from kimi_runtime import clock
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.tiers.dram import OWN_WRITER


class Admission(Protocol):
    """Decides for one fetch."""

    @property
    def tenant(self) -> str:
        """For whom it is."""

    @property
    def reader(self) -> str:
        """What the owner is told of who reads."""

    def reserve(self, items: Sequence[tuple[bytes, int]]) -> list[Granted]:
        """Pages for the blocks (key, size) of a run, which the fetch gives back when it ends."""

    def arrived(self, keys: Sequence[bytes]) -> None:
        """These are here now."""


class AskedFor:
    """An engine waits: what is cold makes room, and the engine's use will be the first."""

    def __init__(self, pool: Pool, tenant: str, reader: str) -> None:
        self.tenant, self.reader = tenant, reader
        self._pool = pool

    def reserve(self, items: Sequence[tuple[bytes, int]]) -> list[Granted]:
        """Pages until there is no more room."""
        # without an end: the pages come free when the copy has ended, never before
        now_s = clock.now_s()
        return self._pool.reserve(
            items, writer=OWN_WRITER, now_s=now_s, ttl_s=math.inf, tenant=self.tenant
        )

    def arrived(self, keys: Sequence[bytes]) -> None:
        """Not used yet."""
        self._pool.arrived(keys)
