"""The owner's side: blocks pinned for a peer while it copies them from the arena.

What is lent comes from memory, or from the SSD through memory; never from a third daemon. A pin
ends when it is given back, or when the time is over that its reader asked for. What is lent is a
bounded part of the arena, so that slow readers cannot fill it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kimi_connect.arena import Arena
from kimi_connect.wire import Gap
from kimi_runtime import clock
from kimi_runtime.errors import Overloaded
from kimi_runtime.spec.peers import (
    GiveBackAnswer,
    GiveBackRequest,
    LendAnswer,
    LendRequest,
    LentBlock,
    LentExtent,
    LentTag,
)
from kimi_runtime.spec.request import RegionRef
from kimi_runtime.transfer.background import Stop, in_thread
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.records import Block
from kimi_runtime.umbp.remote.demand import Demand
from kimi_runtime.umbp.second_tier import SecondTier
from kimi_runtime.umbp.speed import MeasuredCost
from kimi_runtime.umbp.tags import block_tags
from kimi_runtime.umbp.tiers.base import TierCost

PEER_READER = -1
"""Clients' connections have numbers above 0, the daemon's own reads are 0."""

LENT_SHARE = 4
"""At most this part of the arena is lent at a time."""

MAX_LEND_S = 10.0
SPARE_S = 1.0
"""Between the end of what a reader asked for and the pool's own end of the pin."""

log = logging.getLogger(__name__)


SPEED_PRIOR = TierCost(latency_s=2e-3, bytes_per_s=1e9)
"""A loan's length before any was given back."""


@dataclass(slots=True)
class _Loan:
    pages: int
    keys: list[bytes]
    end: asyncio.TimerHandle
    nbytes: int
    start_s: float


