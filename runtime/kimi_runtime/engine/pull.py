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
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from kimi_runtime import clock
from kimi_runtime.engine.handoff import BlockView, KvGeometry
from kimi_runtime.errors import (
    KvCorrupt,
    PeerGone,
    RegionGone,
    TransferCancelled,
    TransferError,
    TransferLate,
)
from kimi_runtime.spec.request import HandOff, HandOffBlock, RegionRef
from kimi_runtime.transfer.base import Session, Span, Transport
from kimi_runtime.transfer.sessions import SessionCache
from kimi_runtime.umbp.tags import matches

_BATCH_BYTES = 8 * 2**20
_CLOSE_S = 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_REMEMBERED = 1024

_REASONS = {
    RegionGone: "region_gone",
    PeerGone: "peer_gone",
    TransferLate: "late",
    TransferCancelled: "cancelled",
    KvCorrupt: "corrupt",
}
_SILENT = ("peer_gone", "late")


class Wanted(NamedTuple):
    """One block to pull: as its owner describes it, where it goes, what its tags are bound to."""

    source: HandOffBlock
    block: int
    binding: bytes


@dataclass(frozen=True, slots=True)
class Pulled:
    """How many leading blocks arrived verified, by which transport, why it is not all of them.

    `transport` None: none could be opened. `still_written`: the transfer did not end, so the other
    target blocks may yet change.
    """

    blocks: int
    transport: str | None = None
    failure: str | None = None
    still_written: bool = False


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
    arrived: int = 0
    region: RegionRef | None = None
    failure: str | None = None
    still_written: bool = False


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
        self._sessions = {one.name: SessionCache(one) for one in transports}
        self._pauses = _Pauses()

    def refusal(self, hand_off: HandOff) -> str | None:
        """Why nothing may be read from this hand-off at all; None if it can be tried."""
        size, regions = self._geometry.block_bytes, self._shared(hand_off.regions)
        if hand_off.layout != self._geometry.identity:
            return "layout"
        if not regions:
            return "transport"
        tags, end = len(self._geometry.layer_group_bytes), min(one.size_bytes for one in regions)
        fits = all(
            block.size_bytes == size and block.offset + size <= end and len(block.tags) == tags
            for block in hand_off.blocks
        )
        return None if fits else "malformed"

    async def pull(
        self, regions: Sequence[RegionRef], wanted: Sequence[Wanted], *, deadline_s: float
    ) -> Pulled:
        """Read the blocks in order, within `deadline_s` seconds, and verify each. Never raises
        for what the peer or the link did.

        `regions` are one and the same memory by several transports, one of which both sides have.
        """
        now_s = clock.now_s()
        usable = [one for one in self._shared(regions) if self._pauses.over(one, now_s=now_s)]
        if not usable:
            return Pulled(0, failure="unreachable")
        progress = _Progress(until_s=now_s + deadline_s)
        hung_s = deadline_s + 2 * _CLOSE_S  # reads end by themselves; this ends what hangs
        try:
            async with (
                asyncio.timeout(hung_s),
                self._opened(usable, progress) as session,
            ):
                await self._read_all(session, wanted, progress)
        except TimeoutError:
            progress.failure, progress.still_written = progress.failure or "late", True
        except (TransferError, KvCorrupt, ValueError, OSError) as exc:
            progress.failure = progress.failure or _reason(exc)
        silent = not progress.arrived and progress.failure in _SILENT
        self._pauses.note(progress.region or usable[-1], reached=not silent, now_s=clock.now_s())
        return Pulled(
            progress.arrived,
            None if progress.region is None else progress.region.transport,
            progress.failure,
            progress.still_written,
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

    async def _read_all(
        self, session: Session, wanted: Sequence[Wanted], progress: "_Progress"
    ) -> None:
        try:
            for batch in self._batches(wanted):
                left_s = progress.until_s - clock.now_s()
                if left_s <= 0:
                    raise TransferLate(f"{progress.arrived} of {len(wanted)} blocks came in time")
                spans = [self._span(one) for one in batch]
                await session.read(spans, self._memory, deadline_s=left_s)
                good = await asyncio.to_thread(self._leading_verified, batch)
                progress.arrived += good
                if good < len(batch):
                    raise KvCorrupt(
                        f"block {progress.arrived} of {len(wanted)} does not match its tag"
                    )
        except (TransferLate, TransferCancelled) as exc:
            progress.failure = _reason(exc)
            progress.still_written = not await _ended(session)
            raise PeerGone("the session was given up") from exc  # so that the next pull opens one

    def _batches(self, wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
        """Small enough that verifying one overlaps little waiting, large enough to be efficient."""
        count = max(1, _BATCH_BYTES // self._geometry.block_bytes)
        left = iter(wanted)
        while batch := list(islice(left, count)):
            yield batch

    def _span(self, one: Wanted) -> Span:
        size = self._geometry.block_bytes
        return Span(remote=one.source.offset, local=one.block * size, size=size)

    def _leading_verified(self, batch: Sequence[Wanted]) -> int:
        groups = self._geometry.layer_group_bytes
        for number, (source, block, binding) in enumerate(batch):
            try:
                tags = [bytes.fromhex(tag) for tag in source.tags]
            except ValueError:
                return number
            if not matches(binding, groups, self._view(block), tags):
                return number
        return len(batch)


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
