"""The decode side of a hand-off: read blocks from a peer's region, trust none before its tag.

A hand-off names its region once for every transport of its owner. Which one is used is the
reader's choice: of those it has itself the first, in its own order, that opens. Shared memory of
another host does not, and costs a look at a file that is not there.

A peer from which nothing came is left alone for a while: behind a firewall that drops packets every
hand-off would wait for its whole deadline, where computing the prompt might have taken less.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from kimi_runtime import clock
from kimi_runtime.engine.geometry import BlockView, KvGeometry
from kimi_runtime.errors import (
    KvCorrupt,
    PeerGone,
    RegionGone,
    TransferCancelled,
    TransferError,
    TransferLate,
)
from kimi_runtime.spec.request import HandOff, RegionRef
from kimi_runtime.transfer.base import Session, Span, Transport
from kimi_runtime.transfer.sessions import SessionCache
from kimi_runtime.umbp.tags import tag

_BATCH_BYTES = 8 * 2**20
_CLOSE_S = 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_REMEMBERED = 1024


class HandOffEnded(TransferError):
    """Its owner gave the hand-off up before all of it was there: what came may be used."""


class HandOffFailed(TransferError):
    """Its owner could not compute the prompt: nothing of the hand-off may be used."""


_REASONS = {
    RegionGone: "region_gone",
    PeerGone: "peer_gone",
    TransferLate: "late",
    TransferCancelled: "cancelled",
    HandOffEnded: "withdrawn",
    HandOffFailed: "failed",
    KvCorrupt: "corrupt",
}
_SILENT = ("peer_gone", "late")


class Wanted(NamedTuple):
    """Layer groups of one block to pull: where they are and go, what their tags are bound to.

    `position` is the block's among those that are pulled, `offset` where the whole block begins in
    the region, `group` the first of the groups that `tags` are of.
    """

    position: int
    offset: int
    block: int
    binding: bytes
    group: int
    tags: tuple[str, ...]


class Readable(NamedTuple):
    """What can be read now. `early`: before the owner had all of the prompt."""

    wanted: Sequence[Wanted]
    early: bool = False


@dataclass(frozen=True, slots=True)
class Pulled:
    """How many leading blocks arrived verified, by which transport, why it is not all of them.

    `transport` None: none could be opened. `still_written`: the transfer did not end, so the other
    target blocks may yet change. The bytes are all that were read and verified.
    """

    blocks: int
    transport: str | None = None
    failure: str | None = None
    still_written: bool = False
    moved_bytes: int = 0
    early_bytes: int = 0


class _Pause(NamedTuple):
    until_s: float
    length_s: float


class _Pauses:
    """Regions that are not tried for now, each for twice as long as the time before."""

    def __init__(self) -> None:
        self._by_region: OrderedDict[RegionRef, _Pause] = OrderedDict()

    def over(self, region: RegionRef, *, now_s: float) -> bool:
        """Whether the region may be tried."""
        pause = self._by_region.get(region)
        return pause is None or pause.until_s <= now_s

    def note(self, region: RegionRef, *, reached: bool, now_s: float) -> None:
        """Whether anything came from the region that was tried."""
        before = self._by_region.pop(region, None)
        if reached:
            return
        doubled_s = _FIRST_PAUSE_S if before is None else 2 * before.length_s
        length_s = min(doubled_s, _LONGEST_PAUSE_S)
        self._by_region[region] = _Pause(now_s + length_s, length_s)
        while len(self._by_region) > _REMEMBERED:
            self._by_region.popitem(last=False)


@dataclass(slots=True)
class _Progress:
    until_s: float
    groups: int
    """Of a block."""
    verified: list[int] = field(default_factory=list)
    """Leading layer groups of each block that have arrived."""
    region: RegionRef | None = None
    failure: str | None = None
    still_written: bool = False
    moved_bytes: int = 0
    early_bytes: int = 0

    @property
    def blocks(self) -> int:
        """Leading blocks that are whole."""
        whole = (n for n, groups in enumerate(self.verified) if groups < self.groups)
        return next(whole, len(self.verified))


class BlockReader:
    """Pulls blocks into the KV memory. Sessions are kept per peer region and dropped when they
    fail, so a restarted or moved peer is found again.
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        memory: memoryview,
        view: BlockView,
        geometry: KvGeometry,
    ) -> None:
        """`transports`: best first."""
        self._memory, self._view, self._geometry = memory, view, geometry
        self._starts = geometry.group_starts()
        self._sessions = {one.name: SessionCache(one) for one in transports}
        self._pauses = _Pauses()

    @property
    def groups(self) -> int:
        """Layer groups of a block."""
        return len(self._geometry.layer_group_bytes)

    def refusal(self, hand_off: HandOff) -> str | None:
        """Why nothing may be read from this hand-off at all; None if it can be tried."""
        size, regions = self._geometry.block_bytes, self._shared(hand_off.regions)
        if hand_off.layout != self._geometry.identity:
            return "layout"
        if not regions:
            return "transport"
        end = min(one.size_bytes for one in regions)
        fits = all(
            block.size_bytes == size
            and block.offset + size <= end
            and len(block.tags) == self.groups
            for block in hand_off.blocks
        )
        return None if fits else "malformed"

    async def pull(
        self,
        regions: Sequence[RegionRef],
        readable: AsyncIterator[Readable],
        count: int,
        *,
        deadline_s: float,
    ) -> Pulled:
        """Read what becomes readable of `count` blocks, until that ends, and verify each part.

        What is readable at one time is read within `deadline_s` seconds; how long may pass until
        more is, `readable` decides. Never raises for what the peer or the link did.

        `regions` are one and the same memory by several transports, one of which both sides have.
        """
        now_s = clock.now_s()
        usable = [one for one in self._shared(regions) if self._pauses.over(one, now_s=now_s)]
        if not usable:
            return Pulled(0, failure="unreachable")
        progress = _Progress(now_s + deadline_s, self.groups, [0] * count)
        hung_s = deadline_s + 2 * _CLOSE_S  # reads end by themselves; this ends what hangs
        try:
            async with (
                asyncio.timeout(hung_s) as hung,
                self._opened(usable, progress) as session,
            ):
                hung.reschedule(None)
                async for item in readable:
                    now_s = clock.now_s()
                    progress.until_s = now_s + deadline_s
                    hung.reschedule(asyncio.get_running_loop().time() + hung_s)
                    await self._read_all(session, item, progress)
                    hung.reschedule(None)
                hung.reschedule(asyncio.get_running_loop().time() + 2 * _CLOSE_S)
        except TimeoutError:
            progress.failure, progress.still_written = progress.failure or "late", True
        except (TransferError, KvCorrupt, ValueError, OSError) as exc:
            progress.failure = progress.failure or _reason(exc)
            if isinstance(exc, HandOffFailed):
                progress.verified = [0] * count
        silent = not progress.moved_bytes and progress.failure in _SILENT
        self._pauses.note(progress.region or usable[-1], reached=not silent, now_s=clock.now_s())
        return Pulled(
            progress.blocks,
            None if progress.region is None else progress.region.transport,
            progress.failure,
            progress.still_written,
            progress.moved_bytes,
            progress.early_bytes,
        )

    def _shared(self, regions: Sequence[RegionRef]) -> list[RegionRef]:
        """Those of a transport we have, in our order."""
        return [one for name in self._sessions for one in regions if one.transport == name]

    @asynccontextmanager
    async def _opened(
        self, regions: Sequence[RegionRef], progress: "_Progress"
    ) -> AsyncIterator[Session]:
        """The session of the first region that opens; the last one's error if none does."""
        async with AsyncExitStack() as owned:
            for number, region in enumerate(regions, 1):
                cache = self._sessions[region.transport]
                left_s = max(0.0, progress.until_s - clock.now_s())
                try:
                    session = await owned.enter_async_context(
                        cache.session(region, deadline_s=left_s)
                    )
                except (RegionGone, PeerGone):
                    if number == len(regions):
                        raise
                    continue
                progress.region = region
                yield session
                return

    async def _read_all(self, session: Session, readable: Readable, progress: "_Progress") -> None:
        try:
            for batch in self._batches(readable.wanted):
                left_s = progress.until_s - clock.now_s()
                if left_s <= 0:
                    raise TransferLate(f"{progress.blocks} blocks came in time, not all")
                spans = [self._span(one) for one in batch]
                await session.read(spans, self._memory, deadline_s=left_s)
                good = await asyncio.to_thread(self._leading_verified, batch)
                for one, span in zip(batch[:good], spans, strict=False):
                    progress.verified[one.position] = one.group + len(one.tags)
                    progress.moved_bytes += span.size
                    progress.early_bytes += span.size if readable.early else 0
                if good < len(batch):
                    raise KvCorrupt(f"block {batch[good].position} does not match its tag")
        except (TransferLate, TransferCancelled) as exc:
            progress.failure = _reason(exc)
            progress.still_written = not await _ended(session)
            raise PeerGone("the session was given up") from exc  # so that the next pull opens one

    def _batches(self, wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
        """Small enough that verifying one overlaps little waiting, large enough to be efficient."""
        batch: list[Wanted] = []
        size = 0
        for one in wanted:
            if batch and size + self._span(one).size > _BATCH_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(one)
            size += self._span(one).size
        if batch:
            yield batch

    def _span(self, one: Wanted) -> Span:
        """ValueError for groups that a block does not have; sessions check the region's bounds."""
        if one.group + len(one.tags) > self.groups:
            raise ValueError(f"{len(one.tags)} layer groups from {one.group} of {self.groups}")
        start, end = self._starts[one.group], self._starts[one.group + len(one.tags)]
        local = one.block * self._geometry.block_bytes
        return Span(remote=one.offset + start, local=local + start, size=end - start)

    def _leading_verified(self, batch: Sequence[Wanted]) -> int:
        return next((n for n, one in enumerate(batch) if not self._matches(one)), len(batch))

    def _matches(self, one: Wanted) -> bool:
        block = self._view(one.block)
        for group, expected in enumerate(one.tags, one.group):
            part = block[self._starts[group] : self._starts[group + 1]]
            if tag(one.binding, group, part).hex() != expected:
                return False
        return True


async def _ended(session: Session) -> bool:
    """Close a session; False if it did not end in time, so that it may still write."""
    try:
        async with asyncio.timeout(_CLOSE_S):
            await session.aclose()
    except (TimeoutError, TransferError, OSError):
        return False
    return True


def _reason(exc: Exception) -> str:
    if isinstance(exc, ValueError):
        return "malformed"
    return next((name for kind, name in _REASONS.items() if isinstance(exc, kind)), "transfer")
