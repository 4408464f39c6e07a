"""What the pool holds: reservations, blocks, pins and their pages. Pure: no bytes, I/O or clock.

A put is two-phase. `reserve` hands out pages under a new *generation*; the writer stores into them
and commits that generation with its tags; only then is the block visible. A reservation whose time
is over can't be committed any more, but a generation stops a late *commit*, not a late *store*: its
pages stay in quarantine until the writer itself gives them back (`commit`, `abort`) or can't write
any more (`writer_gone`). A get pins blocks for a lease, which its reader renews; a lapsed pin
protects nothing, and `unpin` says so. Unpinned blocks go least recently used first.

Every block that was ever put is live, evicted or dropped; `check_integrity` counts them and the
pages.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kimi_connect.wire import Commitment, Extent, Gap, Grant, Granted, GroupTag
from kimi_runtime.umbp.holdings import Holdings
from kimi_runtime.umbp.pages import Pages
from kimi_runtime.umbp.records import Block, Pinned, PoolCounters, Reservation


@dataclass(slots=True)
class Pool:
    """The bookkeeping of `total_pages` pages of `page_bytes`; changes are told to `feed`."""

    total_pages: int
    page_bytes: int
    feed: Holdings
    reservation_ttl_s: float
    pin_lease_s: float
    ghost_keys: int = 65_536
    """Evicted keys remembered, so that a later miss can say it was an eviction."""
    counters: PoolCounters = field(default_factory=PoolCounters)
    _pages: Pages = field(init=False)
    _blocks: dict[bytes, Block] = field(default_factory=dict)
    _idle: OrderedDict[bytes, Block] = field(default_factory=OrderedDict)
    """Visible unpinned blocks, coldest first."""
    _idle_pages: int = 0
    _reservations: dict[int, Reservation] = field(default_factory=dict)
    _pins: dict[int, Pinned] = field(default_factory=dict)
    _ghosts: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    _number: int = 0
    _cleared_at: int = 0

    def __post_init__(self) -> None:
        self._pages = Pages(self.total_pages)

    @property
    def free_pages(self) -> int:
        """Pages nobody holds."""
        return self._pages.free

    @property
    def evictable_pages(self) -> int:
        """Pages of unpinned blocks."""
        return self._idle_pages

    @property
    def live_blocks(self) -> int:
        """Visible blocks."""
        return len(self._blocks)

    @property
    def open_pins(self) -> int:
        """Pins not yet ended."""
        return len(self._pins)

    def pinned_blocks(self, pin: int) -> int:
        """How many blocks a pin holds; 0 once it has ended."""
        pinned = self._pins.get(pin)
        return 0 if pinned is None else len(pinned.blocks)

    def reservations(self, *, quarantined: bool) -> int:
        """How many reservations are open, or in quarantine."""
        return sum(r.quarantined is quarantined for r in self._reservations.values())

    def held(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run of `keys` held. Renews nothing: probes must not feed LRU."""
        return next((n for n, key in enumerate(keys) if key not in self._blocks), len(keys))

    def block(self, key: bytes) -> Block | None:
        """The visible block of a key."""
        return self._blocks.get(key)

    def use(self, keys: Iterable[bytes]) -> None:
        """Count a use of each of `keys` that is held."""
        for key in keys:
            if key in self._blocks:
                self._blocks[key].uses += 1

    def touch(self, keys: Sequence[bytes]) -> int:
        """Make the leading run of `keys` the warmest, its head most of all; the run's length.

        A chain that was put in parts needs it: a part put later is warmer than the head it hangs
        on, and without the head it is worth nothing.
        """
        run = keys[: self.held(keys)]
        for key in reversed(run):
            if key in self._idle:
                self._idle.move_to_end(key)
        return len(run)

    def within(self, keys: Sequence[bytes], pages: int) -> int:
        """Length of the leading run held here that takes at most `pages`, but at least one."""
        for position, key in enumerate(keys):
            block = self._blocks.get(key)
            if block is None:
                return position
            pages -= block.pages
            if pages < 0 and position:
                return position
        return len(keys)

    def reserve(
        self,
        items: Iterable[tuple[bytes, int]],
        *,
        writer: bytes,
        now_s: float,
        evict: bool = True,
    ) -> list[Granted]:
        """Pages for every (key, size) until one doesn't fit; the rest is FULL, at once.

        With `evict`, unpinned blocks make room. Two writers may hold a reservation of one key: who
        commits first wins, so a dead writer keeps nobody from putting.
        """
        grants: list[Granted] = []
        full = False
        for key, size in items:
            if key in self._blocks:
                grants.append(Granted(Grant.HELD))
                continue
            extents = None if full else self._make_room(-(-size // self.page_bytes), evict)
            if extents is None:
                full = True
                self.counters.refused += 1
                grants.append(Granted(Grant.FULL))
                continue
            self._number += 1
            self.counters.reserved += 1
            expires_s = now_s + self.reservation_ttl_s
            self._reservations[self._number] = Reservation(
                key, self._number, size, extents, writer, expires_s
            )
            grants.append(Granted(Grant.RESERVED, self._number, extents))
        return grants

    def commit(
        self,
        blocks: Sequence[tuple[int, tuple[GroupTag, ...]]],
        *,
        writer: bytes,
        now_s: float,
    ) -> list[Commitment]:
        """Make the blocks of these generations visible. A commit also says: I store no more.

        The head of a batch becomes the warmest, so that a prefix is evicted from its end.
        """
        states = [self._commit(*block, writer, now_s) for block in reversed(blocks)]
        return states[::-1]

    def abort(self, generations: Iterable[int], *, writer: bytes) -> int:
        """The writer stores no more to these reservations; how many that freed."""
        freed = 0
        for generation in generations:
            reservation = self._owned(generation, writer)
            if reservation is not None:
                self._end(reservation)
                self.counters.aborted += 1
                freed += 1
        return freed

    def reclaim(self, *, writer: bytes, writing: Iterable[int]) -> int:
        """A writer is back on a new connection and stores only to `writing`, if at all."""
        kept = set(writing)
        own = [r for r in self._reservations.values() if r.writer == writer]
        for reservation in own:
            if reservation.generation in kept:
                reservation.quarantined = True
        return self.abort([r.generation for r in own if r.generation not in kept], writer=writer)

    def quarantine(self, writer: bytes) -> int:
        """The writer's connection is lost: nothing of it can be committed; how many that holds."""
        own = [r for r in self._reservations.values() if r.writer == writer]
        for reservation in own:
            reservation.quarantined = True
        return len(own)

    def writer_gone(self, writer: bytes) -> int:
        """The writer's process ended, so nothing can store to its pages; how many that freed."""
        own = [r for r in self._reservations.values() if r.writer == writer]
        for reservation in own:
            self._end(reservation)
            self.counters.writer_gone += 1
        return len(own)

    def pin(self, keys: Sequence[bytes], *, reader: int, now_s: float) -> Pinned:
        """Keep the leading run of `keys` in place for one lease, and make it the warmest."""
        run = [self._blocks[key] for key in keys[: self.held(keys)]]
        gap = Gap.NONE
        if len(run) < len(keys):
            gap = Gap.EVICTED if keys[len(run)] in self._ghosts else Gap.MISS
        self._number += 1
        pinned = Pinned(self._number, reader, tuple(run), gap, now_s + self.pin_lease_s)
        for block in run:
            if not block.pins and self._idle.pop(block.key, None) is not None:
                self._idle_pages -= block.pages
            block.pins += 1
        if run:
            self._pins[pinned.number] = pinned
        self.counters.pinned += len(run)
        return pinned

    def renew(self, pin: int, *, reader: int, now_s: float) -> bool:
        """Extend a pin by one lease from now; False if it has lapsed."""
        pinned = self._pins.get(pin)
        if pinned is None or pinned.reader != reader or now_s >= pinned.expires_s:
            return False
        pinned.expires_s = now_s + self.pin_lease_s
        return True

    def unpin(self, pin: int, corrupt: Iterable[int], *, reader: int, now_s: float) -> bool:
        """End a pin; whether it held all the time.

        If it did not, what was read may be of another block. If it did, the blocks at the
        positions `corrupt` don't match their tags and are dropped.
        """
        pinned = self._pins.get(pin)
        if pinned is None or pinned.reader != reader:
            return False
        if now_s >= pinned.expires_s:
            self._lapse(pinned)
            return False
        for position in corrupt:
            if position < len(pinned.blocks):
                self._drop(pinned.blocks[position])
        self._unpin(pinned)
        return True

    def reader_gone(self, reader: int) -> int:
        """The reader's connection is lost: its pins end; how many there were."""
        own = [pinned for pinned in self._pins.values() if pinned.reader == reader]
        for pinned in own:
            self._unpin(pinned)
        return len(own)

    def expire(self, now_s: float) -> None:
        """Quarantine reservations whose time is over, and end lapsed pins."""
        for reservation in self._reservations.values():
            if now_s >= reservation.expires_s:
                reservation.quarantined = True
        for pinned in [p for p in self._pins.values() if now_s >= p.expires_s]:
            self._lapse(pinned)

    def evict(self, blocks: int) -> list[bytes]:
        """Forget up to `blocks` unpinned blocks, coldest first; their keys."""
        return [self._evict_coldest() for _ in range(min(blocks, len(self._idle)))]

    def clear(self) -> int:
        """Forget everything; what is reserved now can't be committed later. How many went."""
        blocks = list(self._blocks.values())
        self._cleared_at = self._number
        for block in blocks:
            self._forget(block)
            self.counters.dropped_bytes += block.size
        self.counters.cleared += len(blocks)
        self._ghosts.clear()
        self.feed.clear()
        return len(blocks)

    def check_integrity(self) -> None:
        """AssertionError unless every page and every block is accounted for exactly once."""
        owner: dict[int, str] = {}
        gone = {id(b): b for p in self._pins.values() for b in p.blocks if b.gone}
        runs = [(Extent(*run), "free") for run in self._pages.free_runs().items()]
        runs += [(e, "block") for b in self._blocks.values() for e in b.extents]
        runs += [(e, "gone") for b in gone.values() for e in b.extents]
        runs += [(e, "reserved") for r in self._reservations.values() for e in r.extents]
        for (first, count), kind in runs:
            for page in range(first, first + count):
                assert page not in owner, f"page {page} is {owner[page]} and {kind}"
                owner[page] = kind
        assert len(owner) == self.total_pages, f"{self.total_pages - len(owner)} pages are lost"
        c = self.counters
        assert c.put == len(self._blocks) + c.evicted + c.corrupt + c.cleared
        live_bytes = sum(block.size for block in self._blocks.values())
        assert c.put_bytes == live_bytes + c.evicted_bytes + c.dropped_bytes
        ended = c.put + c.duplicate + c.aborted + c.expired + c.writer_gone
        assert c.reserved == ended + len(self._reservations)
        assert self._idle_pages == sum(block.pages for block in self._idle.values())
        assert all(not b.pins and self._blocks[k] is b for k, b in self._idle.items())
        pins = sum(block.pins for block in (*self._blocks.values(), *gone.values()))
        assert pins == sum(len(pinned.blocks) for pinned in self._pins.values())
        assert len(self.feed) == len(self._blocks)

    def _make_room(self, pages: int, evict: bool) -> tuple[Extent, ...] | None:
        room = self._pages.free + (self._idle_pages if evict else 0)
        if pages > room:
            return None  # evicting would not be enough: leave what is here
        while self._pages.free < pages:
            self._evict_coldest()
        return self._pages.take(pages)

    def _evict_coldest(self) -> bytes:
        key, block = next(iter(self._idle.items()))
        self._forget(block)
        self.feed.remove([key])
        self.counters.evicted += 1
        self.counters.evicted_bytes += block.size
        self._ghosts[key] = None
        if len(self._ghosts) > self.ghost_keys:
            self._ghosts.popitem(last=False)
        return key

    def _commit(
        self, generation: int, tags: tuple[GroupTag, ...], writer: bytes, now_s: float
    ) -> Commitment:
        reservation = self._owned(generation, writer)
        if reservation is None:
            return Commitment.EXPIRED
        late = reservation.quarantined or now_s >= reservation.expires_s
        if late or generation <= self._cleared_at:
            self._end(reservation)
            self.counters.expired += 1
            return Commitment.EXPIRED
        key = reservation.key
        if key in self._blocks:
            self._end(reservation)
            self.counters.duplicate += 1
            return Commitment.DUPLICATE
        del self._reservations[generation]
        pages = sum(extent.pages for extent in reservation.extents)
        block = Block(key, generation, reservation.size, pages, reservation.extents, tags)
        self._blocks[key] = self._idle[key] = block
        self._idle_pages += pages
        self._ghosts.pop(key, None)
        self.feed.add([key])
        self.counters.put += 1
        self.counters.put_bytes += block.size
        return Commitment.COMMITTED

    def _owned(self, generation: int, writer: bytes) -> Reservation | None:
        reservation = self._reservations.get(generation)
        return reservation if reservation is not None and reservation.writer == writer else None

    def _end(self, reservation: Reservation) -> None:
        del self._reservations[reservation.generation]
        self._pages.give_back(reservation.extents)

    def _lapse(self, pinned: Pinned) -> None:
        self.counters.lapsed += len(pinned.blocks)
        self._unpin(pinned)

    def _unpin(self, pinned: Pinned) -> None:
        del self._pins[pinned.number]
        for block in reversed(pinned.blocks):  # the head of the run becomes the warmest
            block.pins -= 1
            if block.pins:
                continue
            if block.gone:
                self._pages.give_back(block.extents)
            else:
                self._idle[block.key] = block
                self._idle_pages += block.pages

    def _drop(self, block: Block) -> None:
        if block.gone:
            return
        self._forget(block)
        self.feed.remove([block.key])
        self.counters.corrupt += 1
        self.counters.dropped_bytes += block.size

    def _forget(self, block: Block) -> None:
        del self._blocks[block.key]
        block.gone = True
        if self._idle.pop(block.key, None) is not None:
            self._idle_pages -= block.pages
        if not block.pins:
            self._pages.give_back(block.extents)
