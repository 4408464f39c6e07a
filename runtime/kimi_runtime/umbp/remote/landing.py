"""What an owner lent, copied into our pages, checked there and committed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kimi_connect.arena import Arena
from kimi_connect.wire import Commitment, Extent, Grant, Granted, GroupTag
from kimi_runtime import clock
from kimi_runtime.errors import ProtocolError, TransferLate
from kimi_runtime.spec.peers import LendAnswer, LentBlock
from kimi_runtime.transfer.background import Stop, in_thread
from kimi_runtime.transfer.base import Span
from kimi_runtime.transfer.sessions import SessionCache
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.remote.places import spans_between
from kimi_runtime.umbp.tags import matches
from kimi_runtime.umbp.tiers.dram import OWN_WRITER


@dataclass(slots=True)
class Loan:
    """What an owner lent, and what became of it."""

    pin: int = 0
    cut: bool = False
    landed: list[bytes] = field(default_factory=list)
    landed_bytes: int = 0
    corrupt: list[int] = field(default_factory=list)


class Landing:
    """Copies by `sessions` into the pages of `pool`, which lie in `arena`."""

    def __init__(self, pool: Pool, arena: Arena, sessions: SessionCache) -> None:
        self._pool, self._arena, self._sessions = pool, arena, sessions

    async def land(
        self,
        answer: LendAnswer,
        blocks: Sequence[LentBlock],
        keys: Sequence[bytes],
        grants: Sequence[Granted],
        loan: Loan,
        ends_s: float,
        arrived: Callable[[Sequence[bytes]], None],
    ) -> None:
        """Copy, check and commit the blocks that have pages; `loan` says which came.

        `arrived` is told of those that were not here before.

        Raises what `Session.read` does, TransferLate also where the time is over before all are
        checked, and ValueError for places outside either memory.
        """
        mine = [n for n, grant in enumerate(grants) if grant.grant is Grant.RESERVED]
        if not mine:
            return
        spans: list[Span] = []
        for n in mine:
            theirs = [Extent(e.first, e.pages) for e in blocks[n].extents]
            place = (theirs, answer.page_bytes, grants[n].extents, self._pool.page_bytes)
            spans += spans_between(*place, blocks[n].size)
        left_s = ends_s - clock.now_s()
        async with self._sessions.session(answer.region, deadline_s=left_s) as session:
            left_s = ends_s - clock.now_s()
            await session.read(spans, self._arena.data, deadline_s=left_s)
        landed = [(keys[n], blocks[n], grants[n]) for n in mine]
        verdicts, _ = await in_thread(lambda stop: self._verdicts(landed, stop), ends_s=ends_s)
        checked = list(zip(mine, verdicts, strict=False))
        loan.corrupt = [n for n, intact in checked if not intact]
        good = [n for n, intact in checked if intact]
        done = [(grants[n].generation, tags_of(blocks[n])) for n in good]
        states = self._pool.commit(done, writer=OWN_WRITER, now_s=clock.now_s())
        came = [n for n, s in zip(good, states, strict=True) if s is not Commitment.EXPIRED]
        new = [n for n, s in zip(good, states, strict=True) if s is Commitment.COMMITTED]
        loan.landed = [keys[n] for n in came]
        loan.landed_bytes = sum(blocks[n].size for n in came)
        arrived([keys[n] for n in new])
        if len(checked) < len(mine):
            raise TransferLate(f"{len(mine) - len(checked)} blocks came too late to be checked")

    def _verdicts(
        self, landed: Sequence[tuple[bytes, LentBlock, Granted]], stop: Stop
    ) -> list[bool]:
        """Whether the bytes of each, where they landed, match their tags; as far as it came."""
        verdicts: list[bool] = []
        for key, block, grant in landed:
            if stop():
                break
            parts = list(self._arena.parts(grant.extents, block.size))
            whole = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
            tags = tags_of(block)
            verdicts.append(matches(key, [t.size for t in tags], whole, [t.tag for t in tags]))
        return verdicts


def sound_blocks(answer: LendAnswer, asked: int, max_bytes: int) -> list[LentBlock]:
    """The blocks of an answer; ProtocolError if they are not what can have been asked for."""
    blocks = list(answer.blocks)
    if len(blocks) > asked or sum(block.size for block in blocks) > max_bytes:
        raise ProtocolError(f"{answer.region.peer} lends more than it was asked for")
    for block in blocks:
        if sum(tag.size for tag in block.tags) != block.size:
            raise ProtocolError(f"{answer.region.peer} lends a block that its tags do not cover")
    return blocks


def tags_of(block: LentBlock) -> tuple[GroupTag, ...]:
    return tuple(GroupTag(tag.size, bytes.fromhex(tag.tag)) for tag in block.tags)
