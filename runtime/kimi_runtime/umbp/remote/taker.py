"""The taker's side of an offer: what is worth more than what it displaces is fetched.

Bytes come as for an engine: lent by their owner, read, checked where they landed. One offer is
worked on at a time, so that offers leave the link to engines that wait.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence

from kimi_connect.wire import Grant, Granted, Priority
from kimi_runtime import clock
from kimi_runtime.spec.peers import OfferAnswer, OfferedBlock, OfferFate, OfferRequest
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.remote.fetch import Fate, Fetcher
from kimi_runtime.umbp.remote.owners import Owner, Owners
from kimi_runtime.umbp.remote.replicas import Replicas
from kimi_runtime.umbp.tiers.dram import OWN_WRITER

_FATES: dict[Fate, OfferFate] = {
    Fate.ABSENT: "absent",
    Fate.LATE: "late",
    Fate.BUSY: "busy",
    Fate.NO_ROOM: "no_room",
}


class _Offered:
    """Admits offered blocks: each may displace what is worth less than itself."""

    tenant, reader = "default", ""

    def __init__(self, pool: Pool, blocks: Sequence[OfferedBlock], now_s: float) -> None:
        self._pool, self._now_s = pool, now_s
        self._grants: dict[bytes, tuple[OfferedBlock, Granted]] = {}
        for block in blocks:
            key = bytes.fromhex(block.key)
            # without an end: the pages come free when the copy has ended, never before
            (grant,) = pool.reserve(
                [(key, block.size)],
                writer=OWN_WRITER,
                now_s=now_s,
                ttl_s=math.inf,
                below=block.worth,
                tenant=block.tenant,
                priority=Priority(block.priority),
            )
            if grant.grant is Grant.RESERVED:
                self._grants[key] = (block, grant)

    def keys(self) -> list[bytes]:
        """What got pages, best first."""
        return list(self._grants)

    def reserve(self, items: Sequence[tuple[bytes, int]]) -> list[Granted]:
        """The pages that were set aside; none for a block of another size than was offered."""
        found = [(self._grants[key], size) for key, size in items]
        return [g if block.size == size else Granted(Grant.FULL) for (block, g), size in found]

    def arrived(self, keys: Sequence[bytes]) -> None:
        """They are worth here what their use was worth there."""
        for key in keys:
            block, _ = self._grants[key]
            used_s = self._now_s - block.idle_ms / 1e3
            self._pool.moved(key, uses=block.uses, used_s=used_s)

    def close(self) -> None:
        """Give back what was not filled."""
        generations = [grant.generation for _, grant in self._grants.values()]
        self._pool.abort(generations, writer=OWN_WRITER)


class Taker:
    """Takes what peers offer."""

    def __init__(
        self, pool: Pool, owners: Owners, fetcher: Fetcher, changed: Callable[[], None]
    ) -> None:
        self.closed = False
        """Nothing is taken any more: this daemon drains."""
        self.fates: Counter[tuple[str, OfferFate]] = Counter()
        """Offered blocks by purpose and what became of them."""
        self.bytes: Counter[str] = Counter()
        """Bytes taken, by purpose."""
        self._pool, self._owners, self._fetcher, self._changed = pool, owners, fetcher, changed
        self._replicas = Replicas(pool.total_pages)
        self._busy = False

    async def offer(self, asked: OfferRequest) -> OfferAnswer:
        """Take what is admitted, within the time that is left."""
        owner = self._owners.named(asked.owner)
        if self.closed or owner is None or not owner.health.usable(clock.now_s()):
            return self._counted(asked, ["closed"] * len(asked.blocks))
        if self._busy:
            return self._counted(asked, ["busy"] * len(asked.blocks))
        self._busy = True
        try:
            fates = await self._take(owner, asked)
        finally:
            self._busy = False
            self._changed()
        return self._counted(asked, fates)

    async def _take(self, owner: Owner, asked: OfferRequest) -> list[OfferFate]:
        keys = [bytes.fromhex(block.key) for block in asked.blocks]
        fates: dict[bytes, OfferFate] = {
            key: "no_room" if self._fetcher.lacked(key) else "held" for key in keys
        }
        wanted = [block for block in asked.blocks if fates[bytes.fromhex(block.key)] != "held"]
        if asked.purpose == "replica":
            wanted = self._replicas.admit(wanted, self._pool)
        admission = _Offered(self._pool, wanted, clock.now_s())
        try:
            got = admission.keys()
            fates |= await self._fetch(owner, asked, got, admission)
        finally:
            admission.close()
        if asked.purpose == "replica":
            self._replicas.took(key for key in got if fates[key] == "taken")
        return [fates[key] for key in keys]

    async def _fetch(
        self, owner: Owner, asked: OfferRequest, keys: Sequence[bytes], admission: _Offered
    ) -> dict[bytes, OfferFate]:
        """Piece by piece; a block that its owner has no more is passed over."""
        fates: dict[bytes, OfferFate] = dict.fromkeys(keys, "late")
        left = list(keys)
        try:
            async with asyncio.timeout(asked.within_ms / 1e3):
                while left:
                    fate, landed = await self._fetcher.take(owner, asked.epoch, left, admission)
                    fates |= dict.fromkeys(left[:landed], "taken")
                    left = left[landed:]
                    if fate is Fate.ABSENT and left:
                        fates[left.pop(0)] = "absent"
                    elif fate is not Fate.FETCHED:
                        fates |= dict.fromkeys(left, _FATES.get(fate, "failed"))
                        break
        except TimeoutError:
            pass  # what is left is late
        return fates

    def _counted(self, asked: OfferRequest, fates: list[OfferFate]) -> OfferAnswer:
        for block, fate in zip(asked.blocks, fates, strict=True):
            self.fates[asked.purpose, fate] += 1
            self.bytes[asked.purpose] += block.size if fate == "taken" else 0
        return OfferAnswer(fates=tuple(fates))
