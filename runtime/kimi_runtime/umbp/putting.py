"""Keeping blocks that came with their PUT: the daemon writes them, and they are visible at once."""

from collections.abc import Sequence

from kimi_connect.arena import Arena
from kimi_connect.copying import copy_bytes, matched
from kimi_connect.small_puts import SmallBlock
from kimi_connect.storing import stored
from kimi_connect.wire import Grant, Priority
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.tiers.dram import OWN_WRITER


def put(
    pool: Pool,
    arena: Arena,
    blocks: Sequence[SmallBlock],
    *,
    tenant: str,
    priority: Priority,
    now_s: float,
) -> int:
    """Put blocks, evicting colder ones; how many leading ones the pool holds now.

    The reservations are the daemon's own: one that a crash cuts is nobody's to write to any more.
    Like a client's, they are ended by the commit of what was written whole, before anything else
    of the daemon runs.
    """
    items = [(block.key, block.data.nbytes) for block in blocks]
    grants = pool.reserve(
        items, writer=OWN_WRITER, now_s=now_s, tenant=tenant, priority=priority, as_one=True
    )
    written = []
    for block, granted in zip(blocks, grants, strict=True):
        if granted.grant is Grant.RESERVED:
            parts = list(arena.parts(granted.extents, block.data.nbytes))
            for part, piece in matched(parts, block.data):
                copy_bytes(part, piece)
            written.append((granted.generation, block.tags))
    states = pool.commit(written, writer=OWN_WRITER, now_s=now_s)
    run = stored(grants, states).kept
    if len(written) < len(grants):  # what one commit made visible is in order already
        pool.touch([block.key for block in blocks[:run]], now_s)
    return run
