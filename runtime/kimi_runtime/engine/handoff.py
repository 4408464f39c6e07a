"""Handing KV from the worker that computed it to the one that continues.

The prefill side *offers*: the blocks are pinned under a ticket with a lease, named with their place
in the region that covers all KV memory, and tagged; the ticket has one such region for every
transport the worker has. The decode side *pulls* the blocks it lacks and no others by a transport
it has as well, checks every tag after the bytes have arrived, and then lets the ticket go. Whatever
goes wrong, it has fewer blocks and computes the rest: wrong bytes are never used.

A tag is bound to the key that the reader derives from its own ids (for the partial tail to the like
of one), so bytes of another prompt, model or tenant never pass.
"""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kimi_runtime import clock
from kimi_runtime.engine.blocks import KvBlocks
from kimi_runtime.engine.counters import EngineCounters
from kimi_runtime.engine.freed import Freed
from kimi_runtime.engine.request import Request
from kimi_runtime.spec.request import HandOff, HandOffBlock, RegionRef
from kimi_runtime.umbp.tags import block_tags

BlockView = Callable[[int], memoryview]


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """What both sides must agree on; `identity` covers the model as well as the layout."""

    identity: str
    block_tokens: int
    layer_group_bytes: tuple[int, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return sum(self.layer_group_bytes)


class _Pin(NamedTuple):
    blocks: tuple[int, ...]
    expires_s: float


class HandOffs:
    """The offers of one worker: who may still read which blocks, and until when.

    Each of `regions` covers the memory of all KV blocks, one after another, by a transport; best
    first, at least one. `release_url` says where a ticket is given back.
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
        release_url: Callable[[str], str],
        freed: Freed,
    ) -> None:
        self._worker, self._regions, self._geometry = worker, tuple(regions), geometry
        self._blocks, self._view, self._counters = blocks, view, counters
        self._lease_s, self._release_url, self._freed = lease_s, release_url, freed
        self._pins: OrderedDict[str, _Pin] = OrderedDict()
        self._tags: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()
        self._changed = asyncio.Event()

    async def offer(self, request: Request) -> HandOff:
        """Pin the request's computed blocks and describe them.

        The lease starts now, before the tags are computed. Cancelling takes the offer back.
        """
        ticket = secrets.token_hex(16)
        blocks = tuple(request.blocks)
        self._blocks.reference(blocks)
        self._pins[ticket] = _Pin(blocks, clock.now_s() + self._lease_s)
        self._changed.set()
        try:
            described = await self._describe(request, blocks)
        except BaseException:
            self._end(ticket)
            raise
        self._counters.hand_offs_offered += 1
        return HandOff(
            ticket=ticket,
            worker=self._worker,
            release_url=self._release_url(ticket),
            layout=self._geometry.identity,
            region=self._regions[0],
            also=self._regions[1:],
            tokens=request.computed,
            blocks=described,
            lease_s=self._lease_s,
        )

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
        for ticket in list(self._pins):
            self._end(ticket)

    def holders(self) -> list[tuple[int, ...]]:
        """The blocks that are pinned, for `KvBlocks.check_integrity`."""
        return [pin.blocks for pin in self._pins.values()]

    async def run(self) -> None:
        """Expire leases until cancelled."""
        while True:
            self._changed.clear()
            oldest = next(iter(self._pins.values()), None)
            wait_s = None if oldest is None else max(0.0, oldest.expires_s - clock.now_s())
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                self.expire(clock.now_s())

    async def _describe(self, request: Request, blocks: Sequence[int]) -> tuple[HandOffBlock, ...]:
        size, full = self._geometry.block_tokens, len(request.chain.keys)
        bindings = [request.chain.binding(index, request.tokens) for index in range(len(blocks))]
        untagged = [
            (binding, block)
            for binding, block in zip(bindings, blocks, strict=True)
            if binding not in self._tags
        ]
        tagged = await asyncio.to_thread(self._tag, untagged)
        known = {**tagged, **{name: self._tags[name] for name in bindings if name in self._tags}}
        self._remember(tagged)
        return tuple(
            HandOffBlock(
                key=binding.hex() if index < full else None,
                offset=block * self._geometry.block_bytes,
                size_bytes=self._geometry.block_bytes,
                tokens=min(size, request.computed - index * size),
                tags=known[binding],
            )
            for index, (binding, block) in enumerate(zip(bindings, blocks, strict=True))
        )

    def _tag(self, blocks: Sequence[tuple[bytes, int]]) -> dict[bytes, tuple[str, ...]]:
        groups = self._geometry.layer_group_bytes
        return {
            binding: tuple(tag.hex() for tag in block_tags(binding, groups, self._view(block)))
            for binding, block in blocks
        }

    def _remember(self, tagged: dict[bytes, tuple[str, ...]]) -> None:
        """Keep the tags of full blocks: equal keys mean equal bytes, so they stay true.

        The rest of a partial tail's block is whatever was there before, so its tags do not.
        """
        for binding, tags in tagged.items():
            if self._blocks.held([binding]):
                self._tags[binding] = tags
        while len(self._tags) > 2 * self._blocks.total:
            self._tags.popitem(last=False)

    def _end(self, ticket: str) -> bool:
        pin = self._pins.pop(ticket, None)
        if pin is None:
            return False
        self._blocks.release(pin.blocks)
        self._freed()
        return True
