"""Pages that writers may store to, from RESERVE until a commit or until nobody can write any more.

Pure. A reservation whose time is over, or whose writer's connection was lost, is in quarantine: it
can't be committed, and its pages are nobody else's until the writer has said that it stores no
more, or has ended.

A client's *stock* is pages it may store to without asking first. It claims them before it does, so
what it has not claimed can be taken back from it at any time (`take`), and needs no quarantine.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from kimi_connect.wire import Extent
from kimi_runtime.umbp.journal import Journal
from kimi_runtime.umbp.records import PoolCounters, Reservation
from kimi_runtime.umbp.tenants import Account, Accounts


@dataclass(slots=True)
class Reservations:
    """By generation. `give_back` takes the pages of what ended without a block."""

    journal: Journal
    accounts: Accounts
    counters: PoolCounters
    give_back: Callable[[tuple[Extent, ...]], None]
    take: Callable[[int], bool]
    """Whether a generation of a stock was not claimed, so that from now on it can't be."""
    stock_pages: int = 0
    """Pages in all stocks."""
    _open: dict[int, Reservation] = field(default_factory=dict)
    _stocks: dict[int, Reservation] = field(default_factory=dict)
    _pages_of: dict[bytes, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._open.values())

    def count(self, *, quarantined: bool) -> int:
        """How many are open and no stock, or in quarantine."""
        return sum(
            one.quarantined is quarantined and (quarantined or not one.stock)
            for one in self._open.values()
        )

    @property
    def stocks(self) -> int:
        """Blocks there are stocks for."""
        return len(self._stocks)

    def stock_of(self, writer: bytes) -> int:
        """Pages in a writer's stock."""
        return self._pages_of.get(writer, 0)

    def writers(self) -> set[bytes]:
        """Everybody with a reservation in quarantine."""
        return {one.writer for one in self._open.values() if one.quarantined}

    def add(self, reservation: Reservation) -> bool:
        """Hold its pages; False, and they are given back, if the journal has no room for it.

        Stocks are taken back for that room, too.
        """
        noted = self.journal.reserved(reservation)
        if not noted and not reservation.stock and self.revoke():
            noted = self.journal.reserved(reservation)
        if not noted:
            self.give_back(reservation.extents)
            return False
        self._hold(reservation)
        self.counters.reserved += 1
        return True

    def adopt(self, reservation: Reservation) -> None:
        """Hold what an earlier daemon had given out, in quarantine."""
        reservation.quarantined = True
        self._hold(reservation)
        self.counters.adopted_reservations += 1

    def owned(self, generation: int, writer: bytes) -> Reservation | None:
        """The reservation, if it is this writer's."""
        one = self._open.get(generation)
        return one if one is not None and one.writer == writer else None

    def became_block(self, reservation: Reservation) -> None:
        """It was committed: its pages, and what its account uses, are a block's now."""
        self._remove(reservation)

    def end(self, reservation: Reservation) -> None:
        """Nothing stores to it any more, and no block came of it."""
        self._remove(reservation)
        self.accounts.use(reservation.account, -reservation.pages)
        self.give_back(reservation.extents)

    def abort(self, generations: Iterable[int], writer: bytes) -> int:
        """The writer stores no more to these; how many that freed."""
        freed = 0
        for generation in generations:
            reservation = self.owned(generation, writer)
            if reservation is not None:
                self.end(reservation)
                self.counters.aborted += 1
                freed += 1
        return freed

    def reclaim(self, writer: bytes, writing: Iterable[int]) -> int:
        """A writer is back and stores only to `writing`, if at all; how many that freed."""
        kept = set(writing)
        own = self._of(writer)
        for reservation in own:
            if reservation.generation in kept:
                reservation.quarantined = True
        return self.abort([r.generation for r in own if r.generation not in kept], writer)

    def quarantine(self, writer: bytes) -> int:
        """Nothing of this writer can be committed any more; how many that holds."""
        self._take([one for one in self._stocks.values() if one.writer == writer])
        own = self._of(writer)
        for reservation in own:
            reservation.quarantined = True
        return len(own)

    def writer_gone(self, writer: bytes) -> int:
        """Nothing can store to this writer's pages any more; how many that freed."""
        own = self._of(writer)
        for reservation in own:
            self.end(reservation)
            self.counters.writer_gone += 1
        return len(own)

    def expire(self, now_s: float) -> None:
        """Quarantine those whose time is over; of stocks, take back what is not claimed."""
        self._take([one for one in self._stocks.values() if now_s >= one.expires_s])
        for reservation in self._open.values():
            if now_s >= reservation.expires_s and not reservation.stock:
                reservation.quarantined = True

    def revoke(self, account: Account | None = None) -> int:
        """Take back every stock that is not claimed, or an account's; how many that freed."""
        stocks = self._stocks.values()
        return self._take([one for one in stocks if account in (None, one.account)])

    def _take(self, stocks: list[Reservation]) -> int:
        taken = [one for one in stocks if self.take(one.generation)]
        for reservation in taken:
            self.end(reservation)
        self.counters.revoked += len(taken)
        return len(taken)

    def _of(self, writer: bytes) -> list[Reservation]:
        return [one for one in self._open.values() if one.writer == writer]

    def _hold(self, reservation: Reservation) -> None:
        self._open[reservation.generation] = reservation
        if reservation.stock:
            self._stocks[reservation.generation] = reservation
            self._count_stock(reservation, reservation.pages)
        self.accounts.use(reservation.account, reservation.pages)

    def _remove(self, reservation: Reservation) -> None:
        self.journal.ended(reservation.generation)
        del self._open[reservation.generation]
        if reservation.stock:
            del self._stocks[reservation.generation]
            self._count_stock(reservation, -reservation.pages)

    def _count_stock(self, reservation: Reservation, pages: int) -> None:
        self.stock_pages += pages
        left = self._pages_of.get(reservation.writer, 0) + pages
        self._pages_of[reservation.writer] = left
        if not left:
            del self._pages_of[reservation.writer]
