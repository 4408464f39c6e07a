"""Putting a part of what a client stores, beside an event loop; see `kimi_connect.storing`."""

from collections.abc import Sequence

from kimi_connect import payloads, small_puts
from kimi_connect.blocks import copy_in, flat
from kimi_connect.connection import ANSWER_S
from kimi_connect.placing import Written
from kimi_connect.storing import Stored, stored
from kimi_connect.wire import Grant, Granted, Op, Priority
from kimi_runtime import clock
from kimi_runtime.transfer.background import INLINE_BYTES, Stop, in_thread
from kimi_runtime.umbp.link import Link, answered
from kimi_runtime.umbp.relink import Relink
from kimi_runtime.umbp.tags import leaves


async def store_part(
    daemon: Relink,
    keys: Sequence[bytes],
    blocks: Sequence[memoryview],
    groups: Sequence[int],
    ends_s: float,
    *,
    tenant: str,
    priority: Priority,
) -> Stored:
    """Put blocks until one does not fit. LinkLost, TimeoutError, WireError."""
    link = await daemon.connected(ends_s)
    views = [flat(block) for block in blocks]
    if sum(view.nbytes for view in views) <= small_puts.SMALL_PUT_BYTES:
        small = small_puts.tagged(keys, views, groups, leaves)
        put = small_puts.pack_put(small, tenant, priority)
        answer = await link.call(Op.PUT, put, within_s=ends_s - clock.now_s())
        kept = payloads.unpack_number(answered(answer, Op.COUNT))
        return Stored(len(keys), kept, kept)
    items = [(key, view.nbytes) for key, view in zip(keys, views, strict=True)]
    asked = payloads.pack_reserve(items, tenant, priority)
    answer = await link.call(Op.RESERVE, asked, within_s=ends_s - clock.now_s())
    grants = payloads.unpack_reserved(answered(answer, Op.RESERVED))
    mine = [n for n, granted in enumerate(grants) if granted.grant is Grant.RESERVED]
    written = await _copy_in(
        daemon,
        link,
        [keys[n] for n in mine],
        [grants[n] for n in mine],
        [views[n] for n in mine],
        groups,
        ends_s,
    )
    answer = await link.call(
        Op.COMMIT,
        payloads.pack_commit(written),
        within_s=max(ANSWER_S, ends_s - clock.now_s()),
    )
    return stored(grants, payloads.unpack_committed(answered(answer, Op.COMMITTED)))


async def _copy_in(
    daemon: Relink,
    link: Link,
    keys: Sequence[bytes],
    grants: Sequence[Granted],
    blocks: Sequence[memoryview],
    groups: Sequence[int],
    ends_s: float,
) -> list[Written]:
    arena = link.arena
    assert arena is not None
    generations = {granted.generation for granted in grants}
    written: list[Written] = []

    def work(stop: Stop) -> list[Written]:
        return copy_in(arena, keys, grants, blocks, groups, leaves, stop)

    daemon.writing |= generations
    try:
        if sum(block.nbytes for block in blocks) <= INLINE_BYTES:
            written = work(Stop())
        else:
            written, _ = await in_thread(work, ends_s=ends_s)
    finally:
        daemon.wrote(link, generations, {generation for generation, _ in written})
    return written
