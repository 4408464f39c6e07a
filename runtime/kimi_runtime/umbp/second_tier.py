"""The SSD behind a daemon's memory: what is asked for comes back, what is used again is kept."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kimi_connect.arena import Arena
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.umbp.helper import Errands, Helper
from kimi_runtime.umbp.holdings import TierHoldings
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.promotion import Promoter
from kimi_runtime.umbp.tiers.ssd import SsdTier
from kimi_runtime.umbp.worth import worth_writing
from kimi_runtime.umbp.write_through import WriteThrough


class SecondTier(Helper):
    """Promotion and write-through between the pool's memory and an SSD tier."""

    def __init__(
        self,
        spec: UmbpSpec,
        pool: Pool,
        arena: Arena,
        tier: SsdTier,
        on_ssd: TierHoldings,
        changed: Callable[[], None],
    ) -> None:
        self.tier = tier
        self.promoter = Promoter(pool, arena, tier, self.spawn)
        super().__init__(self.promoter, self.spawn, changed)
        self.writer = WriteThrough(pool, arena, tier, changed, bytes_per_s=spec.ssd_write_rate)
        self._pool, self.on_ssd, self.after_uses = pool, on_ssd, spec.ssd_after_uses
        self._errands: Errands | None = None

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run a task that ends, at the latest, with the daemon."""
        assert self._errands is not None
        self._errands.spawn(work, name)

    def held(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run of `keys` that memory and SSD hold together."""
        run = 0
        while run < len(keys):
            here = run + self._pool.held(keys[run:])
            there = here + self.tier.held(keys[here:])
            if there == run:
                break
            run = there
        return run

    def used(self, keys: Sequence[bytes]) -> None:
        """Engines had a use for a run of blocks, which the pool has counted."""
        self.tier.touch(keys)
        worthy = worth_writing(keys, self._pool.block, self.on_ssd, after_uses=self.after_uses)
        self.writer.offer(worthy)

    def clear(self) -> int:
        """Forget what is on SSD and what was to be; how many blocks were there."""
        self.writer.clear()
        return len(self.tier.forget(self.tier.keys()))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Its tasks, ended on the way out."""
        async with asyncio.TaskGroup() as group:
            self._errands = Errands(group)
            self.spawn(self.writer.run(), "umbp-write-through")
            try:
                yield
            finally:
                self._errands.end()
