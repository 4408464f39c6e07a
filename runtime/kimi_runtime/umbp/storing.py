"""Putting a part of what a client stores, beside an event loop; see `kimi_connect.storing`."""

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from kimi_connect import payloads, small_puts
from kimi_connect.blocks import Place, fill, flat
from kimi_connect.connection import ANSWER_S
from kimi_connect.placing import Written
from kimi_connect.stocking import StockPut
from kimi_connect.storing import Stored, stored
from kimi_connect.wire import Grant, Op, Priority, WireError
from kimi_runtime import clock
from kimi_runtime.transfer.background import INLINE_BYTES, Stop, in_thread
from kimi_runtime.umbp.link import Link, LinkLost, answered
from kimi_runtime.umbp.relink import Relink
from kimi_runtime.umbp.tags import leaves


class Putting(NamedTuple):
    """How blocks are put: their layer groups, until when, for whom."""

    groups: Sequence[int]
    ends_s: float
    tenant: str
    priority: Priority


async def store_part(
    daemon: Relink, keys: Sequence[bytes], blocks: Sequence[memoryview], how: Putting
) -> Stored:
    """Put blocks until one does not fit. LinkLost, TimeoutError, WireError.

    What the daemon could not be told of in time is said not to be put, though it may read that yet
    and keep it: who puts it again finds it there.
    """
    link = await daemon.connected(how.ends_s)
    assert link.stock is not None
    views = [flat(block) for block in blocks]
    small = sum(view.nbytes for view in views) <= small_puts.SMALL_PUT_BYTES
    into = StockPut(link.stock, keys, views, how.tenant, how.priority, clock.now_s)
    await _into_stock(daemon, link, into, how)
    done = into.done
    if done == len(keys):
        return Stored(done, done, done if into.told < 2 else 0)
    by_asking = _in_one_call if small else _in_two_steps
    try:
        if clock.now_s() >= how.ends_s:
            raise TimeoutError("the deadline passed before all was put")  # make room for nothing
        # of all, so that nothing of this very put makes room for its rest
        asked = await by_asking(daemon, link, keys, views, how)
    except (LinkLost, TimeoutError, WireError):
        if not done:
            raise
        return Stored(len(keys), done, 0)
    if (told := into.ask(link.stock)) is not None:
        with contextlib.suppress(
            LinkLost, TimeoutError
        ):  # that is for a later put; this one is done
            await link.keep(told, within_s=ANSWER_S)
    return asked._replace(fresh=0) if done else asked


async def _into_stock(daemon: Relink, link: Link, into: StockPut, how: Putting) -> None:
    assert link.stock is not None
    while clock.now_s() < how.ends_s and (part := into.part()) is not None:
        written: list[Written] = []
        if part.places:  # else nothing is claimed
            try:
                written = await _filled(daemon, link, part.keys, part.places, part.views, how)
            except BaseException:
                link.stock.let_go()
                raise
        told = into.keep(part, written)
        if told is None:
            return
        await link.keep(told, within_s=max(ANSWER_S, how.ends_s - clock.now_s()))


async def _in_one_call(
    daemon: Relink, link: Link, keys: Sequence[bytes], views: Sequence[memoryview], how: Putting
) -> Stored:
    """Have the daemon write them."""
    small = small_puts.tagged(keys, views, how.groups, leaves)
    put = small_puts.pack_put(small, how.tenant, how.priority)
    answer = await link.call(Op.PUT, put, within_s=how.ends_s - clock.now_s())
    kept = payloads.unpack_number(answered(answer, Op.COUNT))
    return Stored(len(keys), kept, kept)


async def _in_two_steps(
    daemon: Relink, link: Link, keys: Sequence[bytes], views: Sequence[memoryview], how: Putting
) -> Stored:
    """Have pages reserved, write to them, commit."""
    items = [(key, view.nbytes) for key, view in zip(keys, views, strict=True)]
    asked = payloads.pack_reserve(items, how.tenant, how.priority)
    answer = await link.call(Op.RESERVE, asked, within_s=how.ends_s - clock.now_s())
    grants = payloads.unpack_reserved(answered(answer, Op.RESERVED))
    mine = [n for n, granted in enumerate(grants) if granted.grant is Grant.RESERVED]
    assert link.arena is not None
    places = [Place.of(grants[n], views[n].nbytes, link.arena) for n in mine]
    blocks = [views[n] for n in mine]
    written = await _filled(daemon, link, [keys[n] for n in mine], places, blocks, how)
    answer = await link.call(
        Op.COMMIT,
        payloads.pack_commit(written),
        within_s=max(ANSWER_S, how.ends_s - clock.now_s()),
    )
    return stored(grants, payloads.unpack_committed(answered(answer, Op.COMMITTED)))


async def _filled(
    daemon: Relink,
    link: Link,
    keys: Sequence[bytes],
    places: Sequence[Place],
    blocks: Sequence[memoryview],
    how: Putting,
) -> list[Written]:
    """What was written whole of places that came by way of `link`; the rest is given back."""
    generations = {place.generation for place in places}
    written: list[Written] = []

    def work(stop: Stop) -> list[Written]:
        return fill(keys, places, blocks, how.groups, leaves, stop)

    daemon.writing |= generations
    try:
        if sum(block.nbytes for block in blocks) <= INLINE_BYTES:
            written = work(Stop())
        else:
            written, _ = await in_thread(work, ends_s=how.ends_s)
    finally:
        daemon.wrote(link, generations, {generation for generation, _ in written})
    return written
