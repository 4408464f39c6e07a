"""Handing KV from the worker that computed it to the one that continues.

The prefill side *offers*: the blocks are pinned under a ticket with a lease, named with their place
in the region that covers all KV memory, and tagged; the ticket has one such region for every
transport the worker has. The decode side *pulls* the blocks it lacks and no others by a transport
it has as well, checks every tag after the bytes have arrived, and then lets the ticket go. Whatever
goes wrong, it has fewer blocks and computes the rest: wrong bytes are never used.

A ticket can be given out while the prompt is computed (`open`): then its reader follows what has
become readable (`engine.open_offer`), and the lease begins when the prompt is complete. Until then
the ticket lives as long as the request that computes it.

A tag is bound to the key that the reader derives from its own ids (for the partial tail to the like
of one), so bytes of another prompt, model or tenant never pass.
"""

import asyncio
import math
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kimi_runtime import clock
from kimi_runtime.engine.blocks import KvBlocks
from kimi_runtime.engine.counters import EngineCounters
from kimi_runtime.engine.freed import Freed
from kimi_runtime.engine.geometry import BlockView, KvGeometry
from kimi_runtime.engine.open_offer import OpenOffer, Publisher
from kimi_runtime.engine.plan import Row
from kimi_runtime.engine.request import Request
from kimi_runtime.engine.state_blocks import blocks_of_state, spread, state_bindings
from kimi_runtime.engine.tagging import BlockTags, Untagged
from kimi_runtime.errors import NotFound
from kimi_runtime.spec.request import HandOff, HandOffBlock, HandOffProgress, RegionRef
from kimi_runtime.transfer.background import in_thread


@dataclass(frozen=True, slots=True)
class TicketUrls:
    """Where a ticket is given back, and where its progress is told."""

    release: Callable[[str], str]
    progress: Callable[[str], str]


class _Pin(NamedTuple):
    blocks: tuple[int, ...]
    expires_s: float


