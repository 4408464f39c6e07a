"""Loading a part of what a client asks for, beside an event loop: straight from the arena where its
directory lists a block, else what the daemon pins.
"""

from collections.abc import Sequence

from kimi_connect import payloads, wire
from kimi_connect.blocks import CopiedOut, copy_local, copy_out
from kimi_connect.connection import ANSWER_S
from kimi_connect.wire import Gap, Op, Outcome
from kimi_runtime import clock
from kimi_runtime.transfer.background import INLINE_BYTES, Stop, in_thread
from kimi_runtime.umbp.block_pool import LoadResult
from kimi_runtime.umbp.link import Link, LinkLost, answered
from kimi_runtime.umbp.relink import Relink
from kimi_runtime.umbp.speed import MeasuredCost
from kimi_runtime.umbp.tags import leaves


async def load_local(
    daemon: Relink,
    keys: Sequence[bytes],
    into: Sequence[memoryview],
    ends_s: float,
    copying: MeasuredCost,
) -> int:
    """How many leading blocks came from the arena without the daemon; `copying` learns how fast."""
    arena = daemon.arena
    if not keys or arena is None or not arena.live or clock.now_s() >= ends_s:
        return 0
    if arena.directory.find(keys[0]) is None:
        return 0

    def work(stop: Stop) -> int:
        return copy_local(arena, keys, into, leaves, stop)

    start_s = clock.now_s()
    if sum(target.nbytes for target in into) <= INLINE_BYTES:
        done = work(Stop())
    else:
        done, _ = await in_thread(work, ends_s=ends_s)
    copying.observe(sum(t.nbytes for t in into[:done]), clock.now_s() - start_s)
    daemon.tell_of(Op.SERVED, keys[:done])
    return done


async def load_part(
    daemon: Relink,
    keys: Sequence[bytes],
    into: Sequence[memoryview],
    ends_s: float,
    tenant: str,
) -> LoadResult:
    """What the daemon has of the leading run, up to its first gap."""
    try:
        link = await daemon.connected(ends_s)
        within_s = ends_s - clock.now_s()
        asked = payloads.pack_pin(list(keys), within_s, tenant)
        answer = await link.call(Op.PIN, asked, within_s=within_s)
        pin, gap, blocks = payloads.unpack_pinned(answered(answer, Op.PINNED))
    except (LinkLost, wire.WireError):
        return _without(daemon, Outcome.UNAVAILABLE, len(keys))
    except TimeoutError:
        return _without(daemon, Outcome.LATE, len(keys))
    if not blocks:
        return LoadResult(0, wire.outcome_of(gap) if gap is not Gap.NONE else Outcome.MISS)
    copied, late = await _copy_out(link, pin, keys, blocks, into, ends_s)
    try:
        answer = await link.call(
            Op.UNPIN,
            payloads.pack_unpin(pin, copied.good, corrupt=copied.corrupt is not None),
            within_s=max(ANSWER_S, ends_s - clock.now_s()),
        )
        protected = payloads.unpack_number(answered(answer, Op.COUNT))
    except (LinkLost, TimeoutError, wire.WireError):
        return _without(daemon, Outcome.UNAVAILABLE, len(keys))
    if not protected:
        return LoadResult(0, Outcome.LATE)  # the daemon counts a lapsed pin itself
    if copied.corrupt is not None:
        return LoadResult(copied.good, Outcome.CORRUPT)
    if late:
        return LoadResult(copied.good, Outcome.LATE)
    return LoadResult(copied.good, wire.outcome_of(gap))


async def _copy_out(
    link: Link,
    pin: int,
    keys: Sequence[bytes],
    blocks: Sequence[wire.PinnedBlock],
    into: Sequence[memoryview],
    ends_s: float,
) -> tuple[CopiedOut, bool]:
    arena = link.arena
    assert arena is not None

    def work(stop: Stop) -> CopiedOut:
        return copy_out(arena, keys, blocks, into, leaves, stop)

    async def renew() -> None:
        link.tell(Op.RENEW, payloads.pack_number(pin))

    try:
        if sum(block.size for block in blocks) <= INLINE_BYTES:
            return work(Stop()), False
        return await in_thread(work, ends_s=ends_s, poke=renew, every_s=link.pin_lease_s / 3)
    except BaseException:
        link.tell(Op.UNPIN, payloads.pack_unpin(pin, 0, corrupt=False))
        raise


def _without(daemon: Relink, outcome: Outcome, blocks: int) -> LoadResult:
    daemon.unseen(outcome, blocks)
    return LoadResult(0, outcome)
