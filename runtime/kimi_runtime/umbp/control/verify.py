"""Reading every block of memory and SSD against its tags, slowly enough for requests.

Readers check their copies in any case; this finds what nobody has read yet. What does not match is
dropped, so that it is computed again, and told by its key.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

from kimi_connect.arena import Arena
from kimi_runtime import clock
from kimi_runtime.errors import RequestError
from kimi_runtime.transfer.background import Stop, in_thread
from kimi_runtime.umbp.clients import Clients
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.proto import control_pb2 as wire
from kimi_runtime.umbp.records import Block
from kimi_runtime.umbp.tags import matches
from kimi_runtime.umbp.tiers.dram import OWN_READER
from kimi_runtime.umbp.tiers.ssd import SsdTier

TIERS = ("memory", "ssd")
BATCH_BYTES = 8 << 20
MAX_RUN = 1024
BYTES_PER_S = 256 << 20
"""At most, if the caller names no bound: a small part of a memory channel, and of an SSD."""


async def verify(
    clients: Clients, asked: wire.VerifyRequest
) -> AsyncGenerator[wire.VerifyProgress, None]:
    """Check the tiers one after another; progress after every batch. RequestError for others."""
    unknown = set(asked.tiers) - set(TIERS)
    if unknown:
        raise RequestError(f"{', '.join(sorted(unknown))}: the tiers are {' and '.join(TIERS)}")
    pace = _Pace(asked.bytes_per_s or BYTES_PER_S)
    wanted = asked.tiers or TIERS
    if "memory" in wanted:
        async for progress in _memory(clients.pool, clients.arena, pace, clients.changed):
            yield progress
    if "ssd" in wanted and clients.second is not None:
        async for progress in _ssd(clients.second.tier, pace):
            yield progress


async def _memory(
    pool: Pool, arena: Arena, pace: "_Pace", changed: Callable[[], None]
) -> AsyncGenerator[wire.VerifyProgress, None]:
    # The coldest batch first and, within it, the warmest block: a pin that ends queues its blocks
    # anew from its end, so that all keep their order.
    blocks = pool.warmest()[::-1]
    progress = wire.VerifyProgress(tier="memory", total_blocks=len(blocks))
    for batch in _batches(blocks):
        here = [block.key for block in batch[::-1] if pool.block(block.key) is block]
        damaged = await _damaged(pool, arena, here)
        for block in damaged:
            pool.drop(block.key, block.generation)
        changed()
        size = sum(block.size for block in batch)
        yield _further(progress, len(batch), size, [block.key for block in damaged])
        await pace.spent(size)
    progress.done = True
    del progress.damaged[:]
    yield progress


async def _damaged(pool: Pool, arena: Arena, keys: Sequence[bytes]) -> list[Block]:
    """Which of these blocks do not match their tags, where they lie. They stay meanwhile."""
    pinned = pool.pin(keys, reader=OWN_READER, now_s=math.inf)  # which counts as no use

    def work(stop: Stop) -> list[Block]:
        return [b for b in pinned.blocks if not stop() and not intact(arena, b)]

    try:
        damaged, _ = await in_thread(work, ends_s=math.inf)
    finally:
        pool.unpin(pinned.number, (), reader=OWN_READER, now_s=clock.now_s())
    return damaged


def intact(arena: Arena, block: Block) -> bool:
    """Whether a block's bytes in the arena are the ones its tags were made of."""
    parts = list(arena.parts(block.extents, block.size))
    whole = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
    sizes = [group.size for group in block.tags]
    return sum(sizes) == block.size and matches(
        block.key, sizes, whole, [group.tag for group in block.tags]
    )


async def _ssd(tier: SsdTier, pace: "_Pace") -> AsyncGenerator[wire.VerifyProgress, None]:
    keys = tier.keys()
    progress = wire.VerifyProgress(tier="ssd", total_blocks=len(keys))
    buffer = memoryview(bytearray(BATCH_BYTES))
    while keys:
        run = _fitting(tier.sizes(keys[:MAX_RUN]), BATCH_BYTES)
        if not run:  # evicted since they were listed
            keys = keys[1:]
            continue
        if sum(run) > buffer.nbytes:
            buffer = memoryview(bytearray(sum(run)))
        before = _failures(tier)
        good = await tier.load(keys[: len(run)], buffer[: sum(run)])
        gone = [key for key in keys[good : len(run)] if not tier.held([key])]
        bad = gone if _failures(tier) > before else []
        again = [key for key in keys[good : len(run)] if key not in gone] if good or gone else []
        keys = again + keys[len(run) :]
        size = sum(run[:good])
        yield _further(progress, good + len(gone), size, bad)
        await pace.spent(size)
    progress.done = True
    del progress.damaged[:]
    yield progress


def _failures(tier: SsdTier) -> int:
    stats = tier.stats()
    return stats.corrupt + stats.unreadable


def _fitting(sizes: Sequence[int], most: int) -> list[int]:
    """The leading sizes that are at most `most` together, but at least one."""
    run: list[int] = []
    for size in sizes:
        if run and sum(run) + size > most:
            break
        run.append(size)
    return run


def _batches(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    at = 0
    while at < len(blocks):
        count = len(_fitting([block.size for block in blocks[at : at + MAX_RUN]], BATCH_BYTES))
        yield list(blocks[at : at + count])
        at += count


def _further(
    progress: wire.VerifyProgress, blocks: int, size: int, damaged: Sequence[bytes]
) -> wire.VerifyProgress:
    progress.checked_blocks += blocks
    progress.checked_bytes += size
    progress.damaged[:] = damaged
    return progress


class _Pace:
    """Lets at most `bytes_per_s` pass."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._due_s = bytes_per_s, clock.now_s()

    async def spent(self, size: int) -> None:
        """So many bytes were read: wait until they may have been."""
        now_s = clock.now_s()
        self._due_s = max(self._due_s, now_s - 1.0) + size / self._bytes_per_s
        await asyncio.sleep(max(0.0, self._due_s - now_s))
