"""Where a follower of a feed keeps the keys that its owner holds. Pure."""

from collections.abc import Sequence
from typing import Protocol


class FollowedKeys(Protocol):
    """Where a follower keeps the keys its owner told."""

    def hold(self, keys: Sequence[bytes]) -> None:
        """The owner holds these."""

    def lose(self, keys: Sequence[bytes]) -> None:
        """The owner holds these no more; those it did not hold are passed over."""

    def clear(self) -> None:
        """The owner holds nothing any more."""

    def stage(self, keys: Sequence[bytes]) -> None:
        """The next page of a snapshot, which counts from `swap` on."""

    def swap(self) -> None:
        """What was staged is what the owner holds."""

    def unstage(self) -> None:
        """Forget what was staged."""

    def __len__(self) -> int:
        """How many keys the owner holds."""


class PlainKeys(set[bytes]):
    """A set of keys, for one follower alone."""

    def __init__(self) -> None:
        super().__init__()
        self._staged: set[bytes] = set()

    def hold(self, keys: Sequence[bytes]) -> None:
        """The owner holds these."""
        self.update(keys)

    def lose(self, keys: Sequence[bytes]) -> None:
        """The owner holds these no more."""
        self.difference_update(keys)

    def stage(self, keys: Sequence[bytes]) -> None:
        """The next page of a snapshot."""
        self._staged.update(keys)

    def swap(self) -> None:
        """What was staged is what the owner holds."""
        self.clear()
        self.update(self._staged)
        self._staged = set()

    def unstage(self) -> None:
        """Forget what was staged."""
        self._staged = set()
