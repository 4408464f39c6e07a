"""Which blocks of the pool's memory are worth writing to its SSD. Pure.

A prompt that comes once must not push out what comes again, so what decides is reuse: a block goes
to SSD once engines had a use for it `after_uses` times. Computing and putting it is the first use;
a load counts, and so does finding it in an engine's own memory (`Op.USED`), without which the pool
would never hear of the hottest prefixes. A block is of no use without those before it: where one of
a run is neither on SSD nor worth it, what follows isn't either.
"""

from collections.abc import Callable, Sequence

from kimi_runtime.umbp.holdings import Holdings
from kimi_runtime.umbp.records import Block


def worth_writing(
    keys: Sequence[bytes],
    block: Callable[[bytes], Block | None],
    on_ssd: Holdings,
    *,
    after_uses: int,
) -> list[Block]:
    """The blocks of a run of `keys`, in its order, to be written; `block` finds those in memory."""
    worthy = []
    for key in keys:
        if key in on_ssd:
            continue
        found = block(key)
        if found is None or found.uses < after_uses:
            break
        worthy.append(found)
    return worthy
