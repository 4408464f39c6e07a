"""From SSD into memory: blocks an engine asked for and the arena lacks.

A *flight* reads a few blocks into reserved pages and commits those that came back intact. Whoever
wants a block that is under way waits for its flight, so a block is read once however many ask. Who
waits has a deadline; a flight has none, since memory that a read may still fill can't be given to
anybody else. Until its last waiter has gone, nothing a flight brought can be evicted.
"""

import math
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from enum import StrEnum
from typing import Any

from kimi_connect.arena import Arena
from kimi_connect.copying import copy_bytes, matched
from kimi_connect.wire import Commitment, Gap, Grant, Granted
from kimi_runtime import clock
from kimi_runtime.transfer.background import Stop, in_thread
from kimi_runtime.umbp.flights import Flight, kept
from kimi_runtime.umbp.funnel import Where
from kimi_runtime.umbp.pool import DEFAULT_TENANT, Pool
from kimi_runtime.umbp.speed import MeasuredCost
from kimi_runtime.umbp.ssdlog.log import Got
from kimi_runtime.umbp.ssdlog.volume import Corrupt
from kimi_runtime.umbp.tiers.dram import OWN_WRITER
from kimi_runtime.umbp.tiers.ssd import SsdTier

PIECE_BYTES = 64 << 20
"""Read before an answer; its client copies that out, then asks for the rest."""

ARENA_SHARE = 4
"""A piece takes at most this part of the arena, so that a long prompt doesn't empty it."""

Spawn = Callable[[Coroutine[Any, Any, None], str], object]
"""Runs a task whose end somebody else sees to, under a name."""


class Landing(StrEnum):
    """What became of a block that was to be brought into memory."""

    LANDED = "landed"
    NO_ROOM = "no_room"
    """Memory is full of pins and reservations."""
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"
    GONE = "gone"
    """Evicted from SSD, or the pool was cleared, meanwhile."""
    LATE = "late"
    """Its reader's deadline passed first; it may land yet."""


_Flight = Flight[Landing]


