"""The SSD tier: blocks in a node's log."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from kimi_connect.blocks import flat
from kimi_connect.states import attached
from kimi_runtime.spec.ssd import SsdSpec
from kimi_runtime.transfer.background import Stop, in_thread
from kimi_runtime.umbp.holdings import Holdings
from kimi_runtime.umbp.ssdlog.append import NewBlock, Written
from kimi_runtime.umbp.ssdlog.disk import Disk
from kimi_runtime.umbp.ssdlog.health import Access, Refusal
from kimi_runtime.umbp.ssdlog.log import Got, LogStats, SsdLog
from kimi_runtime.umbp.tiers.base import BlockKey, TierCost

Result = TypeVar("Result")

COST = TierCost(latency_s=5e-4, bytes_per_s=2e9)
"""One drive, read and checked; a machine's own figure comes from benchmarks/ssdlog.py."""

UPKEEP_S = 1.0
"""How often the log is looked after when nothing is evicted."""


class SsdTier:
    """The log beside an event loop: what waits for the disk runs in the tier's own threads.

    Writes go one batch after another; beyond `max_pending` bytes of them new ones are dropped at
    once. Reads never wait behind writes. Cancelling a call waits for its piece of I/O to end. The
    optional feed is told what comes and goes, on the loop.
    """

    def __init__(self, log: SsdLog, *, feed: Holdings | None = None, cost: TierCost = COST) -> None:
        self.log = log
        self._cost, self._feed = cost, feed
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="ssd-writer")
        self._readers = ThreadPoolExecutor(log.spec.io_threads, thread_name_prefix="ssd-reader")
        self._pending_bytes = 0
        self._wake = asyncio.Event()
        if feed is not None:
            feed.add(log.keys())

    @property
    def cost(self) -> TierCost:
        """What a load costs."""
        return self._cost

    @property
    def pending_bytes(self) -> int:
        """Bytes of writes under way."""
        return self._pending_bytes

    def held(self, keys: Sequence[BlockKey]) -> int:
        """Length of the leading run of `keys` held here; 0 when the disk is gone."""
        return self.log.held(keys)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Make those of `keys` that are held the warmest, the first most of all."""
        self.log.touch(keys)

    def sizes(self, keys: Sequence[BlockKey]) -> list[int]:
        """Bytes of each block of the leading run."""
        return self.log.sizes(keys)

    def keys(self) -> list[BlockKey]:
        """Every key held, coldest first."""
        return self.log.keys()

    def stats(self) -> LogStats:
        """The log's figures, with every refusal by its reason."""
        return self.log.stats()

    async def load(self, keys: Sequence[BlockKey], into: memoryview) -> int:
        """Copy the leading run that fits into `into`, verified; its length."""
        into, targets, at = flat(into), list[memoryview](), 0
        for size in self.log.sizes(keys):
            if at + size > into.nbytes:
                break
            targets.append(into[at : at + size])
            at += size
        return len((await self.get(keys, targets)).tags)

    async def get(self, keys: Sequence[BlockKey], targets: Sequence[memoryview]) -> Got:
        """Read the leading run into targets of the blocks' sizes; their tags, as they were put."""
        if not targets:
            return Got([])
        parts = [flat(target) for target in targets]
        try:
            return await _run(self._readers, lambda stop: self.log.get(keys, parts, stop))
        finally:
            self._tell_lost()

    async def store(self, keys: Sequence[BlockKey], data: memoryview) -> int:
        """Keep as many leading blocks as fit without evicting; how many."""
        if not keys:
            return 0
        data = flat(data)
        size, rest = divmod(data.nbytes, len(keys))
        if rest or not size:
            raise ValueError(f"{data.nbytes} bytes are not {len(keys)} blocks of one size")
        blocks = [NewBlock(key, data[n * size : (n + 1) * size]) for n, key in enumerate(keys)]
        return (await self.put(blocks)).kept

    async def put(self, blocks: Sequence[NewBlock]) -> Written:
        """Write blocks with their tags; what was not written, and why, is counted.

        The blocks' memory must stay as it is until this returns or raises.
        """
        keys = [block.key for block in blocks]
        size = sum(block.body.nbytes for block in blocks)
        held = self.log.held(keys)
        busy = self._pending_bytes + size > self.log.spec.max_pending
        if busy and held < len(keys):
            self.log.refuse(len(keys) - held, Refusal.BUSY, already=held)
            return Written(held, 0, held, Refusal.BUSY)
        self._pending_bytes += size
        try:
            return await _run(self._writer, lambda stop: self.log.put(blocks, stop))
        finally:
            self._pending_bytes -= size
            if self._feed is not None:  # what was evicted meanwhile must not come back
                self._feed.add([key for key in keys if self.log.held([key])])
            self._tell_lost()

    def evict(self, blocks: int) -> list[BlockKey]:
        """Forget up to `blocks`, coldest first, and the states that hang on them; their keys. A
        read under way still gets them.
        """
        gone = self._forgotten(self.log.evict(blocks))
        states = [key for one in gone for key in attached(one, lambda key: self.held([key]) > 0)]
        return gone + self.forget(states) if states else gone

    def forget(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Forget these; which of them were held."""
        return self._forgotten(self.log.forget(keys))

    async def flush(self) -> bool:
        """Return once all that was put and evicted is on stable storage; False if it isn't."""
        return await _run(self._writer, self.log.flush)

    async def upkeep(self) -> None:
        """Put evictions on disk and compact ahead of need; runs until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(UPKEEP_S):
                    await self._wake.wait()
            self._wake.clear()
            await _run(self._writer, self.log.maintain)
            self._tell_lost()

    async def close(self) -> None:
        """Write what is pending and close the log; calls under way end first."""
        await _run(self._writer, lambda stop: self.log.close())
        self._writer.shutdown()
        self._readers.shutdown()

    def _forgotten(self, keys: list[BlockKey]) -> list[BlockKey]:
        if self._feed is not None:
            self._feed.remove(keys)
        if keys:
            self._wake.set()
        return keys

    def _tell_lost(self) -> None:
        lost = self.log.take_lost()
        if self._feed is None:
            return
        self._feed.remove([key for key in lost if not self.log.held([key])])
        if self.log.access is Access.NONE and len(self._feed):
            self._feed.clear()


@asynccontextmanager
async def open_ssd_tier(
    spec: SsdSpec,
    *,
    feed: Holdings | None = None,
    cost: TierCost = COST,
    disk: Disk | None = None,
) -> AsyncIterator[SsdTier]:
    """Open or make a log and look after it; closed on the way out.

    ConfigError, with nothing changed on disk: see `ssdlog.recovery.open_volume`.
    """
    tier = SsdTier(await _opened(spec, disk), feed=feed, cost=cost)
    try:
        async with asyncio.TaskGroup() as tasks:
            upkeep = tasks.create_task(tier.upkeep(), name="ssd-upkeep")
            try:
                yield tier
            finally:
                upkeep.cancel()
    finally:
        await tier.close()


async def _opened(spec: SsdSpec, disk: Disk | None) -> SsdLog:
    opened: list[SsdLog] = []
    try:
        await _run(None, lambda stop: opened.append(SsdLog.open(spec, disk)))
    except asyncio.CancelledError:
        for log in opened:
            log.close()
        raise
    return opened[0]


async def _run(executor: Executor | None, work: Callable[[Stop], Result]) -> Result:
    result, _ = await in_thread(work, ends_s=math.inf, executor=executor)
    return result