class HandOffs:
    """The offers of one worker: who may still read which blocks, and until when.

    Each of `regions` covers the memory of all KV blocks, one after another, by a transport; best
    first, at least one.
    """

    def __init__(
        self,
        worker: str,
        regions: Sequence[RegionRef],
        geometry: KvGeometry,
        blocks: KvBlocks,
        view: BlockView,
        counters: EngineCounters,
        *,
        lease_s: float,
        urls: TicketUrls,
        freed: Freed,
    ) -> None:
        self._worker, self._regions, self._geometry = worker, tuple(regions), geometry
        self._blocks, self._view, self._counters = blocks, view, counters
        self._lease_s, self._urls, self._freed = lease_s, urls, freed
        self._tags = BlockTags(geometry, blocks, view)
        self._publisher = Publisher(self._tags, block_bytes=geometry.block_bytes)
        self._pins: OrderedDict[str, _Pin] = OrderedDict()
        self._open: dict[str, OpenOffer] = {}
        self._computing: dict[int, OpenOffer] = {}
        """By request, those whose prompt is not complete."""
        self._filling: dict[int, list[int]] = {}
        """Blocks that states are being copied to, by request."""
        self._changed = asyncio.Event()

    async def offer(self, request: Request) -> HandOff:
        """Pin the request's computed blocks and describe them.

        The lease starts now, before the tags are computed. Cancelling takes the offer back.
        """
        ticket = secrets.token_hex(16)
        blocks = tuple(request.blocks)
        self._blocks.reference(blocks)
        self._lease(ticket, blocks)
        try:
            described = await self._describe(request, blocks)
        except BaseException:
            self._end(ticket)
            raise
        self._counters.hand_offs_offered += 1
        return self._ticket(ticket, request.computed, described, progress_url=None)

    def open(self, request: Request, *, state_bytes: int = 0) -> HandOff:
        """A ticket for a prompt that is being computed; `advance` tells how far it is.

        A model with states has one of `state_bytes`, to be added at the prompt's end. The ticket
        ends with `abandon`, or its lease begins with `complete`.
        """
        ticket = secrets.token_hex(16)
        self._open[ticket] = self._computing[request.number] = OpenOffer(ticket, request)
        self.advance(request)
        self._counters.hand_offs_offered += 1
        url = self._urls.progress(ticket)
        told = self._ticket(ticket, len(request.tokens), (), progress_url=url)
        return told.model_copy(update={"state_bytes": state_bytes})

    def advance(self, request: Request) -> None:
        """Blocks of the request have been completed; its last one is when the prompt is."""
        offer = self._computing.get(request.number)
        if offer is not None:
            last = request.computed == len(request.tokens)
            start = offer.whole * self._geometry.block_tokens
            self._ready(offer, start, request.computed, self._tags.groups, last=last)
            offer.whole = max(offer.whole, request.computed // self._geometry.block_tokens)

    def group_done(self, request: Request, row: Row, group: int) -> None:
        """The step that computes the row is through a layer group. Its KV there is final."""
        offer = self._computing.get(request.number)
        if offer is not None:
            end = row.start + len(row.ids)
            last = end == len(request.tokens)
            self._ready(offer, row.start, end, group + 1, last=last)

    async def add_state(self, request: Request, state: memoryview) -> None:
        """The state behind the whole prompt, to be read like its blocks.

        Where there are no blocks to put it into it is not told, and the reader has to compute.
        """
        offer = self._computing.get(request.number)
        count = blocks_of_state(state.nbytes, self._geometry.block_bytes)
        blocks = self._blocks.allocate(count) if offer is not None else None
        if blocks is None or offer is None:
            return
        self._filling[request.number] = blocks
        try:
            views = [self._view(block) for block in blocks]
            await in_thread(lambda stop: spread(state, views), ends_s=math.inf)
        except BaseException:
            self._blocks.release(blocks)
            raise
        finally:
            del self._filling[request.number]
        if offer.end is not None:  # it was let go meanwhile
            self._blocks.release(blocks)
            self._freed()
            return
        first = -(-len(request.tokens) // self._geometry.block_tokens)
        bindings = state_bindings(request.chain, request.tokens, count)
        for index, (block, binding) in enumerate(zip(blocks, bindings, strict=True), first):
            offer.blocks[index] = block
            self._publisher.ready(offer, index, self._tags.groups, binding=binding)

    def complete(self, request: Request) -> None:
        """The prompt is computed: the lease of its ticket begins."""
        self.advance(request)
        offer = self._computing.pop(request.number, None)
        if offer is None:
            return  # its reader has let it go
        self._publisher.complete(offer)
        self._lease(offer.ticket, tuple(offer.blocks.values()))

    def abandon(self, request: Request, *, failed: bool) -> None:
        """The prompt will not be completed. Nothing happens if it was, or has no ticket."""
        offer = self._computing.pop(request.number, None)
        if offer is not None:
            offer.finish("failed" if failed else "withdrawn")
            self._end(offer.ticket)

    async def progress(self, ticket: str, after: int) -> AsyncGenerator[HandOffProgress, None]:
        """What of an open ticket can be read, from part `after` on; see `OpenOffer.follow`.

        NotFound for a ticket that is unknown or has ended.
        """
        offer = self._open.get(ticket)
        if offer is None:
            raise NotFound(f"worker {self._worker} has no such hand-off, or it has ended")
        async for line in offer.follow(after, epoch=self._regions[0].epoch):
            yield line

    def computing(self, ticket: str) -> Request | None:
        """The request that computes what the ticket is for; None once it has."""
        offer = self._open.get(ticket)
        return offer.request if offer and offer.request.number in self._computing else None

    def release(self, ticket: str) -> bool:
        """The reader is done; False if the ticket is unknown, released before or expired."""
        self.expire(clock.now_s())
        ended = self._end(ticket)
        self._counters.hand_offs_released += ended
        return ended

    def expire(self, now_s: float) -> None:
        """End the leases that are over. All have one length, so the oldest ends first."""
        while self._pins:
            ticket, pin = next(iter(self._pins.items()))
            if pin.expires_s > now_s:
                return
            self._end(ticket)
            self._counters.hand_offs_expired += 1

    def end_all(self) -> None:
        """Take every offer back: the worker stops."""
        for ticket in [*self._pins, *self._open]:
            self._end(ticket)

    @property
    def tickets(self) -> int:
        """Those that have not ended."""
        return len(self._open.keys() | self._pins.keys())

    def holders(self) -> list[tuple[int, ...]]:
        """The blocks that are pinned, for `KvBlocks.check_integrity`."""
        computing = [tuple(offer.blocks.values()) for offer in self._computing.values()]
        filling = [tuple(blocks) for blocks in self._filling.values()]
        return [*computing, *filling, *(pin.blocks for pin in self._pins.values())]

    async def run(self) -> None:
        """Expire leases and tell progress, until cancelled."""
        async with asyncio.TaskGroup() as own:
            own.create_task(self._publisher.run(), name="publish hand-offs")
            await self._expire_leases()

    async def _expire_leases(self) -> None:
        while True:
            self._changed.clear()
            oldest = next(iter(self._pins.values()), None)
            wait_s = None if oldest is None else max(0.0, oldest.expires_s - clock.now_s())
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                self.expire(clock.now_s())

    def _ticket(
        self,
        ticket: str,
        tokens: int,
        blocks: tuple[HandOffBlock, ...],
        *,
        progress_url: str | None,
    ) -> HandOff:
        return HandOff(
            ticket=ticket,
            worker=self._worker,
            release_url=self._urls.release(ticket),
            layout=self._geometry.identity,
            region=self._regions[0],
            also=self._regions[1:],
            tokens=tokens,
            blocks=blocks,
            lease_s=self._lease_s,
            progress_url=progress_url,
        )

    async def _describe(self, request: Request, blocks: Sequence[int]) -> tuple[HandOffBlock, ...]:
        size, full, groups = self._geometry.block_tokens, len(request.chain.keys), self._tags.groups
        untagged = [
            Untagged(request.chain.binding(index, request.tokens), block, 0, groups)
            for index, block in enumerate(blocks)
        ]
        return tuple(
            HandOffBlock(
                key=part.binding.hex() if index < full else None,
                offset=part.block * self._geometry.block_bytes,
                size_bytes=self._geometry.block_bytes,
                tokens=min(size, request.computed - index * size),
                tags=tags,
            )
            for index, (part, tags) in enumerate(
                zip(untagged, await self._tags.of(untagged), strict=True)
            )
        )

    def _ready(self, offer: OpenOffer, start: int, end: int, groups: int, *, last: bool) -> None:
        """The first layer groups of the blocks with tokens `start` to `end` are as they will be,
        of a block that is not full only if the prompt ends in it (`last`).
        """
        size = self._geometry.block_tokens
        count = -(-end // size) if last else end // size
        for index in range(start // size, count):
            if index not in offer.blocks:
                block = offer.request.blocks[index]
                self._blocks.reference([block])
                offer.blocks[index] = block
            self._publisher.ready(offer, index, groups)

    def _lease(self, ticket: str, blocks: tuple[int, ...]) -> None:
        self._pins[ticket] = _Pin(blocks, clock.now_s() + self._lease_s)
        self._changed.set()

    def _end(self, ticket: str) -> bool:
        """Unpin; also what is not complete, whose followers hear that it is withdrawn."""
        offer, pin = self._open.pop(ticket, None), self._pins.pop(ticket, None)
        if offer is not None:
            self._computing.pop(offer.request.number, None)
            offer.finish("withdrawn")
        if pin is not None:
            self._blocks.release(pin.blocks)
        elif offer is not None:
            self._blocks.release(tuple(offer.blocks.values()))
        else:
            return False
        self._freed()
        return True