class Promoter:
    """Brings blocks from `tier` into the pages of `pool`."""

    def __init__(self, pool: Pool, arena: Arena, tier: SsdTier, spawn: Spawn) -> None:
        self.landings: Counter[Landing] = Counter()
        """Blocks, by what became of them; LATE ones are counted once more when they land."""
        self.speed = MeasuredCost(tier.cost)
        """From the wish for a few blocks to their being in memory."""
        self._under_way_bytes = 0
        self._pool, self._arena, self._tier, self._spawn = pool, arena, tier, spawn
        self._flights: dict[bytes, _Flight] = {}
        arena_bytes = pool.total_pages * pool.page_bytes
        self._piece_bytes = min(PIECE_BYTES, arena_bytes // ARENA_SHARE)

    @property
    def under_way(self) -> int:
        """Blocks being read."""
        return len(self._flights)

    def seconds(self, size_bytes: int) -> float:
        """How long it takes to bring so much, behind what is under way."""
        return self.speed.seconds(size_bytes + self._under_way_bytes)

    def lacks(self, keys: Sequence[bytes]) -> bool:
        """Whether the block that ends the run in memory is on SSD."""
        run = self._pool.held(keys)
        return run < len(keys) and bool(self._tier.held(keys[run : run + 1]))

    async def bring(
        self, keys: Sequence[bytes], *, ends_s: float, tenant: str = DEFAULT_TENANT
    ) -> Gap:
        """Bring the first piece of the run of `keys` into memory, until `ends_s`.

        Returns why the next block after the run in memory did not come; NONE: it is not on SSD, or
        asking again brings more. Pin what is wanted before awaiting anything else: only until then
        is it safe from eviction.
        """
        piece, lacking = self._piece(keys)
        flights, refused = self._join(lacking, tenant)
        with ExitStack() as held:
            held.enter_context(kept(self._pool, piece))
            for flight in flights:
                held.enter_context(flight.awaited(self._pool))
            for flight in flights:
                if not await flight.wait(ends_s):
                    break
        run = self._pool.held(piece)
        if run == len(piece):
            return Gap.NONE
        missed = next((f for f in flights if piece[run] in f.keys), None)
        if missed is None:
            landing = refused
        elif missed.ended.is_set():
            landing = missed.failure
        else:
            landing = Landing.LATE
            self.landings[landing] += sum(key in lacking for key in piece[run:])
        return _GAPS.get(landing, Gap.MISS)

    def _piece(self, keys: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """The leading run in either tier, as long as what is on SSD alone is one piece; the latter.

        At least one block that is on SSD alone, if the run has any.
        """
        lacking: list[bytes] = []
        size = 0
        for position, key in enumerate(keys):
            if self._pool.block(key) is not None:
                continue
            sizes = self._tier.sizes([key])
            size += sum(sizes)
            if not sizes or (lacking and size > self._piece_bytes):
                return list(keys[:position]), lacking
            lacking.append(key)
        return list(keys), lacking

    def _join(self, lacking: Sequence[bytes], tenant: str) -> tuple[list[_Flight], Landing]:
        """The flights that bring `lacking`; what became of those that none brings."""
        new = [key for key in lacking if key not in self._flights]
        sizes = self._tier.sizes(new)
        items = list(zip(new, sizes, strict=False))
        refused = Landing.GONE
        if items:
            # without an end: what is read into is given back when the read has ended, never before
            grants = self._pool.reserve(
                items, writer=OWN_WRITER, now_s=clock.now_s(), ttl_s=math.inf, tenant=tenant
            )
            granted = [grant for grant in grants if grant.grant is Grant.RESERVED]
            if len(granted) < len(items):
                refused = Landing.NO_ROOM
                self.landings[refused] += len(items) - len(granted)
            if granted:
                flight = _Flight(new[: len(granted)], Landing.LANDED)
                self._flights |= dict.fromkeys(flight.keys, flight)
                self._spawn(self._fly(flight, granted, sizes), "umbp-promotion")
        flights = {id(f): f for key in lacking if (f := self._flights.get(key)) is not None}
        return list(flights.values()), refused

    async def _fly(self, flight: _Flight, granted: list[Granted], sizes: list[int]) -> None:
        generations = [grant.generation for grant in granted]
        got, landed = Got([]), 0
        start_s, size = clock.now_s(), sum(sizes[: len(granted)])
        self._under_way_bytes += size
        try:
            got = await self._read(flight.keys, granted, sizes)
            done = list(zip(generations, got.tags, strict=False))
            states = self._pool.commit(done, writer=OWN_WRITER, now_s=clock.now_s())
            landed = sum(state is not Commitment.EXPIRED for state in states)
        finally:
            self._under_way_bytes -= size
            if landed == len(flight.keys):
                self.speed.observe(size, clock.now_s() - start_s)
            self._pool.abort(generations, writer=OWN_WRITER)
            for key in flight.keys:
                del self._flights[key]
            flight.failure = _why(got) if landed < len(flight.keys) else Landing.LANDED
            self.landings[Landing.LANDED] += landed
            self.landings[flight.failure] += len(flight.keys) - landed
            self._pool.funnel.brought(flight.keys[:landed], Where.SSD)
            flight.end(self._pool, flight.keys[:landed])

    async def _read(self, keys: list[bytes], granted: list[Granted], sizes: list[int]) -> Got:
        """Read into the reserved pages: at once where a block's are in one piece."""
        parts = [
            list(self._arena.parts(grant.extents, size))
            for grant, size in zip(granted, sizes, strict=False)
        ]
        targets = [
            here[0] if len(here) == 1 else memoryview(bytearray(size))
            for here, size in zip(parts, sizes, strict=False)
        ]
        got = await self._tier.get(keys, targets)
        scattered = [
            (here, target)
            for here, target in zip(parts, targets[: len(got.tags)], strict=False)
            if len(here) > 1
        ]
        if scattered:
            await in_thread(lambda stop: _scatter(scattered, stop), ends_s=math.inf)
        return got


_GAPS = {Landing.CORRUPT: Gap.CORRUPT, Landing.LATE: Gap.LATE}


def _why(got: Got) -> Landing:
    if isinstance(got.failure, Corrupt):
        return Landing.CORRUPT
    return Landing.UNREADABLE if isinstance(got.failure, OSError) else Landing.GONE


def _scatter(blocks: Sequence[tuple[list[memoryview], memoryview]], stop: Stop) -> None:
    for parts, source in blocks:
        for part, piece in matched(parts, source):
            if stop():
                return
            copy_bytes(part, piece)
