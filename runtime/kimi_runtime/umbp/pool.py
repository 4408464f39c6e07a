"""What the pool holds: reservations, blocks, pins and their pages. Pure: no bytes, I/O or clock.

A put is two-phase. `reserve` hands out pages under a new *generation*; the writer stores into them
and commits that generation with its tags; only then is the block visible. A reservation whose time
is over can't be committed any more, but a generation stops a late *commit*, not a late *store*: its
pages stay in quarantine until the writer itself gives them back (`commit`, `abort`) or can't write
any more (`writer_gone`). A get pins blocks for a lease, which its reader renews; a lapsed pin
protects nothing, and `unpin` says so. Which unpinned block goes first is `eviction`'s and
`retention`'s to say, within what `tenants` allows.

Every block that was ever put or adopted is live, evicted or dropped; `check_integrity` counts them
and the pages.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from kimi_connect.keeping import Filled
from kimi_connect.payloads import DEFAULT_TENANT
from kimi_connect.states import attached
from kimi_connect.wire import Commitment, Extent, Gap, Grant, Granted, GroupTag, Priority
from kimi_runtime.umbp import audit
from kimi_runtime.umbp.eviction import Idle
from kimi_runtime.umbp.funnel import Funnel, Where
from kimi_runtime.umbp.ghosts import Ghosts
from kimi_runtime.umbp.holdings import Holdings
from kimi_runtime.umbp.journal import Journal, Kept, NoJournal
from kimi_runtime.umbp.pages import Pages
from kimi_runtime.umbp.records import Block, Pinned, PoolCounters, Reservation
from kimi_runtime.umbp.reservations import Reservations
from kimi_runtime.umbp.retention import Hint, Retention
from kimi_runtime.umbp.tenants import Account, Accounts

__all__ = ["DEFAULT_TENANT", "Pool"]

MOST_STOCKED = 1024
"""Blocks in all stocks: a part of the reservations that a small arena has notes for."""


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
    _pages: Pages = field(init=False)
    _idle: Idle = field(init=False)
    _blocks: dict[bytes, Block] = field(default_factory=dict)
    _reservations: Reservations = field(init=False)
    _pins: dict[int, Pinned] = field(default_factory=dict)
    _trimming: bool = False
    _number: int = 0
    _cleared_at: int = 0

    def __post_init__(self) -> None:
        if self.accounts is None:
            self.accounts = Accounts(self.total_pages)
        self.ghosts = Ghosts(self.total_pages * self.page_bytes, self.ghost_keys)
        self._pages = Pages(self.total_pages, self.segments)
        self._idle = Idle(self.accounts, self.retention)
        self._reservations = Reservations(
            self.journal,
            self.accounts,
            self.counters,
            give_back=lambda extents: self._pages.give_back(extents),
            take=self.take,
        )

    @property
    def free_pages(self) -> int:
        """Pages nobody holds."""
        return self._pages.free

    @property
    def evictable_pages(self) -> int:
        """Pages of unpinned blocks."""
        return self._idle.pages

    @property
    def live_blocks(self) -> int:
        """Visible blocks."""
        return len(self._blocks)

    @property
    def live_bytes(self) -> int:
        """Bytes of visible blocks: what was put or adopted and is neither evicted nor dropped."""
        c = self.counters
        return c.put_bytes + c.adopted_bytes - c.evicted_bytes - c.dropped_bytes

    @property
    def number(self) -> int:
        """The newest generation or pin given out."""
        return self._number

    @property
    def open_pins(self) -> int:
        """Pins not yet ended."""
        return len(self._pins)

    def pinned_blocks(self, pin: int) -> int:
        """How many blocks a pin holds; 0 once it has ended."""
        pinned = self._pins.get(pin)
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
        return self._trimming or self._spare_pages < (1.0 - self.high) * self.total_pages

    def writers(self) -> set[bytes]:
        """Everybody with a reservation in quarantine."""
        return self._reservations.writers()

    def some_free(self, pages: int) -> tuple[Extent, ...]:
        """Pages that are free as of now, nobody's; ValueError if there are fewer."""
        extents = self._pages.take(pages)
        if extents is None:
            raise ValueError(f"{pages} pages of {self._pages.free} that are free")
        self._pages.give_back(extents)
        return extents

    def held(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run of `keys` held. Renews nothing: probes must not feed LRU."""
        return len(list(takewhile(self._blocks.__contains__, keys)))

    def block(self, key: bytes) -> Block | None:
        """The visible block of a key."""
        return self._blocks.get(key)

    def blocks(self) -> list[Block]:
        """Every visible block."""
        return list(self._blocks.values())

    def warmest(self) -> list[Block]:
        """Every visible block, the warmest first, a run's head before what hangs on it."""
        pinned = [block for block in self._blocks.values() if block.pins]
        return pinned + list(self._idle)[::-1]

    def use(self, keys: Iterable[bytes], now_s: float = 0.0) -> None:
        """Count a use of each of `keys` that is held."""
        used = [key for key in keys if key in self._blocks]
        for key in used:
            block = self._blocks[key]
            block.uses += 1
            block.used_s = _at(now_s, block.used_s)
            block.account.heard(now_s)
            self.retention.used(key)
        self._idle.warm(used[::-1])

    def touch(self, keys: Sequence[bytes], now_s: float = 0.0) -> int:
        """Make the leading run of `keys` the warmest, its head most of all; the run's length.

        A chain that was put in parts needs it: a part put later is warmer than the head it hangs
        on, and without the head it is worth nothing.
        """
        run = keys[: self.held(keys)]
        for key in run:
            self._blocks[key].used_s = _at(now_s, self._blocks[key].used_s)
        self._idle.warm(run[::-1])
        return len(run)

    def hint(self, hint: Hint, now_s: float) -> int:
        """Learn of a session; how many of its blocks here that concerns."""
        changed = self.retention.hint(hint, now_s)
        for key in changed:
            if key not in self._blocks:
                self.retention.gone(key)
        here = [key for key in changed if key in self._blocks]
        self._idle.warm(here[::-1])
        return len(here)

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
            return self._grants(items, *what, now_s=now_s)
        held = {key: self._blocks[key] for key, _ in items if key in self._blocks}
        spared = [block for block in held.values() if not block.pins]
        self._idle.remove(spared)
        grants = self._grants(items, *what, now_s=now_s)
        self._idle.add(reversed(spared))
        return grants

    def _grants(
        self,
        items: Sequence[tuple[bytes, int]],
        writer: bytes,
        expires_s: float,
        account: Account,
        priority: Priority,
        below: float,
        *,
        now_s: float,
    ) -> list[Granted]:
        grants: list[Granted] = []
        full = False
        for key, size in items:
            if key in self._blocks:
                grants.append(Granted(Grant.HELD))
                continue
            granted = None
            if not full:
                extents = self._make_room(size, account, below, now_s)
                if extents is not None:
                    granted = self._reserve(
                        key, size, extents, writer, expires_s, account=account, priority=priority
                    )
            if granted is None:
                full = True
                self.counters.refused += 1
                granted = Granted(Grant.FULL)
            grants.append(granted)
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
        account, pages = self.accounts.of(tenant), -(-size // self.page_bytes)
        spare = (self._pages.free - self._reservations.stock_pages) // 2
        if account.terms.quota_pages is not None:
            spare = min(spare, account.terms.quota_pages - account.used_pages)
        grants: list[Granted] = []
        for _ in range(min(count, spare // pages, MOST_STOCKED - self.stocks)):
            extents = self._pages.take(pages)
            assert extents is not None
            if len(extents) > 1:
                self._pages.give_back(extents)
                break
            what = (b"", size, extents, writer, now_s + self.reservation_ttl_s)
            granted = self._reserve(*what, account=account, priority=Priority.NORMAL, stock=True)
            if granted is None:
                break
            grants.append(granted)
        return grants

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
        states = [self._keep(block, writer, now_s, priority) for block in reversed(blocks)][::-1]
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
        here = [key for key in keys if key in self._blocks]
        self.funnel.brought(here, Where.PEER)
        for key in here:
            self._blocks[key].uses = 0

    def moved(self, key: bytes, *, uses: int, used_s: float) -> None:
        """A block came from a daemon where it was used so often, and last at `used_s`."""
        block = self._blocks.get(key)
        if block is not None:
            block.uses, block.used_s = uses, used_s
            self._idle.warm([key])

    def pin(
        self, keys: Sequence[bytes], *, reader: int, now_s: float, lease_s: float | None = None
    ) -> Pinned:
        """Keep the leading run of `keys` in place for a lease, and make it the warmest.

        `lease_s` is how long that is, if not `pin_lease_s`.
        """
        run = [self._blocks[key] for key in keys[: self.held(keys)]]
        gap = Gap.NONE
        if len(run) < len(keys):
            gap = Gap.EVICTED if keys[len(run)] in self.ghosts else Gap.MISS
        self._number += 1
        lease_s = self.pin_lease_s if lease_s is None else lease_s
        pinned = Pinned(self._number, reader, tuple(run), gap, now_s + lease_s)
        self._idle.remove(run)
        for block in run:
            block.pins += 1
            block.used_s = _at(now_s, block.used_s)
            block.account.heard(now_s)
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
        self._reservations.expire(now_s)
        for pinned in [p for p in self._pins.values() if now_s >= p.expires_s]:
            self._lapse(pinned)

    def trim(self, now_s: float, at_most: int = 1 << 30) -> int:
        """Evict down to the low watermark if the high one was passed; how many went.

        Done beside requests, so that a put finds free pages and needs not wait for a choice. After
        `at_most` blocks it has not come to an end, and goes on with the next call.
        """
        evicted = 0
        self._trimming = self.crowded
        while self._trimming and evicted < at_most:
            victim = self._idle.victim(now_s)
            if victim is None or self._spare_pages >= (1.0 - self.low) * self.total_pages:
                self._trimming = False
                break
            self._evict(victim)
            evicted += 1
        return evicted

    def evict(self, blocks: int, now_s: float = 0.0) -> list[bytes]:
        """Forget up to `blocks` unpinned blocks, least worth first, and what hangs on the last of
        them; their keys.
        """
        keys: list[bytes] = []
        while len(keys) < blocks and (victim := self._idle.victim(now_s)) is not None:
            keys += self._evict(victim)
        return keys

    def forget(self, keys: Iterable[bytes]) -> tuple[int, int, int]:
        """Evict those of `keys` that nobody reads: how many, their bytes, and how many are read."""
        gone = size = pinned = 0
        for key in keys:
            block = self._blocks.get(key)
            if block is not None and block.pins:
                pinned += 1
            elif block is not None:
                self._evict(block)
                gone, size = gone + 1, size + block.size
        return gone, size, pinned

    def clear(self, up_to: int | None = None) -> int:
        """Forget what was put or reserved up to a generation (None: until now); how many went.

        What is reserved by then can't be committed later. Repeating a clear takes nothing newer.
        """
        up_to = self._number if up_to is None else min(up_to, self._number)
        self._cleared_at = max(self._cleared_at, up_to)
        self._reservations.revoke()  # no block can come of it any more
        blocks = [block for block in self._blocks.values() if block.generation <= up_to]
        newer = dict.fromkeys(key for block in blocks for key in self._attached(block))
        for state in [self._blocks[key] for key in newer]:
            if state.generation > up_to:
                self._evict_one(state)
        rest = len(blocks) < len(self._blocks)
        for block in blocks:
            self._forget(block)
            self.counters.dropped_bytes += block.size
        self.counters.cleared += len(blocks)
        if rest:
            self.feed.remove([block.key for block in blocks])
        else:
            self.ghosts.clear()
            self.feed.clear()
        return len(blocks)

    def drop(self, key: bytes, generation: int) -> bool:
        """A block does not match its tags: drop it, if it is still this one."""
        block = self._blocks.get(key)
        if block is None or block.generation != generation:
            return False
        self._drop(block)
        return True

    def adopt(self, kept: Kept, now_s: float) -> None:
        """Take over what an earlier daemon had, before anything else is done with this pool.

        Its reservations are in quarantine: their writers may still be there. ValueError, and
        nothing is taken over, if two of them share a page.
        """
        extents = [extent for block in kept.blocks for extent in block.extents]
        extents += [extent for old in kept.reservations for extent in old.extents]
        self._pages = Pages(self.total_pages, self.segments, used=extents)
        self._number = max(self._number, kept.number)
        for old in kept.reservations:
            account = self.accounts.of(old.tenant)
            held = (b"", old.generation, 0, old.extents, old.writer, now_s)
            self._reservations.adopt(Reservation(*held, account, Priority.NORMAL))
        for one in sorted(kept.blocks, key=lambda kept: kept.generation):
            account, pages = self.accounts.of(one.tenant), sum(e.pages for e in one.extents)
            where = (one.key, one.generation, one.size, pages, one.extents, one.tags)
            block = Block(*where, account, one.priority, now_s)
            account.heard(now_s)
            self.accounts.use(account, pages)
            self._blocks[one.key] = block
            self._idle.add((block,))
            self.counters.adopted += 1
            self.counters.adopted_bytes += one.size
        self.feed.add([one.key for one in kept.blocks])

    def check_integrity(self) -> None:
        """AssertionError unless every page and every block is accounted for exactly once."""
        audit.check(self)

    def _reserve(
        self,
        key: bytes,
        size: int,
        extents: tuple[Extent, ...],
        writer: bytes,
        expires_s: float,
        *,
        account: Account,
        priority: Priority,
        stock: bool = False,
    ) -> Granted | None:
        self._number += 1
        reservation = Reservation(
            key, self._number, size, extents, writer, expires_s, account, priority, stock=stock
        )
        if not self._reservations.add(reservation):
            return None
        return Granted(Grant.RESERVED, self._number, extents)

    def _make_room(
        self, size: int, account: Account, below: float, now_s: float
    ) -> tuple[Extent, ...] | None:
        """Pages for `size` bytes of an account, at the cost of blocks worth less than `below`."""
        account.heard(now_s)
        pages, evict = -(-size // self.page_bytes), below > 0
        quota = account.terms.quota_pages
        if quota is None and pages <= self._pages.free:
            return self._pages.take(pages)
        over = 0 if quota is None else max(0, account.used_pages + pages - quota)
        if self._reservations.stocks and (over or pages > self._pages.free):
            self._reservations.revoke(None if pages > self._pages.free else account)
            over = 0 if quota is None else max(0, account.used_pages + pages - quota)
        if over > (account.idle_pages if evict else 0):
            self.counters.over_quota += 1
            return None
        if pages > self._pages.free + (self._idle.room(now_s, account) if evict else 0):
            return None  # evicting would not be enough: leave what is here
        leave = account.used_pages - over
        while self._pages.free < pages or account.used_pages > leave:
            own = account.used_pages > leave
            victim = self._idle.victim(now_s, account, own=own, below=below)
            if victim is None:
                return None
            self._evict(victim)
        return self._pages.take(pages)

    @property
    def _spare_pages(self) -> int:
        """Pages that are free, or can be taken back from stocks without losing anything."""
        return self._pages.free + self._reservations.stock_pages

    def _attached(self, block: Block) -> list[bytes]:
        return attached(block.key, self._blocks.__contains__)

    def _evict(self, block: Block) -> list[bytes]:
        """Evict a block and what is worth nothing without it: that first, so that no follower ever
        sees a state without its boundary. The keys that went.
        """
        keys = [*self._attached(block), block.key]
        for one in [self._blocks[key] for key in keys]:
            self._evict_one(one)
        return keys

    def _evict_one(self, block: Block) -> None:
        self._forget(block)
        self.feed.remove([block.key])
        self.counters.evicted += 1
        self.counters.evicted_bytes += block.size
        self.ghosts.evicted(block.key, block.size)

    def _commit(
        self, generation: int, tags: tuple[GroupTag, ...], writer: bytes, now_s: float
    ) -> Commitment:
        reservation = self._reservations.owned(generation, writer)
        if reservation is None:
            return Commitment.EXPIRED
        over = now_s >= reservation.expires_s and not reservation.stock
        late = reservation.quarantined or over
        if late or generation <= self._cleared_at:
            self._reservations.end(reservation)
            self.counters.expired += 1
            return Commitment.EXPIRED
        if reservation.key in self._blocks:
            self._reservations.end(reservation)
            self.counters.duplicate += 1
            return Commitment.DUPLICATE
        self._show(reservation, tags, now_s)
        return Commitment.COMMITTED

    def _keep(self, block: Filled, writer: bytes, now_s: float, priority: Priority) -> Commitment:
        if not block.generation:
            held = block.key in self._blocks
            return Commitment.DUPLICATE if held else Commitment.EXPIRED
        reservation = self._reservations.owned(block.generation, writer)
        if reservation is None or not reservation.stock:
            return Commitment.EXPIRED
        reservation.key, reservation.priority = block.key, priority
        return self._commit(block.generation, block.tags, writer, now_s)

    def _show(self, reservation: Reservation, tags: tuple[GroupTag, ...], now_s: float) -> None:
        key, generation = reservation.key, reservation.generation
        where = (key, generation, reservation.size, reservation.pages, reservation.extents, tags)
        block = Block(*where, reservation.account, reservation.priority, _at(now_s, 0.0))
        self.journal.published(block)
        self._reservations.became_block(reservation)
        self._blocks[key] = block
        self._idle.add((block,))
        self.ghosts.forget(key)
        self.feed.add([key])
        self.counters.put += 1
        self.counters.put_bytes += block.size

    def _lapse(self, pinned: Pinned) -> None:
        self.counters.lapsed += len(pinned.blocks)
        self._unpin(pinned)

    def _unpin(self, pinned: Pinned) -> None:
        del self._pins[pinned.number]
        idle = []
        for block in reversed(pinned.blocks):  # the head of the run becomes the warmest
            block.pins -= 1
            if block.pins:
                continue
            if block.gone:
                self._free(block)
            else:
                idle.append(block)
        self._idle.add(idle)

    def _drop(self, block: Block) -> None:
        if block.gone:
            return
        for key in self._attached(block):
            self._evict_one(self._blocks[key])
        self._forget(block)
        self.feed.remove([block.key])
        self.counters.corrupt += 1
        self.counters.dropped_bytes += block.size

    def _forget(self, block: Block) -> None:
        self.journal.removed(block)
        del self._blocks[block.key]
        self.retention.gone(block.key)
        block.gone = True
        self._idle.remove((block,))
        if not block.pins:
            self._free(block)

    def _free(self, block: Block) -> None:
        self.accounts.use(block.account, -block.pages)
        self._pages.give_back(block.extents)


def _at(now_s: float, before_s: float) -> float:
    """When a block was used: what the daemon does without an end (`inf`) is no use."""
    return max(now_s, before_s) if math.isfinite(now_s) else before_s
