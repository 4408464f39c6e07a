"""Computed blocks go to the node's pool, off the critical path.

A block waits here pinned, so the number that may wait is bounded: what comes while the pool is
behind is dropped and counted, and costs a later miss.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from itertools import islice, takewhile

from kimi_runtime.engine.blocks import KvBlocks
from kimi_runtime.engine.counters import EngineCounters
from kimi_runtime.engine.fetch import Pool
from kimi_runtime.engine.freed import Freed
from kimi_runtime.engine.geometry import BlockView
from kimi_runtime.engine.scheduler import SealedBlock
from kimi_runtime.engine.states import KeptState
from kimi_runtime.umbp.checkpoints import Checkpoints

_BATCH_BLOCKS = 32
_WAITING_STATES = 4


class PoolWriter:
    """Stores blocks in the order they were computed, at most `max_pinned` waiting."""

    def __init__(
        self,
        pool: Pool,
        blocks: KvBlocks,
        view: BlockView,
        counters: EngineCounters,
        *,
        max_pinned: int,
        deadline_s: float,
        freed: Freed,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """`checkpoints` keeps the states of a model that has them, in the same pool."""
        self._pool, self._blocks, self._view, self._counters = pool, blocks, view, counters
        self._max_pinned, self._deadline_s, self._freed = max_pinned, deadline_s, freed
        self._checkpoints = checkpoints
        self._states: deque[KeptState] = deque()
        self._queue: deque[SealedBlock] = deque()
        self._storing: list[SealedBlock] = []
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def offer(self, sealed: Iterable[SealedBlock]) -> None:
        """Keep these blocks until they are stored, or drop what is too much."""
        for one in sealed:
            if len(self._queue) + len(self._storing) >= self._max_pinned:
                self._counters.pool_dropped += 1
                continue
            self._blocks.reference([one.block])
            self._queue.append(one)
            self._wake.set()
            self._idle.clear()

    def offer_state(self, kept: KeptState) -> None:
        """Keep a state once its blocks are stored, or drop it if too many wait."""
        if len(self._states) >= _WAITING_STATES:
            self._counters.states_dropped += 1
            return
        self._states.append(kept)
        self._wake.set()
        self._idle.clear()

    def holders(self) -> list[list[int]]:
        """The pinned blocks, for `KvBlocks.check_integrity`."""
        return [[one.block] for one in (*self._queue, *self._storing)]

    async def flushed(self, *, within_s: float) -> bool:
        """Wait until nothing waits any more; False if that took longer."""
        try:
            async with asyncio.timeout(within_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Store until cancelled."""
        while True:
            self._wake.clear()
            while self._queue or self._states:
                if self._queue:
                    await self._store_batch()
                else:
                    await self._store_state(self._states.popleft())
            self._idle.set()
            await self._wake.wait()

    def drop_all(self) -> None:
        """Give every waiting block back: the worker stops."""
        self._counters.pool_dropped += len(self._queue)
        self._blocks.release([one.block for one in self._queue])
        self._queue.clear()
        self._states.clear()

    async def _store_state(self, kept: KeptState) -> None:
        """Its blocks were offered before it and have been stored, or are not in the pool."""
        assert self._checkpoints is not None
        stored = await self._checkpoints.keep(
            kept.keys, memoryview(kept.state), deadline_s=self._deadline_s, tenant=kept.tenant
        )
        self._counters.states_stored += stored
        self._counters.states_dropped += not stored

    async def _store_batch(self) -> None:
        tenant = self._queue[0].tenant
        ours = list(takewhile(lambda one: one.tenant == tenant, islice(self._queue, _BATCH_BLOCKS)))
        count = len(ours)
        self._storing = [self._queue.popleft() for _ in range(count)]
        stored = 0
        try:
            stored = await self._pool.store(
                [one.key for one in self._storing],
                [self._view(one.block) for one in self._storing],
                deadline_s=self._deadline_s,
                tenant=tenant,
            )
        finally:
            self._counters.pool_stored += stored
            self._counters.pool_dropped += count - stored
            self._blocks.release([one.block for one in self._storing])
            self._storing = []
            self._freed()
