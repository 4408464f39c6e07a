"""Computed blocks on their way into the node's pool, as `engine.store` sends them. Pure.

A block that waits is pinned, so how many may wait is bounded; what comes then is dropped.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice, takewhile

from kimi_runtime.engine.blocks import KvBlocks
from kimi_runtime.engine.scheduler import SealedBlock
from kimi_runtime.sim.links import Links, Transfer
from kimi_runtime.sim.pool import SimPool
from kimi_runtime.sim.timeline import Timeline

BATCH_BLOCKS = 32
PINNED_SHARE = 0.25
"""Of all blocks, how many may wait."""
WAITING_STATES = 4


class Writer:
    """Stores one worker's blocks, a batch at a time. `freed` is called when blocks are unpinned."""

    def __init__(
        self,
        name: str,
        blocks: KvBlocks,
        pool: SimPool,
        *,
        block_bytes: int,
        timeline: Timeline,
        links: Links,
        sync: Callable[[], None],
        freed: Callable[[], None],
    ) -> None:
        self._links_used = (f"{name}/host",)
        self._blocks, self._pool, self._block_bytes = blocks, pool, block_bytes
        self._timeline, self._links = timeline, links
        self._sync, self._freed = sync, freed
        self._most = max(int(PINNED_SHARE * blocks.total), BATCH_BLOCKS)
        self._queue: deque[SealedBlock] = deque()
        self._storing: list[SealedBlock] = []
        self._states: deque[tuple[Sequence[bytes], str]] = deque()
        self._transfer: Transfer | None = None
        self.dropped = 0

    def offer(self, sealed: Sequence[SealedBlock]) -> None:
        """Keep these until they are stored, or drop what is too much."""
        room = max(self._most - len(self._queue) - len(self._storing), 0)
        kept = sealed[:room]
        self.dropped += len(sealed) - len(kept)
        self._blocks.reference([one.block for one in kept])
        self._queue.extend(kept)
        if self._queue and self._transfer is None:
            self._store()

    def offer_state(self, keys: Sequence[bytes], tenant: str) -> None:
        """Keep the state behind the blocks `keys` once these are stored, or drop it."""
        if len(self._states) >= WAITING_STATES:
            self.dropped += 1
            return
        self._states.append((keys, tenant))
        if self._transfer is None:
            self._store_state()

    def holders(self) -> list[list[int]]:
        """The pinned blocks."""
        return [[one.block] for one in (*self._queue, *self._storing)]

    def stop(self) -> None:
        """The worker is gone."""
        if self._transfer is not None:
            self._links.cancel(self._transfer)
        self._queue.clear()
        self._states.clear()
        self._storing = []

    def _store_state(self) -> None:
        keys, tenant = self._states.popleft()

        def stored() -> None:
            self._sync()
            self._transfer = None
            self._pool.keep_state(keys, tenant=tenant, now_s=self._timeline.now_s)
            self._go_on()

        self._transfer = self._links.start(self._links_used, self._pool.state_bytes, stored)

    def _go_on(self) -> None:
        if self._queue:
            self._store()
        elif self._states:
            self._store_state()

    def _store(self) -> None:
        tenant = self._queue[0].tenant
        ours = takewhile(lambda one: one.tenant == tenant, islice(self._queue, BATCH_BLOCKS))
        self._storing = list(ours)
        for _ in self._storing:
            self._queue.popleft()
        size = len(self._storing) * self._block_bytes
        self._transfer = self._links.start(self._links_used, size, self._stored)

    def _stored(self) -> None:
        self._sync()
        storing, self._storing, self._transfer = self._storing, [], None
        keys = [one.key for one in storing]
        self._pool.store(keys, tenant=storing[0].tenant, now_s=self._timeline.now_s)
        self._blocks.release([one.block for one in storing])
        self._go_on()
        self._freed()
