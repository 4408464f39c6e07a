"""A client's stock: pages it may write to without asking first.

The daemon may take a stock back at any time, but for the generations that its client has claimed
(`Arena.claim`) before it was taken back. A claim lasts until the daemon has answered what was done
with it. Nothing here outlives its connection: a daemon that loses one takes its stock back, too.
"""

from collections import deque
from itertools import pairwise

from kimi_connect.arena import Arena
from kimi_connect.blocks import Place
from kimi_connect.keeping import STOCK_BLOCKS, STOCK_BYTES, Kept, Wish

Kind = tuple[str, int]
"""A tenant, and the size of its blocks in bytes: stocks are granted for these."""

PUTS = 4
"""Puts that a stock is for: with half of it the next is asked for, so not every put has to."""

KINDS = 8
"""Stocks of a client at a time, at most."""

ASK_AGAIN_S = 0.05
"""After a wish of which nothing was granted, or a stock that was taken back."""


class Stock:
    """The stock of one connection, by kind; the kind that was used last is the last."""

    def __init__(self, arena: Arena) -> None:
        self._arena, self._revoked = arena, arena.revoked
        self._kinds: dict[Kind, deque[Place]] = {}
        self._asked: dict[Kind, int] = {}
        self._returned: list[int] = []
        self._again_s = 0.0
        self._short = False
        self._claims = 0

    def has(self, kind: Kind, count: int) -> bool:
        """Whether there is a stock for so many blocks."""
        return len(self._kinds.get(kind, ())) >= count

    def lists(self, key: bytes) -> bool:
        """Whether the pool has a block, as far as the arena tells."""
        return self._arena.directory.lists(key)

    def take(self, kind: Kind, count: int) -> "list[Place]":
        """Up to `count` blocks' pages of the stock, claimed until `let_go` is called for this;
        none if it was taken back.
        """
        held = self._kinds.get(kind)
        if not held or not count:
            return []
        taken = [held.popleft() for _ in range(min(count, len(held)))]
        claimed = all(self._arena.claim(*run) for run in _runs(taken))
        self._claims += 1
        if claimed and self._arena.revoked == self._revoked:
            return taken
        self.let_go()
        self.put_back(taken)
        self._discard()
        self._short = True
        return []

    def let_go(self) -> None:
        """What was taken at one time is written to no more, and the daemon has read of what was
        written, or never will. Claims end together, when nobody needs one.
        """
        self._claims -= 1
        if not self._claims:
            self._arena.release()

    def put_back(self, places: "list[Place]") -> None:
        """These are not written to, and never will be."""
        self._returned += [one.generation for one in places]

    def wish(self, kind: Kind, blocks: int, now_s: float) -> Wish:
        """What to ask for, so that there are some puts of `blocks` in stock."""
        size = kind[1]
        if self._short:
            self._short, self._again_s = False, now_s + ASK_AGAIN_S
        most = min(STOCK_BLOCKS, STOCK_BYTES // size, PUTS * blocks)
        held = len(self._kinds.get(kind, ())) + self._asked.get(kind, 0)
        if 2 * held >= most or now_s < self._again_s:
            return Wish()
        wanted = most - held
        self._kinds[kind] = self._kinds.pop(kind, deque())
        while len(self._kinds) > KINDS or (
            len(self._kinds) > 1 and self._bytes() + wanted * size > STOCK_BYTES
        ):
            self.put_back(list(self._kinds.pop(next(iter(self._kinds)))))
        self._asked[kind] = self._asked.get(kind, 0) + wanted
        return Wish(wanted, size)

    def returned(self) -> "list[int]":
        """Generations to give back, once."""
        returned, self._returned = self._returned, []
        return returned

    def answered(self, kind: Kind, wish: Wish, kept: Kept, now_s: float) -> None:
        """A wish was answered."""
        if wish.blocks:
            self._asked[kind] -= wish.blocks
            if not self._asked[kind]:
                del self._asked[kind]
            if not kept.granted:
                self._again_s = now_s + ASK_AGAIN_S
        if kept.revoked != self._revoked:
            self._discard()
            self._revoked = kept.revoked
        places = [Place.of(granted, kind[1], self._arena) for granted in kept.granted]
        if kind in self._kinds:
            self._kinds[kind] += places
        else:
            self.put_back(places)

    def everything(self) -> "list[int]":
        """All generations, to give them back; nothing is left."""
        self._discard()
        return self.returned()

    def _discard(self) -> None:
        for held in self._kinds.values():
            self.put_back(list(held))
            held.clear()

    def _bytes(self) -> int:
        return sum(size * len(held) for (_, size), held in self._kinds.items())


def _runs(taken: "list[Place]") -> "list[tuple[int, int]]":
    """Generations that follow each other: the first, and how many."""
    numbers = [one.generation for one in taken]
    breaks = [n + 1 for n, (one, two) in enumerate(pairwise(numbers)) if two != one + 1]
    ends = [*breaks, len(numbers)]
    return [(numbers[start], end - start) for start, end in zip([0, *breaks], ends, strict=True)]
