"""The SSD behind a daemon's memory: what is asked for comes back, what is used again is kept."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kimi_connect.arena import Arena
from kimi_connect.wire import Gap
from kimi_runtime import clock
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.umbp.holdings import TierHoldings
from kimi_runtime.umbp.pool import DEFAULT_TENANT, Pool
from kimi_runtime.umbp.promotion import Promoter
from kimi_runtime.umbp.tiers.ssd import SsdTier
from kimi_runtime.umbp.worth import worth_writing
from kimi_runtime.umbp.write_through import WriteThrough

WAIT_SHARE = 0.75
"""Of the time a client waits, for the SSD: it has to copy and check what came, too."""

MAX_WAIT_S = 3.0
"""A client takes a daemon that owes an answer for longer than 5 s for hung."""

MAX_WAITING = 256
"""Requests that wait for the SSD at a time; more are answered from memory alone."""


class SecondTier:
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
        self.tier, self._changed = tier, changed
        self.promoter = Promoter(pool, arena, tier, self.spawn)
        self.writer = WriteThrough(pool, arena, tier, changed, bytes_per_s=spec.ssd_write_rate)
        self.busy = 0
        """Requests not helped because `MAX_WAITING` others waited."""
        self._pool, self._on_ssd, self._after_uses = pool, on_ssd, spec.ssd_after_uses
        self._waiting = 0
        self._tasks: asyncio.TaskGroup | None = None
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run a task that ends, at the latest, with the daemon."""
        assert self._tasks is not None
        task = self._tasks.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

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
        worthy = worth_writing(keys, self._pool.block, self._on_ssd, after_uses=self._after_uses)
        self.writer.offer(worthy)

    def clear(self) -> int:
        """Forget what is on SSD and what was to be; how many blocks were there."""
        self.writer.clear()
        return len(self.tier.forget(self.tier.keys()))

    def help(
        self,
        keys: Sequence[bytes],
        answer: Callable[[Gap], None],
        *,
        within_s: float,
        tenant: str = DEFAULT_TENANT,
    ) -> bool:
        """Bring some of the run of `keys` into memory, then call `answer` with why no more came.

        See `Promoter.bring`. False, and nothing happens, if waiting for the SSD would not make the
        run in memory longer, or if enough others wait.
        """
        if not self.promoter.lacks(keys):
            return False
        if self._waiting >= MAX_WAITING:
            self.busy += 1
            return False
        self._waiting += 1
        self.spawn(self._help(keys, answer, within_s, tenant), "umbp-pin")
        return True

    async def _help(
        self, keys: Sequence[bytes], answer: Callable[[Gap], None], within_s: float, tenant: str
    ) -> None:
        try:
            wait_s = min(WAIT_SHARE * within_s, MAX_WAIT_S)
            ends_s = clock.now_s() + wait_s
            gap = await self.promoter.bring(keys, ends_s=ends_s, tenant=tenant)
        finally:
            self._waiting -= 1
        answer(gap)
        self._changed()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Its tasks, ended on the way out."""
        async with asyncio.TaskGroup() as self._tasks:
            self.spawn(self.writer.run(), "umbp-write-through")
            try:
                yield
            finally:
                for task in list(self._running):
                    task.cancel()
