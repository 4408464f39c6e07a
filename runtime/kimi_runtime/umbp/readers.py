"""Pins: blocks that stay where they are while their readers copy them. Pure.

A pin holds for a lease, which its reader renews. One that has lapsed protects nothing, and `unpin`
says so.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kimi_connect.wire import Gap
from kimi_runtime.umbp.records import Pinned
from kimi_runtime.umbp.shelf import Shelf, used_at


@dataclass(slots=True)
class Readers:
    """By the pins' numbers."""

    shelf: Shelf
    pins: dict[int, Pinned] = field(default_factory=dict)

    def pin(
        self, number: int, keys: Sequence[bytes], *, reader: int, now_s: float, lease_s: float
    ) -> Pinned:
        """Keep the leading run of `keys` in place for a lease, and make it the warmest."""
        shelf = self.shelf
        run = [shelf.blocks[key] for key in keys[: shelf.run(keys)]]
        gap = Gap.NONE
        if len(run) < len(keys):
            gap = Gap.EVICTED if keys[len(run)] in shelf.ghosts else Gap.MISS
        pinned = Pinned(number, reader, tuple(run), gap, now_s + lease_s)
        shelf.idle.remove(run)
        for block in run:
            block.pins += 1
            block.used_s = used_at(now_s, block.used_s)
            block.account.heard(now_s)
        if run:
            self.pins[number] = pinned
        shelf.counters.pinned += len(run)
        return pinned

    def renew(self, pin: int, *, reader: int, now_s: float, lease_s: float) -> bool:
        """Extend a pin by a lease from now; False if it has lapsed."""
        pinned = self.pins.get(pin)
        if pinned is None or pinned.reader != reader or now_s >= pinned.expires_s:
            return False
        pinned.expires_s = now_s + lease_s
        return True

    def unpin(self, pin: int, corrupt: Iterable[int], *, reader: int, now_s: float) -> bool:
        """End a pin; whether it held all the time. If it did, the blocks at the positions `corrupt`
        are dropped.
        """
        pinned = self.pins.get(pin)
        if pinned is None or pinned.reader != reader:
            return False
        if now_s >= pinned.expires_s:
            self._lapse(pinned)
            return False
        for position in corrupt:
            if position < len(pinned.blocks):
                self.shelf.drop(pinned.blocks[position])
        self._end(pinned)
        return True

    def gone(self, reader: int) -> int:
        """A reader's pins end; how many there were."""
        own = [pinned for pinned in self.pins.values() if pinned.reader == reader]
        for pinned in own:
            self._end(pinned)
        return len(own)

    def expire(self, now_s: float) -> None:
        """End lapsed pins."""
        for pinned in [p for p in self.pins.values() if now_s >= p.expires_s]:
            self._lapse(pinned)

    def _lapse(self, pinned: Pinned) -> None:
        self.shelf.counters.lapsed += len(pinned.blocks)
        self._end(pinned)

    def _end(self, pinned: Pinned) -> None:
        del self.pins[pinned.number]
        idle = []
        for block in reversed(pinned.blocks):  # the head of the run becomes the warmest
            block.pins -= 1
            if block.pins:
                continue
            if block.gone:
                self.shelf.free(block)
            else:
                idle.append(block)
        self.shelf.idle.add(idle)
