"""Room for what is to be put: free pages, stocks taken back, blocks evicted, in this order. Pure.

Which unpinned block goes first is `eviction`'s and `retention`'s to say, within what `tenants`
allows.
"""

from dataclasses import dataclass

from kimi_connect.wire import Extent
from kimi_runtime.umbp.reservations import Reservations
from kimi_runtime.umbp.shelf import Shelf
from kimi_runtime.umbp.tenants import Account

MOST_STOCKED = 1024
"""Blocks in all stocks: a part of the reservations that a small arena has notes for."""


@dataclass(slots=True)
class Room:
    """Pages for puts, for stocks, and to spare."""

    shelf: Shelf
    reservations: Reservations
    _trimming: bool = False

    def make(
        self, pages: int, account: Account, below: float, now_s: float
    ) -> tuple[Extent, ...] | None:
        """Pages for an account, at the cost of blocks worth less than `below`; None if there are
        not so many to be had.
        """
        account.heard(now_s)
        shelf, evict = self.shelf, below > 0
        quota = account.terms.quota_pages
        if quota is None and pages <= shelf.pages.free:
            return shelf.pages.take(pages)
        over = 0 if quota is None else max(0, account.used_pages + pages - quota)
        if self.reservations.stocks and (over or pages > shelf.pages.free):
            self.reservations.revoke(None if pages > shelf.pages.free else account)
            over = 0 if quota is None else max(0, account.used_pages + pages - quota)
        if over > (account.idle_pages if evict else 0):
            shelf.counters.over_quota += 1
            return None
        if pages > shelf.pages.free + (shelf.idle.room(now_s, account) if evict else 0):
            return None  # evicting would not be enough: leave what is here
        leave = account.used_pages - over
        while shelf.pages.free < pages or account.used_pages > leave:
            own = account.used_pages > leave
            victim = shelf.idle.victim(now_s, account, own=own, below=below)
            if victim is None:
                return None
            shelf.evict(victim)
        return shelf.pages.take(pages)

    def for_stock(self, blocks: int, pages: int, account: Account) -> int:
        """For how many of `blocks` of so many pages there may be a stock."""
        spare = (self.shelf.pages.free - self.reservations.stock_pages) // 2
        if account.terms.quota_pages is not None:
            spare = min(spare, account.terms.quota_pages - account.used_pages)
        return min(blocks, spare // pages, MOST_STOCKED - self.reservations.stocks)

    def in_one_piece(self, pages: int) -> tuple[Extent, ...] | None:
        """Free pages that follow each other."""
        extents = self.shelf.pages.take(pages)
        if extents is not None and len(extents) > 1:
            self.shelf.pages.give_back(extents)
            return None
        return extents

    def short(self, high: float) -> bool:
        """Whether `trim` would evict."""
        return self._trimming or self._spare < (1.0 - high) * self.shelf.pages.total

    def trim(self, now_s: float, high: float, low: float, at_most: int) -> int:
        """Evict down to a memory filled to `low` if it is fuller than `high`; how many went.

        After `at_most` blocks it has not come to an end, and goes on with the next call.
        """
        evicted = 0
        self._trimming = self.short(high)
        while self._trimming and evicted < at_most:
            victim = self.shelf.idle.victim(now_s)
            if victim is None or self._spare >= (1.0 - low) * self.shelf.pages.total:
                self._trimming = False
                break
            self.shelf.evict(victim)
            evicted += 1
        return evicted

    @property
    def _spare(self) -> int:
        """Pages that are free, or can be taken back from stocks without losing anything."""
        return self.shelf.pages.free + self.reservations.stock_pages
