"""Of which workers something else is known than before: for who keeps what was made of it. Pure."""

from collections import deque
from collections.abc import Sequence

REMEMBERED = 256


class Changes:
    """The newest of them, by name. Any number of readers, each with a `count` of its own."""

    __slots__ = ("_newest", "count")

    def __init__(self) -> None:
        self.count = 0
        """Changes so far."""
        self._newest: deque[str] = deque(maxlen=REMEMBERED)

    def add(self, worker: str) -> None:
        """What is known of this worker changed."""
        self.count += 1
        self._newest.append(worker)

    def since(self, count: int) -> Sequence[str] | None:
        """Whose changed after the first `count` changes; None: too many to tell."""
        newer = self.count - count
        if newer > len(self._newest):
            return None
        return [self._newest[-number] for number in range(1, newer + 1)]
