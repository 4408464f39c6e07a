"""Answering PIN: the leading run in memory, kept in place for its reader, and why it ends there."""

from collections.abc import Callable, Sequence

from kimi_connect import payloads
from kimi_connect.wire import Gap, PinnedBlock
from kimi_runtime import clock
from kimi_runtime.umbp.funnel import why_lost
from kimi_runtime.umbp.pool import Pool

PAGES_AN_ANSWER = 65_536
"""Pages one answer may list at most, which bounds its size also when they are all scattered."""


def pinned_payload(
    pool: Pool,
    keys: Sequence[bytes],
    *,
    reader: int,
    elsewhere: Callable[[bytes], bool],
    failure: Gap = Gap.NONE,
    more: bool = False,
) -> bytes:
    """Pin the run of `keys` in memory for `reader`; PINNED's payload.

    `failure` is why the block behind the run did not come from elsewhere, which is where a peer or
    the SSD is said to have it. `more`: it will, when asked for again. An answer cut short for that,
    or for its size, has no gap.
    """
    run = pool.held(keys)
    fits = pool.within(keys[:run], PAGES_AN_ANSWER)
    cut = fits < run or (more and run > 0)
    pinned = pool.pin(keys[:fits] if cut else keys, reader=reader, now_s=clock.now_s())
    failed = pinned.gap is not Gap.NONE and failure in (Gap.CORRUPT, Gap.LATE)
    gap = failure if failed else pinned.gap
    found = len(pinned.blocks)
    pool.funnel.pinned(pinned.number, reader, keys[:found])
    count_missed(pool, keys if gap is not Gap.NONE else keys[:found], found, gap, elsewhere)
    blocks = [
        PinnedBlock(block.generation, block.size, block.tags, block.extents)
        for block in pinned.blocks
    ]
    return payloads.pack_pinned(pinned.number, gap, blocks)


def count_missed(
    pool: Pool, keys: Sequence[bytes], found: int, gap: Gap, elsewhere: Callable[[bytes], bool]
) -> None:
    """`found` leading ones of `keys` were there: why the others are lost, and what memory would
    have kept them.
    """

    def here(key: bytes) -> bool:
        return pool.block(key) is not None

    evicted = pool.ghosts.__contains__
    lost = why_lost(keys[found:], gap, here=here, elsewhere=elsewhere, evicted=evicted)
    pool.funnel.missed(lost)
    pool.ghosts.asked(keys, found, here)
