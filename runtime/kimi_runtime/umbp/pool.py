"""What the pool holds: reservations, blocks, pins and their pages. Pure: no bytes, I/O or clock.

A put is two-phase. `reserve` hands out pages under a new *generation*; the writer stores into them
and commits that generation with its tags; only then is the block visible. A reservation whose time
is over can't be committed any more, but a generation stops a late *commit*, not a late *store*: its
pages stay in quarantine until the writer itself gives them back (`commit`, `abort`) or can't write
any more (`writer_gone`). A get pins blocks for a lease.

The pool is the one entry to its parts: `writers` with their `reservations`, the `room` that is made
for them, the `shelf` of what is visible, its `readers`, and the books (`audit`).

Every block that was ever put or adopted is live, evicted or dropped; `check_integrity` counts them
and the pages.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kimi_connect.keeping import Filled
from kimi_connect.payloads import DEFAULT_TENANT
from kimi_connect.wire import Commitment, Extent, Grant, Granted, GroupTag, Priority
from kimi_runtime.umbp import audit
from kimi_runtime.umbp.funnel import Funnel, Where
from kimi_runtime.umbp.ghosts import Ghosts
from kimi_runtime.umbp.holdings import Holdings
from kimi_runtime.umbp.journal import Journal, Kept, NoJournal
from kimi_runtime.umbp.pages import Pages
from kimi_runtime.umbp.readers import Readers
from kimi_runtime.umbp.records import Block, Pinned, PoolCounters, Reservation
from kimi_runtime.umbp.reservations import Reservations
from kimi_runtime.umbp.retention import Hint, Retention
from kimi_runtime.umbp.room import Room
from kimi_runtime.umbp.shelf import Shelf
from kimi_runtime.umbp.tenants import Accounts
from kimi_runtime.umbp.writers import Writers

__all__ = ["DEFAULT_TENANT", "Pool"]

PUT = b"put"
"""The writer of what is put without bytes."""


@dataclass(slots=True)
class Pool:
    """The bookkeeping of `total_pages` pages of `page_bytes`; changes are told to `feed`.

    `high` and `low` are watermarks: `trim` brings a memory fuller than `high` down to `low`.
    """

    total_pages: int
    page_bytes: int
    feed: Holdings
    reservation_ttl_s: float
    pin_lease_s: float
    ghost_keys: int = 65_536
    """Evicted keys remembered, so that a later miss can say it was an eviction."""
    segments: Sequence[int] = ()
    high: float = 1.0
    low: float = 1.0
    journal: Journal = field(default_factory=NoJournal)
    take: Callable[[int], bool] = lambda generation: False
    """See `Reservations.take`."""
    retention: Retention = field(default_factory=Retention)
    accounts: Accounts = field(default=None)  # type: ignore[assignment]
    counters: PoolCounters = field(default_factory=PoolCounters)
    funnel: Funnel = field(default_factory=Funnel)
    ghosts: Ghosts = field(init=False)
    _shelf: Shelf = field(init=False)
    _readers: Readers = field(init=False)
    _reservations: Reservations = field(init=False)
    _room: Room = field(init=False)
    _writers: Writers = field(init=False)

    def __post_init__(self) -> None:
        if self.accounts is None:
            self.accounts = Accounts(self.total_pages)
        self.ghosts = Ghosts(self.total_pages * self.page_bytes, self.ghost_keys)
        self._shelf = shelf = Shelf(
            Pages(self.total_pages, self.segments),
            self.feed,
            self.journal,
            self.accounts,
            self.retention,
            self.ghosts,
            self.counters,
        )
        self._readers = Readers(shelf)
        self._reservations = Reservations(
            self.journal,
            self.accounts,
            self.counters,
            give_back=lambda extents: shelf.pages.give_back(extents),
            take=self.take,
        )
        self._room = Room(shelf, self._reservations)
        self._writers = Writers(shelf, self._reservations, self._room, self.page_bytes)

    @property
    def free_pages(self) -> int:
        """Pages nobody holds."""
        return self._shelf.pages.free

    @property
    def evictable_pages(self) -> int:
        """Pages of unpinned blocks."""
        return self._shelf.idle.pages

    @property
    def live_blocks(self) -> int:
        """Visible blocks."""
        return len(self._shelf.blocks)

    @property
    def live_bytes(self) -> int:
        """Bytes of visible blocks: what was put or adopted and is neither evicted nor dropped."""
        return self._shelf.live_bytes

    @property
    def number(self) -> int:
        """The newest generation or pin given out."""
        return self._writers.number

    @property
    def open_pins(self) -> int:
        """Pins not yet ended."""
        return len(self._readers.pins)

    def pinned_blocks(self, pin: int) -> int:
        """How many blocks a pin holds; 0 once it has ended."""
        pinned = self._readers.pins.get(pin)
        return 0 if pinned is None else len(pinned.blocks)

    def reservations(self, *, quarantined: bool) -> int:
        """How many reservations are open and no stock, or in quarantine."""
        return self._reservations.count(quarantined=quarantined)

    @property
    def stocks(self) -> int:
        """Blocks that writers have stocks for."""
        return self._reservations.stocks

    def stock_of(self, writer: bytes) -> int:
        """Pages in a writer's stock."""
        return self._reservations.stock_of(writer)

    @property
    def crowded(self) -> bool:
        """Whether `trim` would evict."""
        return self._room.short(self.high)

    def writers(self) -> set[bytes]:
        """Everybody with a reservation in quarantine."""
        return self._reservations.writers()

    def some_free(self, pages: int) -> tuple[Extent, ...]:
        """Pages that are free as of now, nobody's; ValueError if there are fewer."""
        return self._shelf.some_free(pages)

    def held(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run of `keys` held. Renews nothing: probes must not feed LRU."""
        return self._shelf.run(keys)

    def block(self, key: bytes) -> Block | None:
        """The visible block of a key."""
        return self._shelf.blocks.get(key)

    def blocks(self) -> list[Block]:
        """Every visible block."""
        return list(self._shelf.blocks.values())

    def warmest(self) -> list[Block]:
        """Every visible block, the warmest first, a run's head before what hangs on it."""
        return self._shelf.warmest()

    def use(self, keys: Iterable[bytes], now_s: float = 0.0) -> None:
        """Count a use of each of `keys` that is held."""
        self._shelf.use(keys, now_s)

    def touch(self, keys: Sequence[bytes], now_s: float = 0.0) -> int:
        """Make the leading run of `keys` the warmest, its head most of all; the run's length.

        A chain that was put in parts needs it: a part put later is warmer than the head it hangs
        on, and without the head it is worth nothing.
        """
        return self._shelf.touch(keys, now_s)

    def hint(self, hint: Hint, now_s: float) -> int:
        """Learn of a session; how many of its blocks here that concerns."""
        return self._shelf.hint(hint, now_s)

    def within(self, keys: Sequence[bytes], pages: int) -> int:
        """Length of the leading run held here that takes at most `pages`, but at least one."""
        return self._shelf.within(keys, pages)

    def reserve(
        self,
        items: Sequence[tuple[bytes, int]],
        *,
        writer: bytes,
        now_s: float,
        ttl_s: float | None = None,
        evict: bool = True,
        below: float = math.inf,
        tenant: str = DEFAULT_TENANT,
        priority: Priority = Priority.NORMAL,
        as_one: bool = False,
    ) -> list[Granted]:
        """Pages for every (key, size) until one doesn't fit; the rest is FULL, at once.

        `ttl_s` is how long they are held, if not `reservation_ttl_s`. With `evict`, unpinned blocks
        worth less than `below` (seconds a byte; see `retention`) make room: none of these keys', if
        they are put `as_one`, for a chain without its head is worth nothing. Two writers may hold a
        reservation of one key: who commits first wins, so a dead writer keeps nobody from putting.
        """
        expires_s = now_s + (self.reservation_ttl_s if ttl_s is None else ttl_s)
        what = (writer, expires_s, self.accounts.of(tenant), priority, below if evict else 0.0)
        if not as_one:
            return self._writers.reserve(items, *what, now_s=now_s)
        spared = self._shelf.spare(key for key, _ in items)
        grants = self._writers.reserve(items, *what, now_s=now_s)
        self._shelf.spared(spared)
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
        return self._writers.commit(blocks[::-1], writer, now_s)[::-1]

    def put(self, keys: Sequence[bytes], *, now_s: float, tenant: str = DEFAULT_TENANT) -> int:
        """Keep leading blocks of a page each, whose bytes nobody stores; how many are held now.

        It is what `reserve` of all and `commit` of what was granted come to.
        """
        account = self.accounts.of(tenant)
        if self._writers.put(keys, account, now_s):
            return len(keys)
        items = [(key, self.page_bytes) for key in keys]
        expires_s, what = now_s + self.reservation_ttl_s, (account, Priority.NORMAL, math.inf)
        granted = self._writers.reserve(items, PUT, expires_s, *what, now_s=now_s)
        fresh = [(one.generation, ()) for one in granted if one.grant is Grant.RESERVED]
        self.commit(fresh, writer=PUT, now_s=now_s)
        return next((n for n, one in enumerate(granted) if one.grant is Grant.FULL), len(keys))

    def stock(
        self,
        count: int,
        size: int,
        *,
        writer: bytes,
        now_s: float,
        tenant: str = DEFAULT_TENANT,
    ) -> list[Granted]:
        """Pages for up to `count` blocks of `size` bytes whose keys come with `keep`.

        Nothing is evicted or scattered for a stock, as much as all stocks have is left free, and it
        is taken back, unless claimed, before anything is evicted or refused for want of pages,
        quota or notes in the journal; at the latest when it was not used for `reservation_ttl_s`.
        """
        expires_s = now_s + self.reservation_ttl_s
        return self._writers.stock(count, size, writer, expires_s, self.accounts.of(tenant))

    def keep(
        self,
        blocks: Sequence[Filled],
        *,
        writer: bytes,
        now_s: float,
        priority: Priority = Priority.NORMAL,
    ) -> list[Commitment]:
        """Make blocks visible that were written to the writer's stock; those with generation 0 were
        not, since their writer takes them for held: DUPLICATE if they are, EXPIRED if not.

        Their leading run becomes the warmest, its head most of all.
        """
        keep = self._writers.keep
        states = [keep(block, writer, now_s, priority) for block in reversed(blocks)][::-1]
        if any(state is not Commitment.COMMITTED for state in states):
            self.touch([block.key for block in blocks], now_s)
        return states

    def revoke(self) -> int:
        """Take every stock back that is not claimed; how many blocks of them that were."""
        return self._reservations.revoke()

    def abort(self, generations: Iterable[int], *, writer: bytes) -> int:
        """The writer stores no more to these reservations; how many that freed."""
        return self._reservations.abort(generations, writer)

    def reclaim(self, *, writer: bytes, writing: Iterable[int]) -> int:
        """A writer is back on a new connection and stores only to `writing`, if at all."""
        return self._reservations.reclaim(writer, writing)

    def quarantine(self, writer: bytes) -> int:
        """The writer's connection is lost: nothing of it can be committed; how many that holds."""
        return self._reservations.quarantine(writer)

    def writer_gone(self, writer: bytes) -> int:
        """The writer's process ended, so nothing can store to its pages; how many that freed."""
        return self._reservations.writer_gone(writer)

    def arrived(self, keys: Iterable[bytes]) -> None:
        """Peers lent these for somebody's use, which has yet to come: it is the first."""
        here = [key for key in keys if key in self._shelf.blocks]
        self.funnel.brought(here, Where.PEER)
        for key in here:
            self._shelf.blocks[key].uses = 0

    def moved(self, key: bytes, *, uses: int, used_s: float) -> None:
        """A block came from a daemon where it was used so often, and last at `used_s`."""
        block = self.block(key)
        if block is not None:
            block.uses, block.used_s = uses, used_s
            self._shelf.idle.warm([key])

    def pin(
        self, keys: Sequence[bytes], *, reader: int, now_s: float, lease_s: float | None = None
    ) -> Pinned:
        """Keep the leading run of `keys` in place for a lease, and make it the warmest.

        `lease_s` is how long that is, if not `pin_lease_s`.
        """
        number = self._writers.next_number()
        lease_s = self.pin_lease_s if lease_s is None else lease_s
        return self._readers.pin(number, keys, reader=reader, now_s=now_s, lease_s=lease_s)

    def renew(self, pin: int, *, reader: int, now_s: float) -> bool:
        """Extend a pin by one lease from now; False if it has lapsed."""
        return self._readers.renew(pin, reader=reader, now_s=now_s, lease_s=self.pin_lease_s)

    def unpin(self, pin: int, corrupt: Iterable[int], *, reader: int, now_s: float) -> bool:
        """End a pin; whether it held all the time.

        If it did not, what was read may be of another block. If it did, the blocks at the
        positions `corrupt` don't match their tags and are dropped.
        """
        return self._readers.unpin(pin, corrupt, reader=reader, now_s=now_s)

    def reader_gone(self, reader: int) -> int:
        """The reader's connection is lost: its pins end; how many there were."""
        return self._readers.gone(reader)

    def expire(self, now_s: float) -> None:
        """Quarantine reservations whose time is over, and end lapsed pins."""
        self._reservations.expire(now_s)
        self._readers.expire(now_s)

    def trim(self, now_s: float, at_most: int = 1 << 30) -> int:
        """Evict down to the low watermark if the high one was passed; how many went.

        Done beside requests, so that a put finds free pages and needs not wait for a choice. After
        `at_most` blocks it has not come to an end, and goes on with the next call.
        """
        return self._room.trim(now_s, self.high, self.low, at_most)

    def evict(self, blocks: int, now_s: float = 0.0) -> list[bytes]:
        """Forget up to `blocks` unpinned blocks, least worth first, and what hangs on the last of
        them; their keys.
        """
        keys: list[bytes] = []
        while len(keys) < blocks and (victim := self._shelf.idle.victim(now_s)) is not None:
            keys += self._shelf.evict(victim)
        return keys

    def forget(self, keys: Iterable[bytes]) -> tuple[int, int, int]:
        """Evict those of `keys` that nobody reads: how many, their bytes, and how many are read."""
        return self._shelf.forget(keys)

    def clear(self, up_to: int | None = None) -> int:
        """Forget what was put or reserved up to a generation (None: until now); how many went.

        What is reserved by then can't be committed later. Repeating a clear takes nothing newer.
        """
        up_to = self.number if up_to is None else min(up_to, self.number)
        self._writers.clear(up_to)
        return self._shelf.clear(up_to)

    def drop(self, key: bytes, generation: int) -> bool:
        """A block does not match its tags: drop it, if it is still this one."""
        block = self.block(key)
        if block is None or block.generation != generation:
            return False
        self._shelf.drop(block)
        return True

    def adopt(self, kept: Kept, now_s: float) -> None:
        """Take over what an earlier daemon had, before anything else is done with this pool.

        Its reservations are in quarantine: their writers may still be there. ValueError, and
        nothing is taken over, if two of them share a page.
        """
        extents = [extent for block in kept.blocks for extent in block.extents]
        extents += [extent for old in kept.reservations for extent in old.extents]
        self._shelf.pages = Pages(self.total_pages, self.segments, used=extents)
        self._writers.number = max(self.number, kept.number)
        for old in kept.reservations:
            account = self.accounts.of(old.tenant)
            held = (b"", old.generation, 0, old.extents, old.writer, now_s)
            self._reservations.adopt(Reservation(*held, account, Priority.NORMAL))
        self._shelf.adopt(kept.blocks, now_s)

    def check_integrity(self) -> None:
        """AssertionError unless every page and every block is accounted for exactly once."""
        audit.check(self)
