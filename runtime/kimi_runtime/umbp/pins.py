"""Answering PIN: the leading run in memory, kept in place for its reader, and why it ends there."""

from collections.abc import Sequence
from dataclasses import dataclass

from kimi_connect import payloads
from kimi_connect.wire import Gap, PinnedBlock
from kimi_runtime import clock
from kimi_runtime.umbp.pool import Pool

PAGES_AN_ANSWER = 65_536
"""Pages one answer may list at most, which bounds its size also when they are all scattered."""


@dataclass(slots=True)
class LostBlocks:
    """Blocks that clients asked for and did not get, by the reason the run ended."""

    hit: int = 0
    local_hit: int = 0
    """Of the hits, those clients took from the arena without asking."""
    miss: int = 0
    evicted: int = 0
    unavailable: int = 0
    late: int = 0
    corrupt: int = 0

    def lose(self, blocks: int, gap: Gap) -> None:
        """Count the blocks behind a gap."""
        match gap:
            case Gap.EVICTED:
                self.evicted += blocks
            case Gap.CORRUPT:
                self.corrupt += blocks
            case Gap.LATE:
                self.late += blocks
            case Gap.MISS:
                self.miss += blocks
            case Gap.NONE:
                pass


def pinned_payload(
    pool: Pool,
    lost: LostBlocks,
    keys: Sequence[bytes],
    *,
    reader: int,
    failure: Gap = Gap.NONE,
    more: bool = False,
) -> bytes:
    """Pin the run of `keys` in memory for `reader`; PINNED's payload.

    `failure` is why the block behind the run did not come from SSD. `more`: it will, when asked for
    again. An answer cut short for that, or for its size, has no gap.
    """
    run = pool.held(keys)
    fits = pool.within(keys[:run], PAGES_AN_ANSWER)
    cut = fits < run or (more and run > 0)
    pinned = pool.pin(keys[:fits] if cut else keys, reader=reader, now_s=clock.now_s())
    ssd_failed = pinned.gap is not Gap.NONE and failure in (Gap.CORRUPT, Gap.LATE)
    gap = failure if ssd_failed else pinned.gap
    lost.lose(len(keys) - len(pinned.blocks) if gap is not Gap.NONE else 0, gap)
    asked = keys if gap is not Gap.NONE else keys[: len(pinned.blocks)]
    pool.ghosts.asked(asked, len(pinned.blocks), lambda key: pool.block(key) is not None)
    blocks = [
        PinnedBlock(block.generation, block.size, block.tags, block.extents)
        for block in pinned.blocks
    ]
    return payloads.pack_pinned(pinned.number, gap, blocks)
