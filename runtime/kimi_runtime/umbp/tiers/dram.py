"""The DRAM tier: blocks in the pages of a node's arena file."""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from kimi_connect.arena import Arena
from kimi_connect.blocks import copy_in, copy_out, flat
from kimi_connect.storing import stored
from kimi_connect.wire import Grant, PinnedBlock
from kimi_runtime import clock
from kimi_runtime.transfer.background import Stop, in_thread
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.records import Block
from kimi_runtime.umbp.tags import leaves
from kimi_runtime.umbp.tiers.base import BlockKey, TierCost

Result = TypeVar("Result")

COST = TierCost(latency_s=1e-4, bytes_per_s=5e9)
"""One core's copy and check; a machine's own figure comes from benchmarks/umbp.py."""

OWN_READER = 0
OWN_WRITER = b"this daemon's own"


class DramTier:
    """The daemon's own reads and writes of the pool its clients share.

    Clients copy for themselves (`pool.reserve`, `pool.pin` through the socket); other tiers of the
    daemon use these calls. Copies run in a thread, pinned or reserved meanwhile. Cancelling a call
    waits for its copy to stop, then gives everything back.
    """

    def __init__(self, pool: Pool, arena: Arena, *, cost: TierCost = COST) -> None:
        self.pool, self.arena = pool, arena
        self._cost = cost

    @property
    def cost(self) -> TierCost:
        """What a load costs."""
        return self._cost

    def held(self, keys: Sequence[BlockKey]) -> int:
        """Length of the leading run of `keys` held here."""
        return self.pool.held(keys)

    async def load(self, keys: Sequence[BlockKey], into: memoryview) -> int:
        """Copy the leading run that fits into `into`, verified; its length."""
        pinned = self.pool.pin(keys, reader=OWN_READER, now_s=clock.now_s())
        targets = _cut(flat(into), [block.size for block in pinned.blocks])
        blocks = [_to_read(block) for block in pinned.blocks]
        corrupt: list[int] = []
        good = 0
        try:
            copied = await _copying(
                lambda stop: copy_out(self.arena, keys, blocks, targets, leaves, stop)
            )
            good = copied.good
            corrupt += [copied.corrupt] if copied.corrupt is not None else []
        finally:
            held = self.pool.unpin(pinned.number, corrupt, reader=OWN_READER, now_s=clock.now_s())
        return good if held else 0

    async def store(self, keys: Sequence[BlockKey], data: memoryview) -> int:
        """Keep as many leading blocks as fit without evicting; how many."""
        if not keys:
            return 0
        data = flat(data)
        size, rest = divmod(data.nbytes, len(keys))
        if rest or not size:
            raise ValueError(f"{data.nbytes} bytes are not {len(keys)} blocks of one size")
        grants = self.pool.reserve(
            [(key, size) for key in keys], writer=OWN_WRITER, now_s=clock.now_s(), evict=False
        )
        mine = [n for n, granted in enumerate(grants) if granted.grant is Grant.RESERVED]
        blocks = [data[n * size : (n + 1) * size] for n in mine]
        granted = [grants[n] for n in mine]
        try:
            wanted = [keys[n] for n in mine]
            written = await _copying(
                lambda stop: copy_in(self.arena, wanted, granted, blocks, (), leaves, stop)
            )
        except BaseException:
            self.pool.abort((g.generation for g in granted), writer=OWN_WRITER)
            raise
        states = self.pool.commit(written, writer=OWN_WRITER, now_s=clock.now_s())
        return stored(grants, states).kept

    def evict(self, blocks: int) -> list[BlockKey]:
        """Forget up to `blocks` unpinned blocks, coldest first; their keys."""
        return self.pool.evict(blocks)


async def _copying(work: Callable[[Stop], Result]) -> Result:
    result, _ = await in_thread(work, ends_s=math.inf)
    return result


def _to_read(block: Block) -> PinnedBlock:
    return PinnedBlock(block.generation, block.size, block.tags, block.extents)


def _cut(view: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """Consecutive parts of `view` of these sizes, as far as they fit whole."""
    parts, at = [], 0
    for size in sizes:
        if at + size > view.nbytes:
            break
        parts.append(view[at : at + size])
        at += size
    return parts
