"""From memory to SSD: blocks worth it, off the critical path.

They wait in a bounded queue by key alone, so waiting holds no memory; what is evicted before its
turn is lost to the SSD. A batch is pinned while it is written. Nothing here makes an engine wait:
whatever the disk can't take now is dropped, and counted by its reason.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence

from kimi_connect.arena import Arena
from kimi_connect.copying import copy_bytes, matched
from kimi_runtime import clock
from kimi_runtime.transfer.background import Stop, in_thread
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.records import Block
from kimi_runtime.umbp.ssdlog.append import NewBlock
from kimi_runtime.umbp.ssdlog.health import Refusal
from kimi_runtime.umbp.tiers.dram import OWN_READER
from kimi_runtime.umbp.tiers.ssd import SsdTier

MAX_QUEUED = 65_536
BATCH_BLOCKS = 32
BATCH_BYTES = 32 << 20

MAKE_ROOM_TRIES = 4
"""A full log is made room in this often for a batch, each time by twice the blocks."""

QUEUE_FULL = "queue_full"
EVICTED = "evicted"
CLEARED = "cleared"
"""Reasons for a drop beside the log's own refusals."""


class WriteThrough:
    """Writes blocks of `pool` to `tier`, at most `bytes_per_s` if that is given."""

    def __init__(
        self,
        pool: Pool,
        arena: Arena,
        tier: SsdTier,
        changed: Callable[[], None],
        *,
        bytes_per_s: float | None = None,
    ) -> None:
        self.dropped: Counter[str] = Counter()
        """Blocks that were worth it and were not written, by reason."""
        self.offered = 0
        """Blocks that were to be written: kept, dropped or queued."""
        self.kept = 0
        """Blocks that are on SSD now."""
        self._pool, self._arena, self._tier, self._changed = pool, arena, tier, changed
        self.bytes_per_s = bytes_per_s
        self._queue: dict[bytes, None] = {}
        self._writing = 0
        self._clears = 0
        self._wake = asyncio.Event()

    @property
    def queued(self) -> int:
        """Blocks that wait or are being written."""
        return len(self._queue) + self._writing

    def offer(self, blocks: Sequence[Block]) -> None:
        """Write these when it is their turn."""
        for block in blocks:
            if block.key in self._queue:
                continue
            self.offered += 1
            if len(self._queue) >= MAX_QUEUED:
                self.dropped[QUEUE_FULL] += 1
                continue
            self._queue[block.key] = None
        if self._queue:
            self._wake.set()

    def clear(self) -> None:
        """Nothing that is known now is to be on SSD."""
        self.dropped[CLEARED] += len(self._queue)
        self._queue.clear()
        self._clears += 1

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                start_s, size = clock.now_s(), await self._batch()
                self._changed()
                if self.bytes_per_s is not None:
                    due_s = start_s + size / self.bytes_per_s
                    await asyncio.sleep(max(0.0, due_s - clock.now_s()))

    async def _batch(self) -> int:
        """Write some blocks; their bytes."""
        blocks, size = self._take()
        if not blocks:
            return 0
        pin = self._pool.pin([b.key for b in blocks], reader=OWN_READER, now_s=math.inf).number
        corrupt: list[int] = []
        self._writing, clears = len(blocks), self._clears
        try:
            new, _ = await in_thread(lambda stop: self._bodies(blocks, stop), ends_s=math.inf)
            # last first: the log's coldest goes first, and a prefix is evicted from its end
            bad = await self._put(new[::-1])
            corrupt = [n for n, block in enumerate(blocks) if block.key in bad]
            if clears != self._clears:
                self._tier.forget([block.key for block in blocks])
        finally:
            self._writing = 0
            self._pool.unpin(pin, corrupt, reader=OWN_READER, now_s=clock.now_s())
        return size

    def _take(self) -> tuple[list[Block], int]:
        """The next blocks that are still in memory, and their bytes."""
        blocks: list[Block] = []
        size = 0
        while self._queue and len(blocks) < BATCH_BLOCKS and size < BATCH_BYTES:
            key = next(iter(self._queue))
            del self._queue[key]
            block = self._pool.block(key)
            if block is None:
                self.dropped[EVICTED] += 1
                continue
            blocks.append(block)
            size += block.size
        return blocks, size

    def _bodies(self, blocks: Sequence[Block], stop: Stop) -> list[NewBlock]:
        """Blocks to write from where they lie; copied only if that is in several places."""
        new: list[NewBlock] = []
        for block in blocks:
            parts = list(self._arena.parts(block.extents, block.size))
            body = parts[0] if len(parts) == 1 else memoryview(bytearray(block.size))
            for part, piece in matched(parts if len(parts) > 1 else (), body):
                if stop():
                    return new
                copy_bytes(piece, part)
            new.append(NewBlock(block.key, body, block.tags))
        return new

    async def _put(self, new: list[NewBlock]) -> set[bytes]:
        """Write a batch, making room where there is none; keys of those that are damaged.

        Ours to check: without tags the log would make new ones, of whatever the bytes are now.
        """
        bad = {b.key for b in new if sum(group.size for group in b.tags) != b.body.nbytes}
        rest = [block for block in new if block.key not in bad]
        room, tries, lost = len(rest), MAKE_ROOM_TRIES, 0
        while rest:
            written = await self._tier.put(rest)
            rest = rest[written.kept :]
            if written.refusal is None:
                break
            if written.refusal is Refusal.CORRUPT:
                bad.add(rest.pop(0).key)
            elif written.refusal is Refusal.FULL and tries and self._tier.evict(room):
                tries, room = tries - 1, 2 * room
            else:
                lost = sum(not self._tier.held([block.key]) for block in rest)
                self.dropped[written.refusal] += lost
                break
        self.dropped[Refusal.CORRUPT] += len(bad)
        self.kept += len(new) - len(bad) - lost
        return bad
