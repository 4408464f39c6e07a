"""Pages that writers may store to, from RESERVE until a commit or until nobody can write any more.

Pure. A reservation whose time is over, or whose writer's connection was lost, is in quarantine: it
can't be committed, and its pages are nobody else's until the writer has said that it stores no
more, or has ended.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from kimi_connect.wire import Extent
from kimi_runtime.umbp.journal import Journal
from kimi_runtime.umbp.records import PoolCounters, Reservation
from kimi_runtime.umbp.tenants import Accounts


@dataclass(slots=True)
class Reservations:
    """By generation. `give_back` takes the pages of what ended without a block."""

    journal: Journal
    accounts: Accounts
    counters: PoolCounters
    give_back: Callable[[tuple[Extent, ...]], None]
    _open: dict[int, Reservation] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._open.values())

    def count(self, *, quarantined: bool) -> int:
        """How many are open, or in quarantine."""
        return sum(one.quarantined is quarantined for one in self._open.values())

    def writers(self) -> set[bytes]:
        """Everybody with a reservation in quarantine."""
        return {one.writer for one in self._open.values() if one.quarantined}

    def add(self, reservation: Reservation) -> bool:
        """Hold its pages; False, and they are given back, if the journal has no room for it."""
        if not self.journal.reserved(reservation):
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
        self.journal.ended(reservation.generation)
        del self._open[reservation.generation]

    def end(self, reservation: Reservation) -> None:
        """Nothing stores to it any more, and no block came of it."""
        self.journal.ended(reservation.generation)
        del self._open[reservation.generation]
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
        """Quarantine those whose time is over."""
        for reservation in self._open.values():
            if now_s >= reservation.expires_s:
                reservation.quarantined = True

    def _of(self, writer: bytes) -> list[Reservation]:
        return [one for one in self._open.values() if one.writer == writer]

    def _hold(self, reservation: Reservation) -> None:
        self._open[reservation.generation] = reservation
        self.accounts.use(reservation.account, reservation.pages)
