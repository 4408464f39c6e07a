"""When a block deserves a copy on another node before that one asks, and on which. Pure.

Peers keep what they fetch, so copies follow use by themselves, one fetch too late. A copy ahead of
use saves the fetch that its node would make: the chance that it makes one within `HORIZON_S`, times
the seconds a byte takes over the link. It costs the link as much now, and memory there, which the
taker prices: it takes only what is worth more than what it displaces. So the *value* of a copy is

    (chance - COPY_PRICE) / bytes a second,
    chance = 1 - exp(-fetches a second x HORIZON_S / nodes without it)

Copies don't breed copies: fetches for an offer's sake are no demand. Nor do they go round in rings:
who evicted a copy refuses it, and what was offered rests for `REST_S`.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kimi_runtime.umbp.remote.choice import lot
from kimi_runtime.umbp.remote.demand import Demand

HORIZON_S = 120.0
COPY_PRICE = 0.2
"""Below this chance a copy ahead of use moves more bytes than it saves."""

MIN_READERS = 2
MAX_COPIES = 4
"""With the owner's own."""

REST_S = 120.0
BATCH_KEYS = 256
LINK_SHARE = 8
"""Copies take at most this part of the link."""

BURST_S = 2.0
_MAX_RESTING = 65_536


@dataclass(frozen=True, slots=True)
class Copies:
    """Blocks to offer `peer`, each with what a byte of it is worth there."""

    peer: str
    keys: tuple[bytes, ...]
    worths: tuple[float, ...]


def copy_worth(per_s: float, without: int, bytes_per_s: float) -> float:
    """Seconds that a byte of a copy saves on one of `without` nodes; 0: it does not pay."""
    if without < 1:
        return 0.0
    chance = 1.0 - math.exp(-per_s * HORIZON_S / without)
    return max(0.0, chance - COPY_PRICE) / bytes_per_s


class Spread:
    """Chooses what to copy, within a share of the link."""

    def __init__(self, demand: Demand) -> None:
        self._demand = demand
        self._resting: OrderedDict[bytes, float] = OrderedDict()
        self._bytes = 0.0
        self._at_s: float | None = None

    def next(
        self,
        peers: Collection[str],
        holders: Callable[[bytes], Collection[str]],
        size: Callable[[bytes], int | None],
        *,
        bytes_per_s: float,
        now_s: float,
    ) -> Copies | None:
        """The next copies; None: there is nothing that pays, or enough was copied for now.

        `peers` may be offered something, `holders` says which of all others have a block, `size`
        its bytes here or None.
        """
        self._refill(bytes_per_s, now_s)
        chosen: str | None = None
        keys, worths = list[bytes](), list[float]()
        for key in self._demand:
            if len(keys) == BATCH_KEYS or self._bytes <= 0:
                break
            worth, without = self._worth(key, peers, holders(key), bytes_per_s, now_s)
            nbytes = size(key)
            if not worth or nbytes is None:
                continue
            chosen = chosen or max(without, key=lambda name: lot(name, key))
            if chosen not in without:
                continue
            keys.append(key)
            worths.append(worth)
            self._bytes -= nbytes
            self._rest(key, now_s)
        return None if chosen is None else Copies(chosen, tuple(keys), tuple(worths))

    def _worth(
        self,
        key: bytes,
        peers: Collection[str],
        holders: Collection[str],
        bytes_per_s: float,
        now_s: float,
    ) -> tuple[float, Sequence[str]]:
        """What a copy is worth on one of the nodes without, and which those are."""
        if now_s < self._resting.get(key, -math.inf):
            return 0.0, ()
        if self._demand.readers(key) < MIN_READERS or 1 + len(holders) >= MAX_COPIES:
            return 0.0, ()
        without = sorted(set(peers) - set(holders))
        return copy_worth(self._demand.per_s(key, now_s), len(without), bytes_per_s), without

    def _refill(self, bytes_per_s: float, now_s: float) -> None:
        past_s = BURST_S if self._at_s is None else now_s - self._at_s
        self._at_s = now_s
        share = bytes_per_s / LINK_SHARE
        self._bytes = min(self._bytes + max(0.0, past_s) * share, BURST_S * share)

    def _rest(self, key: bytes, now_s: float) -> None:
        self._resting[key] = now_s + REST_S
        self._resting.move_to_end(key)
        while len(self._resting) > _MAX_RESTING:
            self._resting.popitem(last=False)
