"""What became of every block that was looked up: found where, or lost why. Pure.

A lookup is a run of keys. What is found is pinned, and *open* until its reader says how much of it
came out intact; the rest is lost at once, each block for one reason. So

    asked = hits + lost + open + withdrawn

whenever nothing is half done (`check`). Withdrawn are open blocks of a connection that broke: its
reader counts the whole call as lost to an unavailable daemon, and says so when it is back.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from enum import StrEnum

from kimi_connect.wire import Gap

MAX_BROUGHT = 65_536
"""Blocks remembered to have been brought and not read since; of others it is not known any more."""


class Where(StrEnum):
    """Where a block was when it was looked up."""

    MEMORY = "memory"
    SSD = "ssd"
    PEER = "peer"


class Lost(StrEnum):
    """Why a block was not served."""

    NOT_COMPUTED = "not_computed"
    """Nobody is known to have it or to have had it: it has to be computed in any case."""
    EVICTED = "evicted"
    """It was here; more memory would have kept it."""
    UNAVAILABLE = "unavailable"
    """A peer or the SSD is said to have it and did not give it (down, set aside, busy, no room
    here), or the daemon itself could not be reached."""
    LATE = "late"
    """It did not come, or was not read, in the reader's time."""
    CORRUPT = "corrupt"
    """Its bytes did not match its tag."""


class Funnel:
    """One daemon's counts, in blocks."""

    def __init__(self) -> None:
        self.asked = 0
        self.withdrawn = 0
        self.local_hits = 0
        """Of the hits, those clients took from the arena without asking."""
        self.hits: Counter[Where] = Counter()
        self.lost: Counter[Lost] = Counter()
        self._open: dict[int, tuple[int, tuple[Where, ...]]] = {}
        self._brought: OrderedDict[bytes, Where] = OrderedDict()

    @property
    def open(self) -> int:
        """Blocks pinned for readers that have not said yet what they got."""
        return sum(len(places) for _, places in self._open.values())

    @property
    def looked_up(self) -> int:
        """Blocks whose fate is known: hits and lost ones. It never falls."""
        return self.asked - self.withdrawn - self.open

    def brought(self, keys: Sequence[bytes], where: Where) -> None:
        """These came into memory from elsewhere, for somebody who will read them."""
        for key in keys:
            self._brought[key] = where
        while len(self._brought) > MAX_BROUGHT:
            self._brought.popitem(last=False)

    def served(self, keys: Sequence[bytes]) -> None:
        """A client took these from the arena by itself."""
        self.asked += len(keys)
        self.local_hits += len(keys)
        self.hits.update(self._places(keys))

    def pinned(self, pin: int, reader: int, keys: Sequence[bytes]) -> None:
        """These were found, and are kept for a reader."""
        if keys:
            self.asked += len(keys)
            self._open[pin] = reader, self._places(keys)

    def missed(self, reasons: Sequence[Lost]) -> None:
        """These were not found."""
        self.asked += len(reasons)
        self.lost.update(reasons)

    def read(self, pin: int, good: int, rest: Lost) -> None:
        """The reader of a pin got the first `good` blocks; why not the rest."""
        _, places = self._open.pop(pin, (0, ()))
        self.hits.update(places[:good])
        self.lost.update([rest] * len(places[good:]))

    def unreachable(self, blocks: int) -> None:
        """A client is back that could not ask for so many."""
        self.missed([Lost.UNAVAILABLE] * blocks)

    def gone(self, reader: int) -> None:
        """A reader's connection broke."""
        for pin in [pin for pin, (whose, _) in self._open.items() if whose == reader]:
            self.withdrawn += len(self._open.pop(pin)[1])

    def sweep(self, holds: Callable[[int], bool]) -> None:
        """Leases that ended before their readers were done: those blocks came too late."""
        for pin in [pin for pin in self._open if not holds(pin)]:
            self.read(pin, 0, Lost.LATE)

    def check(self) -> None:
        """AssertionError unless every block that was asked for is in one place."""
        settled = self.hits.total() + self.lost.total()
        assert self.asked == settled + self.open + self.withdrawn, "blocks asked for are amiss"

    def _places(self, keys: Sequence[bytes]) -> tuple[Where, ...]:
        return tuple(self._brought.pop(key, Where.MEMORY) for key in keys)


def why_lost(
    keys: Sequence[bytes],
    gap: Gap,
    *,
    here: Callable[[bytes], bool],
    elsewhere: Callable[[bytes], bool],
    evicted: Callable[[bytes], bool],
) -> list[Lost]:
    """Why each of `keys`, which begin with the one that ended a run by `gap`, was not served.

    `here` says what memory holds, `elsewhere` what a peer or the SSD is said to, and `evicted` what
    was here. A block that is somewhere, behind one that did not come, is lost to what that one is
    lost to: no engine has a use for it.
    """
    if not keys:
        return []
    failed = {Gap.CORRUPT: Lost.CORRUPT, Gap.LATE: Lost.LATE}.get(gap)

    def own(key: bytes) -> Lost:
        return Lost.EVICTED if evicted(key) else Lost.NOT_COMPUTED

    first = failed or (Lost.UNAVAILABLE if elsewhere(keys[0]) else own(keys[0]))
    rest = [first if here(key) or elsewhere(key) else own(key) for key in keys[1:]]
    return [first, *rest]
