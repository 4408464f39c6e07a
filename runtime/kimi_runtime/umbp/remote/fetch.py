"""From other daemons into memory: blocks an engine asked for and this node lacks.

A *flight* asks the owner that has most of the run to lend it, copies it from the owner's memory
into reserved pages, checks every block there, and commits those that are intact. It ends within
`MAX_FETCH_S`; who waits for it has a deadline of its own. A block that doesn't come is a miss with
a reason, counted by owner. Lending never fetches, so daemons can't send each other around.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any

from kimi_connect.arena import Arena
from kimi_connect.wire import Gap, Grant
from kimi_runtime import clock
from kimi_runtime.errors import (
    KimistackError,
    ProtocolError,
    RegionGone,
    TransferCancelled,
    TransferError,
    TransferLate,
)
from kimi_runtime.spec.peers import MAX_LEND_KEYS, GiveBackRequest, LendRequest
from kimi_runtime.transfer.sessions import SessionCache
from kimi_runtime.umbp.flights import Flight, kept
from kimi_runtime.umbp.pool import DEFAULT_TENANT, Pool
from kimi_runtime.umbp.remote.admission import Admission, AskedFor
from kimi_runtime.umbp.remote.calls import OwnerBusy
from kimi_runtime.umbp.remote.landing import Landing, Loan, sound_blocks
from kimi_runtime.umbp.remote.owners import Owner, Owners
from kimi_runtime.umbp.tiers.dram import OWN_WRITER

MAX_FETCH_S = 3.0
"""A fetch that takes longer is given up. It has its own end, not that of who asked first: an owner
is judged by it, and readers in a hurry would otherwise put good owners into quarantine."""

GIVE_BACK_S = 1.0
PIECE_BYTES = 32 << 20
UNDER_WAY_BYTES = 256 << 20
ARENA_SHARE = 4
"""What is under way takes at most this part of the arena."""

log = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, None], str], object]
"""Runs a task whose end somebody else sees to, under a name."""
Choose = Callable[[Sequence[bytes]], tuple[Owner, int, int] | None]
"""Whom to ask for keys, the length of the run it has, and its epoch."""


class Fate(StrEnum):
    """What became of a block that was to be fetched."""

    FETCHED = "fetched"
    ABSENT = "absent"
    """The owner has it no more."""
    CORRUPT = "corrupt"
    """What came does not match its tags, or the answer has no meaning."""
    LATE = "late"
    UNREACHABLE = "unreachable"
    MOVED = "moved"
    """The owner restarted: what its feed said is of another epoch."""
    NO_ROOM = "no_room"
    """Memory here is full of pins and reservations."""
    BUSY = "busy"
    """Enough other fetches are under way, here or at the owner."""


_GAPS = {Fate.CORRUPT: Gap.CORRUPT, Fate.LATE: Gap.LATE}
_BLAMED = (Fate.CORRUPT, Fate.LATE, Fate.UNREACHABLE)
_UNDECIDED = (Fate.BUSY, Fate.NO_ROOM)


class Fetcher:
    """Brings blocks of `owners` into the pages of `pool`, by `sessions` of a transport."""

    def __init__(
        self,
        pool: Pool,
        arena: Arena,
        owners: Owners,
        sessions: SessionCache,
        spawn: Spawn,
        *,
        here: Callable[[bytes], bool],
        name: str,
    ) -> None:
        """`here` says whether memory or SSD of this node has a block, `name` is this node's."""
        self.crowded = 0
        """Blocks not fetched because enough others were under way all the time."""
        self._pool, self._owners, self._spawn, self._here = pool, owners, spawn, here
        self._name = name
        self._landing = Landing(pool, arena, sessions)
        self._flights: dict[bytes, Flight[Fate]] = {}
        most = min(UNDER_WAY_BYTES, pool.total_pages * pool.page_bytes // ARENA_SHARE)
        self._piece_bytes = max(pool.page_bytes, min(PIECE_BYTES, most // 2))
        self._slots = asyncio.Semaphore(max(1, most // self._piece_bytes))

    @property
    def piece_bytes(self) -> int:
        """The most that one fetch brings."""
        return self._piece_bytes

    @property
    def under_way(self) -> int:
        """Blocks being fetched."""
        return len(self._flights)

    def run(self, keys: Sequence[bytes]) -> int:
        """How many leading ones of `keys` could be fetched, all from one owner."""
        return self._owners.run(keys)

    def seconds(self, keys: Sequence[bytes], block_bytes: int) -> float:
        """How long it takes to bring the run of `keys` from who would be asked, as it is now.

        What is under way from there shares the link.
        """
        chosen = self._owners.choose(keys)
        if chosen is None:
            return MAX_FETCH_S
        owner = chosen[0]
        return owner.speed.seconds(len(keys) * block_bytes) * (1 + owner.fetching)

    def lacks(self, keys: Sequence[bytes]) -> bool:
        """Whether the block that ends the run in memory can be fetched."""
        run = self._pool.held(keys)
        after = keys[run : run + 1]
        return bool(after) and (after[0] in self._flights or self.run(after) > 0)

    async def bring(
        self, keys: Sequence[bytes], *, ends_s: float, tenant: str = DEFAULT_TENANT
    ) -> Gap:
        """Bring the next piece of the run of `keys` into memory, until `ends_s`.

        Returns why the next block after the run in memory did not come; NONE: it was not tried, and
        asking again may bring more. Pin what is wanted before awaiting anything else: only until
        then is it safe from eviction.
        """
        run = self._pool.held(keys)
        flight = self._join(keys[run : run + MAX_LEND_KEYS], tenant)
        if flight is None:
            return Gap.MISS
        with kept(self._pool, keys[:run]), flight.awaited(self._pool):
            ended = await flight.wait(ends_s)
        after = keys[self._pool.held(keys) :][:1]
        if not after or after[0] not in flight.keys:
            return Gap.NONE
        if not ended:
            return Gap.LATE
        if flight.failure is Fate.FETCHED:
            return Gap.NONE if after[0] != keys[run] else Gap.MISS
        return _GAPS.get(flight.failure, Gap.MISS)

    def _join(self, keys: Sequence[bytes], tenant: str) -> Flight[Fate] | None:
        """The flight that brings the first of `keys`; None if nobody could be asked."""
        if not keys:
            return None
        if keys[0] in self._flights:
            return self._flights[keys[0]]
        known = (n for n, key in enumerate(keys) if not self.lacked(key))
        wanted = keys[: next(known, len(keys))]
        if not wanted:
            return None
        chosen = self._owners.choose(wanted)
        if chosen is None:
            return None
        flight = self._flight(wanted[: chosen[1]])
        # chosen anew when it begins: what was known may be old by then
        fly = self._fly(flight, self._owners.choose, AskedFor(self._pool, tenant, self._name))
        self._spawn(fly, "umbp-fetch")
        return flight

    def lacked(self, key: bytes) -> bool:
        """Whether a block is neither here nor on its way."""
        return key not in self._flights and not self._here(key)

    async def take(
        self, owner: Owner, epoch: int, keys: Sequence[bytes], admission: Admission
    ) -> tuple[Fate, int]:
        """Fetch a piece of the run of `keys`, none of which is here or on its way, from `owner`.

        Why the rest did not come, or FETCHED, and how many came.
        """
        flight = self._flight(keys)
        await self._fly(flight, lambda keys: (owner, len(keys), epoch), admission)
        return flight.failure, flight.landed

    def _flight(self, keys: Sequence[bytes]) -> Flight[Fate]:
        flight = Flight(list(keys), Fate.BUSY)
        self._flights |= dict.fromkeys(flight.keys, flight)
        return flight

    async def _fly(self, flight: Flight[Fate], choose: Choose, admission: Admission) -> None:
        ends_s, loan = clock.now_s() + MAX_FETCH_S, Loan()
        held = False
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(MAX_FETCH_S):
                    held = await self._slots.acquire()
            chosen = choose(flight.keys) if held else None
            if chosen is not None:
                owner, run, epoch = chosen
                wanted = flight.keys[:run]
                flight.failure = await self._from(owner, epoch, wanted, loan, ends_s, admission)
        finally:
            if held:
                self._slots.release()
            else:
                self.crowded += len(flight.keys)
            for key in flight.keys:
                del self._flights[key]
            flight.end(self._pool, loan.landed)

    async def _from(
        self,
        owner: Owner,
        epoch: int,
        keys: Sequence[bytes],
        loan: Loan,
        ends_s: float,
        admission: Admission,
    ) -> Fate:
        """Fetch what the owner has of `keys`; why the rest did not come, or FETCHED.

        A piece that its owner cut short for its size is whole.
        """
        start_s, fate, why = clock.now_s(), Fate.BUSY, ""
        owner.fetching += 1
        owner.health.began(start_s)
        try:
            async with asyncio.timeout(ends_s - start_s):
                fate = await self._fetch(owner, epoch, keys, loan, ends_s, admission)
        except (TransferError, ProtocolError, ValueError, TimeoutError) as exc:
            fate, why = _fate_of(exc), str(exc)
        finally:
            owner.fetching -= 1
            self._account(owner, keys, loan, fate, clock.now_s() - start_s)
            self._judge(owner, loan, fate, why)
            if loan.pin:
                back = GiveBackRequest(epoch=epoch, pin=loan.pin, corrupt=tuple(loan.corrupt))
                self._spawn(_give_back(owner, back), "umbp-give-back")
        return fate

    def _account(
        self, owner: Owner, keys: Sequence[bytes], loan: Loan, fate: Fate, seconds: float
    ) -> None:
        landed, corrupt = len(loan.landed), len(loan.corrupt)
        owner.blocks[Fate.FETCHED] += landed
        owner.blocks[Fate.CORRUPT] += corrupt
        if fate is not Fate.FETCHED:
            owner.blocks[fate] += len(keys) - landed - corrupt
        owner.bytes += loan.landed_bytes
        if landed:
            owner.seconds += seconds
            owner.speed.observe(loan.landed_bytes, seconds)

    def _judge(self, owner: Owner, loan: Loan, fate: Fate, why: str) -> None:
        """What a fetch says about its owner."""
        if fate is Fate.MOVED:
            self._owners.doubt(owner)
        if not loan.corrupt and fate in _UNDECIDED:
            owner.health.undecided()
        elif not loan.corrupt and fate not in _BLAMED:
            owner.health.answered()
        elif owner.health.failed(clock.now_s()):
            log.warning("umbp: %s is not asked for a while: %s, %s", owner.name, fate.value, why)

    async def _fetch(
        self,
        owner: Owner,
        epoch: int,
        keys: Sequence[bytes],
        loan: Loan,
        ends_s: float,
        admission: Admission,
    ) -> Fate:
        left_s = ends_s - clock.now_s()
        asked = LendRequest(
            epoch=epoch,
            keys=tuple(key.hex() for key in keys),
            max_bytes=self._piece_bytes,
            within_ms=max(1, int(1e3 * left_s)),
            tenant=admission.tenant,
            reader=admission.reader,
        )
        answer = await owner.calls.lend(asked, within_s=left_s)
        if answer.epoch != epoch:
            return Fate.MOVED
        loan.pin, loan.cut = answer.pin, answer.cut
        blocks = sound_blocks(answer, len(keys), self._piece_bytes)
        if not blocks:
            return Fate.ABSENT
        items = [(key, block.size) for key, block in zip(keys, blocks, strict=False)]
        grants = admission.reserve(items)
        try:
            lent = (answer, blocks, keys, grants)
            await self._landing.land(*lent, loan, ends_s, admission.arrived)
        finally:
            mine = [grant.generation for grant in grants if grant.grant is Grant.RESERVED]
            self._pool.abort(mine, writer=OWN_WRITER)
        if loan.corrupt:
            return Fate.CORRUPT
        if any(grant.grant is Grant.FULL for grant in grants):
            return Fate.NO_ROOM
        return Fate.FETCHED if answer.cut or len(blocks) == len(keys) else Fate.ABSENT


def _fate_of(exc: Exception) -> Fate:
    match exc:
        case TransferLate() | TimeoutError():
            return Fate.LATE
        case RegionGone():
            return Fate.MOVED
        case OwnerBusy() | TransferCancelled():
            return Fate.BUSY
        case TransferError():
            return Fate.UNREACHABLE
        case _:
            return Fate.CORRUPT  # an answer without meaning


async def _give_back(owner: Owner, back: GiveBackRequest) -> None:
    """A pin that can't be given back lapses."""
    with suppress(KimistackError):
        await owner.calls.give_back(back, within_s=GIVE_BACK_S)
