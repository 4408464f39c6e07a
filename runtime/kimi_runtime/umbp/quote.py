"""Where the blocks of a run would come from, and how long that takes, before anybody waits."""

from collections.abc import Iterator, Sequence

from kimi_connect.wire import Source, Stretch
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.remote.fetch import Fetcher
from kimi_runtime.umbp.second_tier import SecondTier


def quote(
    keys: Sequence[bytes],
    block_bytes: int,
    pool: Pool,
    second: SecondTier | None,
    fetcher: Fetcher | None,
) -> Iterator[Stretch]:
    """The leading run of `keys` that memory, SSD and peers have, in stretches of one source each.

    A block that several have comes from the first of them. Seconds are as measured lately, behind
    what is under way; `block_bytes` says how large blocks are whose sizes only peers know.
    """
    run = 0
    while run < len(keys):
        rest = keys[run:]
        if blocks := pool.held(rest):
            yield Stretch(blocks, Source.MEMORY, 0.0)
        elif second is not None and (blocks := second.tier.held(rest)):
            blocks = next((n for n in range(blocks) if pool.block(rest[n])), blocks)
            seconds = second.promoter.seconds(sum(second.tier.sizes(rest[:blocks])))
            yield Stretch(blocks, Source.SSD, seconds)
        elif fetcher is not None and (blocks := fetcher.run(rest)):
            here = (n for n in range(blocks) if _is_here(rest[n], pool, second))
            blocks = next(here, blocks)
            yield Stretch(blocks, Source.PEER, fetcher.seconds(rest[:blocks], block_bytes))
        else:
            return
        run += blocks


def _is_here(key: bytes, pool: Pool, second: SecondTier | None) -> bool:
    return pool.block(key) is not None or (second is not None and second.tier.held([key]) > 0)
