"""Before a node goes: its valuable blocks move to peers, best first, as far as time and room go.

They are offered. A peer takes what is worth more than its own by fetching it from here as ever, so
bytes are only read, and checked where they land. What nobody has room for is lost with the node.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from kimi_runtime import clock
from kimi_runtime.errors import ProtocolError, TransferError
from kimi_runtime.spec.peers import OfferedBlock, OfferRequest
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.remote.offers import OfferQueue, offered, offered_listed
from kimi_runtime.umbp.remote.owners import Owner, Owners
from kimi_runtime.umbp.second_tier import SecondTier

OFFER_S = 5.0
"""For one batch; a peer that takes longer gets the next one later."""

BUSY_S = 0.05
SLICE = 1024
"""Blocks priced between two looks at requests, which takes a few milliseconds."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EvacuationReport:
    """Blocks by what became of them; `bytes` moved."""

    kept: int
    """At a peer now."""
    elsewhere: int
    """At a peer before, and not offered."""
    refused: int
    """No peer took, for want of room as a rule."""
    late: int
    """The time was over."""
    gone: int
    """Worth nothing, or evicted meanwhile."""
    bytes: int

    def __str__(self) -> str:
        """For the log."""
        return (
            f"{self.kept} blocks ({self.bytes} bytes) moved to peers, {self.elsewhere} were there, "
            f"{self.refused} refused, {self.late} late, {self.gone} worth nothing"
        )


class Evacuation:
    """One daemon's way of leaving."""

    def __init__(
        self,
        name: str,
        pool: Pool,
        owners: Owners,
        epoch: int,
        second: SecondTier | None,
        *,
        seconds_per_byte: float,
        now_s: Callable[[], float] = clock.now_s,
    ) -> None:
        """`seconds_per_byte`: what computing a block costs."""
        self._name, self._epoch = name, epoch
        self._pool, self._owners, self._second = pool, owners, second
        self._seconds_per_byte, self._now_s = seconds_per_byte, now_s

    async def run(self, *, deadline_s: float) -> EvacuationReport:
        """Offer what this node alone holds to every usable peer, within `deadline_s`."""
        ends_s = self._now_s() + deadline_s
        peers = {owner.name: owner for owner in self._owners.usable()}
        elsewhere, blocks = await self._alone()
        queue = OfferQueue(blocks, peers)
        with suppress(TimeoutError):
            async with asyncio.timeout(ends_s - self._now_s()):
                while wanting := list(queue.wanted_by()):
                    async with asyncio.TaskGroup() as tasks:
                        for name in wanting:
                            tasks.create_task(self._to(peers[name], queue, ends_s))
        refused = queue.refused()
        report = EvacuationReport(
            kept=len(queue.kept),
            elsewhere=elsewhere,
            refused=refused,
            late=queue.left() - refused,
            gone=queue.gone,
            bytes=queue.kept_bytes,
        )
        log.info("umbp: evacuated: %s", report)
        return report

    async def _alone(self) -> tuple[int, list[OfferedBlock]]:
        """How many blocks a peer holds as well, and those that none does, a run's head first."""
        pool, now_s = self._pool, self._now_s()
        price = (pool.retention, self._seconds_per_byte, now_s)
        elsewhere, alone = 0, list[OfferedBlock]()
        for n, block in enumerate(pool.warmest()):
            if self._owners.holders(block.key):
                elsewhere += 1
            else:
                alone.append(offered(block, *price))
            if n % SLICE == 0:
                await asyncio.sleep(0)
        tier = None if self._second is None else self._second.tier
        for n, key in enumerate([] if tier is None else tier.keys()[::-1]):
            if tier is not None and pool.block(key) is None and (size := tier.sizes([key])):
                if self._owners.holders(key):
                    elsewhere += 1
                else:
                    alone.append(offered_listed(key, size[0], *price))
            if n % SLICE == 0:
                await asyncio.sleep(0)
        return elsewhere, alone

    async def _to(self, peer: Owner, queue: OfferQueue, ends_s: float) -> None:
        """Offer one peer batch by batch, until nothing is left for it now."""
        while batch := queue.batch(peer.name):
            within_s = min(OFFER_S, ends_s - self._now_s())
            request = OfferRequest(
                owner=self._name,
                epoch=self._epoch,
                purpose="drain",
                blocks=tuple(batch),
                within_ms=max(1, int(1e3 * within_s)),
            )
            try:
                answer = await peer.calls.offer(request, within_s=within_s + BUSY_S)
                free = queue.answered(peer.name, batch, answer.fates)
            except (TransferError, ProtocolError, ValueError) as exc:
                log.warning("umbp: %s did not answer an offer: %s", peer.name, exc)
                queue.failed(peer.name, batch)
            else:
                if not free:
                    await asyncio.sleep(BUSY_S)
