"""One put into a stock, but for its copies and messages: those are its client's, blocking or not.

What lies in the stock is told the daemon without waiting for its answer, which brings the pages of
a later put: it reads what was told before it says of any block that it is not there.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kimi_connect.blocks import Place
from kimi_connect.keeping import Filled, Keep, pack_keep, unpack_kept
from kimi_connect.placing import Written
from kimi_connect.stock import Kind, Stock
from kimi_connect.wire import Priority

PART_BYTES = 16 << 20
"""Of a large put that are copied before the daemon is told of them."""

MOST_AWAITED = 8
"""Requests told before an answer is waited for."""


class Part(NamedTuple):
    """Blocks of one size that follow each other: those found `there`, and those to be copied."""

    kind: Kind
    there: "Sequence[bytes]"
    keys: "Sequence[bytes]"
    views: "Sequence[memoryview]"
    places: "list[Place]"


class Told(NamedTuple):
    """A KEEP to be sent. One of the others is called once: with its answer, or if none comes."""

    payload: bytes
    heard: "Callable[[bytes], None]"
    unheard: "Callable[[], None]"


class StockPut:
    """A put of `keys`, of which `done` leading ones lie in the stock, or were there before."""

    def __init__(
        self,
        stock: Stock,
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        tenant: str,
        priority: Priority,
        now_s: Callable[[], float],
    ) -> None:
        self.done = 0
        self.told = 0
        """How often the daemon was told of blocks."""
        self._stock, self._keys, self._views = stock, keys, views
        self._tenant, self._priority, self._now_s = tenant, priority, now_s

    @property
    def covered(self) -> bool:
        """Whether the stock has pages for all that is left; also if nothing is."""
        left = len(self._keys) - self.done
        return not left or self._stock.has(self._kind(self.done), left)

    def part(self) -> "Part | None":
        """The next blocks, their places claimed; None without a stock, or if nothing is left.

        It ends with `keep`, or with `Stock.let_go` if nothing of it can be told.
        """
        start = end = held = self.done
        if start == len(self._keys):
            return None
        kind = self._kind(start)
        most = min(len(self._keys), start + max(1, PART_BYTES // kind[1]))
        while end < most and self._views[end].nbytes == kind[1]:
            end += 1
        # a chain is there from its head on: who lacks one block lacks those behind it
        while held < end and self._stock.lists(self._keys[held]):
            held += 1
        places = self._stock.take(kind, end - held)
        if held == start and not places:
            return None
        copying = slice(held, held + len(places))
        return Part(kind, self._keys[start:held], self._keys[copying], self._views[copying], places)

    def keep(self, part: Part, written: Sequence[Written]) -> "Told | None":
        """What the daemon is to be told of a part whose leading copies were `written`; None if
        that is nothing, and the put ends. The other places are their client's to give back.
        """
        filled = [Filled(key, 0) for key in part.there]
        filled += [Filled(key, *one) for key, one in zip(part.keys, written, strict=False)]
        if part.places and not written:
            self._stock.let_go()
        if not filled:
            return None
        self.done += len(filled)
        self.told += 1
        return self._telling(self._stock, filled, part.kind, claimed=bool(written))

    def ask(self, stock: Stock) -> "Told | None":
        """What the daemon is to be told, for there to be a stock for a later put like this one."""
        return self._telling(stock, [], self._kind(-1), claimed=False)

    def _telling(
        self, stock: Stock, filled: "list[Filled]", kind: Kind, *, claimed: bool
    ) -> "Told | None":
        wish = stock.wish(kind, len(self._keys), self._now_s())
        keep = Keep(filled, self._tenant, self._priority, wish, stock.returned())
        if not (filled or wish.blocks or keep.returned):
            return None

        def heard(payload: bytes) -> None:
            stock.answered(kind, wish, unpack_kept(payload), self._now_s())
            unheard()

        def unheard() -> None:
            if claimed:
                stock.let_go()

        return Told(pack_keep(keep), heard, unheard)

    def _kind(self, position: int) -> Kind:
        return self._tenant, self._views[position].nbytes
