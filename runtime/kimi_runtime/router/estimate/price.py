"""What KV space costs: the seconds of reloading that taking it from others caused. Pure.

A ghost cache per worker remembers what was evicted lately. When a request misses a block that a
ghost still names, the eviction was a loss, and the seconds that its reload or recomputation took
are the price of the space. Blocks nobody asks for again cost nothing, so with room to spare the
price falls to 0 by itself.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable

SMOOTHING_S = 30.0
GHOST_BLOCKS = 65_536


class SpacePrice:
    """The price on one worker or tier, in seconds per block taken."""

    def __init__(self, *, ghosts: int = GHOST_BLOCKS) -> None:
        self._limit = ghosts
        self._ghosts: OrderedDict[bytes, float] = OrderedDict()
        self._lost_s, self._taken = 0.0, 0.0
        self._at_s: float | None = None
        self.regretted = 0

    def evicted(self, keys: Iterable[bytes], *, now_s: float) -> None:
        """Blocks were given up for others'."""
        self._fade(now_s)
        ghosts, taken = self._ghosts, self._taken
        for key in keys:
            ghosts[key] = now_s
            ghosts.move_to_end(key)
            taken += 1
        self._taken = taken
        while len(ghosts) > self._limit:
            ghosts.popitem(last=False)

    def missed(self, keys: Iterable[bytes], *, seconds_per_block: float, now_s: float) -> int:
        """Blocks were missed and took this long each to come back; how many were evicted here."""
        self._fade(now_s)
        regretted = 0
        for key in keys:
            if self._ghosts.pop(key, None) is not None:
                regretted += 1
        if math.isfinite(seconds_per_block) and seconds_per_block > 0:
            self._lost_s += regretted * seconds_per_block
        self.regretted += regretted
        return regretted

    def per_block_s(self, *, now_s: float) -> float:
        """Seconds that taking one more block will cost somebody. To look changes nothing."""
        if not self._lost_s:
            return 0.0
        kept = self._kept(now_s)
        return kept * self._lost_s / max(kept * self._taken, 1.0)

    @property
    def costless(self) -> bool:
        """Whether nothing that was evicted was ever missed."""
        return not self._lost_s

    def per_block_second_s(self, blocks: int, *, now_s: float) -> float:
        """Seconds that holding one of `blocks` for a second costs: a block that is held for as long
        as the memory takes to turn over keeps one other out of it.
        """
        taken = self._kept(now_s) * self._taken
        return self.per_block_s(now_s=now_s) * taken / (SMOOTHING_S * max(blocks, 1))

    def _kept(self, now_s: float) -> float:
        """What is left of what was known when something was last heard."""
        if self._at_s is None or now_s <= self._at_s:
            return 1.0
        return math.exp((self._at_s - now_s) / SMOOTHING_S)

    def _fade(self, now_s: float) -> None:
        kept = self._kept(now_s)
        self._lost_s, self._taken = self._lost_s * kept, self._taken * kept
        self._at_s = now_s
