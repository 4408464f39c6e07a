"""Copies of what peers want often, made on nodes that have not asked yet."""

import asyncio
import logging
from collections import Counter
from collections.abc import Collection

from kimi_runtime import clock
from kimi_runtime.errors import ProtocolError, TransferError
from kimi_runtime.spec.peers import OfferedBlock, OfferFate, OfferRequest
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.remote.lender import Lender
from kimi_runtime.umbp.remote.owners import Owners
from kimi_runtime.umbp.remote.spread import Copies, Spread

TICK_S = 1.0
OFFER_S = 5.0

log = logging.getLogger(__name__)


class Replicator:
    """Offers hot blocks of one daemon to its peers."""

    def __init__(self, name: str, epoch: int, pool: Pool, owners: Owners, lender: Lender) -> None:
        self.fates: Counter[OfferFate] = Counter()
        """Blocks offered, by what became of them."""
        self._name, self._epoch = name, epoch
        self._pool, self._owners, self._lender = pool, owners, lender
        self._spread = Spread(lender.demand)

    async def run(self) -> None:
        """Look once a second, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            copies = self.due()
            if copies is not None:
                await self._offer(copies)

    def due(self) -> Copies | None:
        """What is to be copied now."""
        return self._spread.next(
            [owner.name for owner in self._owners.usable()],
            self._holders,
            self._size,
            bytes_per_s=self._lender.speed.cost.bytes_per_s,
            now_s=clock.now_s(),
        )

    def _holders(self, key: bytes) -> Collection[str]:
        return self._owners.index.prefix_runs([key]).keys()

    def _size(self, key: bytes) -> int | None:
        block = self._pool.block(key)
        return None if block is None else block.size

    async def _offer(self, copies: Copies) -> None:
        peer = self._owners.named(copies.peer)
        found = [
            (self._pool.block(key), w) for key, w in zip(copies.keys, copies.worths, strict=True)
        ]
        blocks = [
            OfferedBlock(
                key=block.key.hex(),
                size=block.size,
                worth=worth,
                uses=1,
                idle_ms=0,
                tenant=block.account.name,
                priority=int(block.priority),
            )
            for block, worth in found
            if block is not None
        ]
        if peer is None or not blocks:
            return
        request = OfferRequest(
            owner=self._name,
            epoch=self._epoch,
            purpose="replica",
            blocks=tuple(blocks),
            within_ms=int(1e3 * OFFER_S),
        )
        failed: OfferFate = "failed"
        fates = (failed,) * len(blocks)
        try:
            fates = (await peer.calls.offer(request, within_s=OFFER_S)).fates
        except (TransferError, ProtocolError) as exc:
            log.info("umbp: %s did not answer an offer of copies: %s", peer.name, exc)
        self.fates.update(fates)
