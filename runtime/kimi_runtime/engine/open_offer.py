"""A hand-off whose prompt is still being computed: what of it can be read so far.

Its readers follow one list of parts, in the order in which they became readable. A part is some
layer groups of one block with their tags; once it is in the list it never changes, and the block is
pinned from before its first part was tagged until the ticket ends.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kimi_runtime.engine.request import Request
from kimi_runtime.engine.tagging import BlockTags, Untagged
from kimi_runtime.errors import NotFound
from kimi_runtime.spec.request import HandOffPart, HandOffProgress

HEARTBEAT_S = 1.0
PARTS_A_LINE = 4096
_PARTS_AT_ONCE = 64

End = Literal["complete", "withdrawn", "failed"]


@dataclass(slots=True, eq=False)
class OpenOffer:
    """One ticket. `blocks` are pinned for it, by their number in the prompt."""

    ticket: str
    request: Request
    blocks: dict[int, int] = field(default_factory=dict)
    groups: dict[int, int] = field(default_factory=dict)
    """How many leading layer groups of each block have been queued."""
    whole: int = 0
    """Leading blocks of which all have been."""
    parts: list[HandOffPart] = field(default_factory=list)
    end: End | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def publish(self, part: HandOffPart) -> None:
        """The part can be read."""
        self.parts.append(part)
        self._wake()

    def finish(self, end: End) -> None:
        """Nothing more will come. Only the first end counts."""
        self.end = self.end or end
        self._wake()

    async def follow(self, after: int, *, epoch: int) -> AsyncGenerator[HandOffProgress, None]:
        """What is published after the first `after` parts, to the end; a line a second at least.

        NotFound for a count of parts that were never published.
        """
        if after > len(self.parts):
            raise NotFound(
                f"the hand-off has {len(self.parts)} parts, not the {after} that were counted; "
                "its owner restarted"
            )
        while True:
            changed = self._changed
            parts = tuple(self.parts[after : after + PARTS_A_LINE])
            all_told = after + len(parts) == len(self.parts)
            end = self.end if all_told else None
            yield HandOffProgress(epoch=epoch, first=after, parts=parts, end=end)
            after += len(parts)
            if end is not None:
                return
            if all_told:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await changed.wait()
                except TimeoutError:
                    continue

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class _Pending(NamedTuple):
    offer: OpenOffer
    number: int
    key: bytes | None
    offset: int
    untagged: Untagged


class Publisher:
    """Tags what became readable, in the order in which it did, and tells it."""

    def __init__(self, tags: BlockTags, *, block_bytes: int) -> None:
        self._tags, self._block_bytes = tags, block_bytes
        self._queue: deque[_Pending | OpenOffer] = deque()
        self._wake = asyncio.Event()

    def ready(
        self, offer: OpenOffer, index: int, groups: int, *, binding: bytes | None = None
    ) -> None:
        """The first `groups` layer groups of a pinned block of the prompt hold what they will.

        `binding` is what the tags of a block that is no part of the prompt's KV are bound to.
        """
        told = offer.groups.get(index, 0)
        if groups <= told:
            return
        offer.groups[index] = groups
        request, block = offer.request, offer.blocks[index]
        key = None
        if binding is None:
            binding = request.chain.binding(index, request.tokens)
            key = binding if index < len(request.chain.keys) else None
        untagged = Untagged(binding, block, told, groups)
        self._queue.append(_Pending(offer, index, key, block * self._block_bytes, untagged))
        self._wake.set()

    def complete(self, offer: OpenOffer) -> None:
        """What was said to be ready is all there is."""
        self._queue.append(offer)
        self._wake.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            self._wake.clear()
            while self._queue:
                count = min(len(self._queue), _PARTS_AT_ONCE)
                await self._publish([self._queue.popleft() for _ in range(count)])
            await self._wake.wait()

    async def _publish(self, ready: "list[_Pending | OpenOffer]") -> None:
        wanted = [one for one in ready if isinstance(one, OpenOffer) or one.offer.end is None]
        parts = [one for one in wanted if isinstance(one, _Pending)]
        tags = iter(await self._tags.of([part.untagged for part in parts]))
        for one in wanted:
            if isinstance(one, OpenOffer):
                one.finish("complete")
            elif (tagged := next(tags)) and one.offer.end is None:
                one.offer.publish(
                    HandOffPart(
                        block=one.number,
                        key=None if one.key is None else one.key.hex(),
                        offset=one.offset,
                        group=one.untagged.first,
                        tags=tagged,
                    )
                )
