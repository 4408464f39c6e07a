"""Puts: from pages that are reserved, or lie in a stock, to blocks that are visible. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from kimi_connect.keeping import Filled
from kimi_connect.wire import Commitment, Extent, Grant, Granted, GroupTag, Priority
from kimi_runtime.umbp.records import Block, Reservation
from kimi_runtime.umbp.reservations import Reservations
from kimi_runtime.umbp.room import Room
from kimi_runtime.umbp.shelf import Shelf, used_at
from kimi_runtime.umbp.tenants import Account


@dataclass(slots=True)
class Writers:
    """`number` is the newest generation or pin given out."""

    shelf: Shelf
    reservations: Reservations
    room: Room
    page_bytes: int
    number: int = 0
    _cleared_at: int = 0

    def next_number(self) -> int:
        """A number that was never given out."""
        self.number += 1
        return self.number

    def reserve(
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
        """Pages for every (key, size) until one doesn't fit, at the cost of blocks worth less than
        `below`; the rest is FULL.
        """
        grants: list[Granted] = []
        full = False
        for key, size in items:
            if key in self.shelf.blocks:
                grants.append(Granted(Grant.HELD))
                continue
            granted = None
            if not full:
                extents = self.room.make(self._pages_of(size), account, below, now_s)
                if extents is not None:
                    what = (key, size, extents, writer, expires_s)
                    granted = self._reserve(*what, account=account, priority=priority)
            if granted is None:
                full = True
                self.shelf.counters.refused += 1
                granted = Granted(Grant.FULL)
            grants.append(granted)
        return grants

    def put(self, keys: Sequence[bytes], account: Account, now_s: float) -> bool:
        """Make blocks of a page each visible at once, those that are not yet; False, and nothing is
        changed, if room has to be made for them or a key comes twice.
        """
        shelf = self.shelf
        fresh = [key for key in keys if key not in shelf.blocks]
        count = len(fresh)
        if account.terms.quota_pages is not None or count > shelf.pages.free:
            return False
        if count != len(set(fresh)):
            return False
        if not count:
            return True
        account.heard(now_s)
        pages = [
            (Extent(extent.first + n, 1),)
            for extent in shelf.pages.take(count) or ()
            for n in range(extent.pages)
        ]
        shelf.accounts.use(account, count)
        shown: dict[bytes, Block] = {}
        used_s, last, size = used_at(now_s, 0.0), self.number + count, self.page_bytes
        # the last first, as `commit` does: the head of a batch becomes the warmest
        for n in range(count - 1, -1, -1):
            key, generation = fresh[n], last - count + n + 1
            block = Block(key, generation, size, 1, pages[n], (), account, Priority.NORMAL, used_s)
            shelf.journal.published(block)
            shown[key] = block
        self.number = last
        shelf.counters.reserved += count
        shelf.add(shown)
        return True

    def stock(
        self, count: int, size: int, writer: bytes, expires_s: float, account: Account
    ) -> list[Granted]:
        """Pages for up to `count` blocks whose keys come with `keep`."""
        pages = self._pages_of(size)
        grants: list[Granted] = []
        for _ in range(self.room.for_stock(count, pages, account)):
            extents = self.room.in_one_piece(pages)
            if extents is None:
                break
            what = (b"", size, extents, writer, expires_s)
            granted = self._reserve(*what, account=account, priority=Priority.NORMAL, stock=True)
            if granted is None:
                break
            grants.append(granted)
        return grants

    def commit(
        self,
        blocks: Sequence[tuple[int, tuple[GroupTag, ...]]],
        writer: bytes,
        now_s: float,
    ) -> list[Commitment]:
        """Make the block of each generation visible, unless it is too late or another one is."""
        states: list[Commitment] = []
        shown: dict[bytes, Block] = {}
        visible, used_s = self.shelf.blocks, used_at(now_s, 0.0)
        try:
            for generation, tags in blocks:
                reservation = self.reservations.owned(generation, writer)
                state = self._state(reservation, now_s)
                if reservation is not None and state is Commitment.COMMITTED:
                    key = reservation.key
                    if key in visible or key in shown:
                        self.reservations.end(reservation)
                        self.shelf.counters.duplicate += 1
                        state = Commitment.DUPLICATE
                    else:
                        shown[key] = self._block(reservation, tags, used_s)
                states.append(state)
        finally:
            self.shelf.add(shown)
        return states

    def keep(self, block: Filled, writer: bytes, now_s: float, priority: Priority) -> Commitment:
        """Make a block visible that was written to the writer's stock, or found to be there."""
        if not block.generation:
            held = block.key in self.shelf.blocks
            return Commitment.DUPLICATE if held else Commitment.EXPIRED
        reservation = self.reservations.owned(block.generation, writer)
        if reservation is None or not reservation.stock:
            return Commitment.EXPIRED
        reservation.key, reservation.priority = block.key, priority
        return self.commit([(block.generation, block.tags)], writer, now_s)[0]

    def clear(self, up_to: int) -> None:
        """Nothing that was reserved up to a generation can be committed any more."""
        self._cleared_at = max(self._cleared_at, up_to)
        self.reservations.revoke()  # no block can come of it any more

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
        number = self.next_number()
        reservation = Reservation(
            key, number, size, extents, writer, expires_s, account, priority, stock=stock
        )
        if not self.reservations.add(reservation):
            return None
        return Granted(Grant.RESERVED, number, extents)

    def _state(self, reservation: Reservation | None, now_s: float) -> Commitment:
        """Whether a reservation is in time; one that is late ends."""
        if reservation is None:
            return Commitment.EXPIRED
        over = now_s >= reservation.expires_s and not reservation.stock
        late = reservation.quarantined or over
        if late or reservation.generation <= self._cleared_at:
            self.reservations.end(reservation)
            self.shelf.counters.expired += 1
            return Commitment.EXPIRED
        return Commitment.COMMITTED

    def _block(self, reservation: Reservation, tags: tuple[GroupTag, ...], used_s: float) -> Block:
        """The block that a reservation becomes, and is no more."""
        key, generation = reservation.key, reservation.generation
        where = (key, generation, reservation.size, reservation.pages, reservation.extents, tags)
        block = Block(*where, reservation.account, reservation.priority, used_s)
        self.shelf.journal.published(block)
        self.reservations.became_block(reservation)
        return block

    def _pages_of(self, size: int) -> int:
        return -(-size // self.page_bytes)
