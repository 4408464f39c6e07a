"""What more memory would buy: the keys evicted last, and which of them were asked for again. Pure.

The keys evicted from an LRU memory, newest first, are what a larger LRU memory would still hold: a
block whose younger ghosts, itself included, have `n` bytes would be a hit with `n` bytes more
(Mattson's stack distance). A run needs every block before its end, so a block behind others counts
with the largest distance of them. Memory that evicts by worth is no LRU; the price is a close one.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

SHARES = (0.125, 0.25, 0.5, 1.0)
"""How much more memory is priced, as a share of what there is."""

_COMPACT_AT = 4096


class Ghosts:
    """At most `max_keys` evicted keys and their sizes, for a memory of `capacity_bytes`."""

    def __init__(self, capacity_bytes: int, max_keys: int = 65_536) -> None:
        self.capacity_bytes, self.max_keys = capacity_bytes, max_keys
        self.asked_blocks = 0
        self.hit_blocks = 0
        self.more_hits = dict.fromkeys(SHARES, 0)
        """Blocks that were lost, and would have been hits with that much more memory."""
        self._slots: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._next = 0
        self._tree = [0] * (_COMPACT_AT + 1)  # Fenwick: bytes by the order of eviction
        self._total = 0

    def __contains__(self, key: bytes) -> bool:
        """Whether a key is remembered as evicted."""
        return key in self._slots

    def __len__(self) -> int:
        """Keys remembered."""
        return len(self._slots)

    def evicted(self, key: bytes, size: int) -> None:
        """A block of `size` bytes was evicted."""
        self.forget(key)
        if self._next == len(self._tree) - 1:
            self._compact()
        self._slots[key] = (self._next, size)
        self._add(self._next, size)
        self._next += 1
        if len(self._slots) > self.max_keys:
            self.forget(next(iter(self._slots)))

    def forget(self, key: bytes) -> None:
        """A block is back."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._add(slot[0], -slot[1])

    def clear(self) -> None:
        """Forget every key; what was counted stays."""
        self._slots.clear()
        self._compact()

    def distance(self, key: bytes) -> int | None:
        """Bytes more that would have kept a key; None if it is not remembered."""
        slot = self._slots.get(key)
        return None if slot is None else self._total - self._before(slot[0])

    def asked(self, keys: Sequence[bytes], hits: int, held: Callable[[bytes], bool]) -> None:
        """A run of `keys` was asked for and `hits` leading ones were there."""
        self.asked_blocks += len(keys)
        self.hit_blocks += hits
        need = 0
        for key in keys[hits:]:
            distance = self.distance(key)
            if distance is None:
                if not held(key):
                    return
                distance = 0
            need = max(need, distance)
            for share in SHARES:
                if need <= share * self.capacity_bytes:
                    self.more_hits[share] += 1

    def _add(self, position: int, size: int) -> None:
        self._total += size
        position += 1
        while position < len(self._tree):
            self._tree[position] += size
            position += position & -position

    def _before(self, position: int) -> int:
        """Bytes of ghosts evicted before the one at `position`."""
        total = 0
        while position:
            total += self._tree[position]
            position -= position & -position
        return total

    def _compact(self) -> None:
        """Number the ghosts anew, with room for as many again."""
        sizes = [(key, size) for key, (_, size) in self._slots.items()]
        self._tree = [0] * (max(_COMPACT_AT, 2 * len(sizes)) + 1)
        self._next = self._total = 0
        for key, size in sizes:
            self._slots[key] = (self._next, size)
            self._add(self._next, size)
            self._next += 1
