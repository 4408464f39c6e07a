"""One feed of an owner whose blocks lie in several tiers. Pure.

A key is advertised while any tier holds it: added with the first, removed when it is gone from the
last. Followers therefore see no change when a block moves between the tiers of its owner.
"""

from collections.abc import Iterable
from typing import Protocol

from kimi_runtime.umbp.feed import FeedLog


class Holdings(Protocol):
    """Where a tier tells what it holds; a `FeedLog` is one."""

    def add(self, keys: Iterable[bytes]) -> None:
        """These are held now. Adding twice changes nothing."""

    def remove(self, keys: Iterable[bytes]) -> None:
        """These are not held any more; keys that weren't are passed over."""

    def clear(self) -> None:
        """Nothing is held any more."""

    def __len__(self) -> int:
        """How many keys are held."""

    def __contains__(self, key: bytes) -> bool:
        """Whether a key is held."""


class TierHoldings:
    """What one of two tiers holds, told to the feed both share."""

    def __init__(self, feed: FeedLog) -> None:
        self._feed = feed
        self._held: set[bytes] = set()
        self._other: TierHoldings | None = None

    def add(self, keys: Iterable[bytes]) -> None:
        """These are held in this tier now."""
        for key in keys:
            self._held.add(key)
            self._feed.add([key])

    def remove(self, keys: Iterable[bytes]) -> None:
        """These are not held in this tier any more."""
        for key in keys:
            if key in self._held:
                self._held.discard(key)
                self._untell([key])

    def clear(self) -> None:
        """Nothing is held in this tier any more."""
        held, self._held = self._held, set()
        if self._other is not None and len(self._other):
            self._untell(held)
        else:
            self._feed.clear()

    def __len__(self) -> int:
        """How many keys this tier holds."""
        return len(self._held)

    def __contains__(self, key: bytes) -> bool:
        """Whether this tier holds a key."""
        return key in self._held

    def _untell(self, keys: Iterable[bytes]) -> None:
        other = self._other
        self._feed.remove(key for key in keys if other is None or key not in other)

    @classmethod
    def pair(cls, feed: FeedLog) -> "tuple[TierHoldings, TierHoldings]":
        """Two tiers of one owner."""
        one, two = cls(feed), cls(feed)
        one._other, two._other = two, one
        return one, two