class Lender:
    """Lends blocks of `pool`, which lie in `region`."""

    def __init__(
        self,
        pool: Pool,
        arena: Arena,
        region: RegionRef,
        changed: Callable[[], None],
        second: SecondTier | None,
    ) -> None:
        self.lent_blocks = 0
        self.lent_bytes = 0
        self.ends: Counter[str] = Counter()
        """Loans by how they ended: given_back, lapsed."""
        self.refused = 0
        """Requests that found too much lent already."""
        self.demand = Demand()
        self.speed = MeasuredCost(SPEED_PRIOR)
        """Of peers' copying, from a loan's begin to its end."""
        self.damaged = 0
        """Blocks a peer found corrupt that are so at home: dropped."""
        self._pool, self._arena, self._region = pool, arena, region
        self._changed, self._second = changed, second
        self._loans: dict[int, _Loan] = {}
        self._most_pages = max(1, pool.total_pages // LENT_SHARE)

    @property
    def loans(self) -> int:
        """Pins of peers."""
        return len(self._loans)

    @property
    def lent_pages(self) -> int:
        """Pages that peers may be reading."""
        return sum(loan.pages for loan in self._loans.values())

    async def lend(self, asked: LendRequest) -> LendAnswer:
        """Pin the leading run that memory and SSD have. Overloaded if too much is lent already."""
        nothing = LendAnswer(
            epoch=self._arena.epoch, region=self._region, page_bytes=self._pool.page_bytes
        )
        if asked.epoch != self._arena.epoch:
            return nothing
        if self.lent_pages >= self._most_pages:
            self.refused += 1
            raise Overloaded("as much is lent to peers as may be at a time", retry_after_s=0.1)
        keys = [bytes.fromhex(key) for key in asked.keys]
        within_s = min(asked.within_ms / 1e3, MAX_LEND_S)
        ends_s = clock.now_s() + within_s
        answered: asyncio.Future[LendAnswer] = asyncio.get_running_loop().create_future()

        def answer(gap: Gap) -> None:
            # at once: what the SSD brought is safe from eviction only until this returns
            if not answered.done():
                answered.set_result(self._pinned(keys, asked, ends_s) or nothing)

        second = self._second
        if second is None or not second.help(keys, answer, within_s=within_s, tenant=asked.tenant):
            answer(Gap.MISS)
        self._changed()
        try:
            async with asyncio.timeout(within_s):
                return await answered
        except TimeoutError:
            return nothing

    async def give_back(self, asked: GiveBackRequest) -> GiveBackAnswer:
        """End a pin. Blocks said to be corrupt are dropped if their bytes here don't match."""
        loan = self._loans.get(asked.pin)
        if asked.epoch != self._arena.epoch or loan is None:
            return GiveBackAnswer(held=False)
        suspects = [loan.keys[n] for n in asked.corrupt if n < len(loan.keys)]
        blocks = [block for key in suspects if (block := self._pool.block(key)) is not None]
        try:
            if blocks:
                loan.end.cancel()  # the pages stay while they are looked at
                await self._drop_damaged(blocks)
        finally:  # also if the caller leaves meanwhile: nobody else ends it any more
            held = self._end(asked.pin, "given_back")
        return GiveBackAnswer(held=held)

    def close(self) -> None:
        """End every pin: nothing reads the arena any more."""
        for pin in list(self._loans):
            self._end(pin, "closed")

    def _pinned(
        self, keys: Sequence[bytes], asked: LendRequest, ends_s: float
    ) -> LendAnswer | None:
        """What of the leading run may be lent; None: nothing."""
        pool, max_bytes, now_s = self._pool, asked.max_bytes, clock.now_s()
        run = pool.held(keys)
        left_pages = self._most_pages - self.lent_pages
        fits = pool.within(keys[:run], min(left_pages, max_bytes // pool.page_bytes))
        blocks = [block for key in keys[:fits] if (block := pool.block(key)) is not None]
        if not blocks or blocks[0].size > max_bytes or ends_s <= now_s:
            return None
        lease_s = ends_s - now_s + SPARE_S
        pin = pool.pin(keys[:fits], reader=PEER_READER, now_s=now_s, lease_s=lease_s).number
        end = asyncio.get_running_loop().call_later(ends_s - now_s, self._end, pin, "lapsed")
        pages, nbytes = sum(b.pages for b in blocks), sum(b.size for b in blocks)
        self._loans[pin] = _Loan(pages, list(keys[:fits]), end, nbytes, now_s)
        self.lent_blocks += len(blocks)
        self.lent_bytes += nbytes
        if asked.reader:
            self._wanted(keys[:fits], asked.reader, now_s)
        return LendAnswer(
            epoch=self._arena.epoch,
            pin=pin,
            region=self._region,
            page_bytes=pool.page_bytes,
            cut=fits < run,
            blocks=tuple(map(_told, blocks)),
        )

    def _wanted(self, keys: Sequence[bytes], reader: str, now_s: float) -> None:
        """An engine somewhere has a use for these."""
        self.demand.observe(keys, reader, now_s)
        self._pool.use(keys, now_s)
        if self._second is not None:
            self._second.used(keys)

    def _end(self, pin: int, how: str) -> bool:
        loan = self._loans.pop(pin, None)
        if loan is None:
            return False
        loan.end.cancel()
        self.ends[how] += 1
        now_s = clock.now_s()
        if how == "given_back":
            self.speed.observe(loan.nbytes, now_s - loan.start_s)
        held = self._pool.unpin(pin, (), reader=PEER_READER, now_s=now_s)
        self._changed()
        return held

    async def _drop_damaged(self, blocks: Sequence[Block]) -> None:
        """Drop those whose bytes here don't match their tags."""
        bad, _ = await in_thread(
            lambda stop: self._damaged(blocks, stop), ends_s=clock.now_s() + MAX_LEND_S
        )
        self.damaged += len(bad)
        for block in bad:
            log.warning("umbp: block %s is damaged in memory: dropped", block.key.hex())
            self._pool.drop(block.key, block.generation)

    def _damaged(self, blocks: Sequence[Block], stop: Stop) -> list[Block]:
        bad: list[Block] = []
        for block in blocks:
            if stop():
                break
            body = memoryview(b"".join(self._arena.parts(block.extents, block.size)))
            groups = [group.size for group in block.tags]
            if sum(groups) != block.size or block_tags(block.key, groups, body) != tuple(
                group.tag for group in block.tags
            ):
                bad.append(block)
        return bad


def _told(block: Block) -> LentBlock:
    return LentBlock(
        size=block.size,
        extents=tuple(LentExtent(first=e.first, pages=e.pages) for e in block.extents),
        tags=tuple(LentTag(size=group.size, tag=group.tag.hex()) for group in block.tags),
    )
