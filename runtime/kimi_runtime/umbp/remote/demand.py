"""Which blocks peers fetch from here, how often, and who. Pure."""

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

FADING_S = 60.0
MAX_KEYS = 65_536
MAX_READERS = 8


@dataclass(slots=True)
class _Wanted:
    count: float = 0.0
    at_s: float = 0.0
    readers: set[str] = field(default_factory=set)

    def faded(self, now_s: float) -> float:
        return self.count * math.exp(-max(0.0, now_s - self.at_s) / FADING_S)


class Demand:
    """Counts that fade; beyond `max_keys` blocks those asked for longest ago are forgotten."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._wanted: OrderedDict[bytes, _Wanted] = OrderedDict()

    def __len__(self) -> int:
        """Blocks known of."""
        return len(self._wanted)

    def __iter__(self) -> Iterator[bytes]:
        """Blocks in the order in which they were asked for last: runs stay together."""
        return iter(list(self._wanted))

    def observe(self, keys: Sequence[bytes], reader: str, now_s: float) -> None:
        """A reader fetches a run."""
        for key in keys:
            wanted = self._wanted.setdefault(key, _Wanted())
            wanted.count, wanted.at_s = wanted.faded(now_s) + 1, now_s
            if len(wanted.readers) < MAX_READERS:
                wanted.readers.add(reader)
            self._wanted.move_to_end(key)
        while len(self._wanted) > self._max_keys:
            self._wanted.popitem(last=False)

    def per_s(self, key: bytes, now_s: float) -> float:
        """Fetches a second, over the last minute or so."""
        wanted = self._wanted.get(key)
        return 0.0 if wanted is None else wanted.faded(now_s) / FADING_S

    def readers(self, key: bytes) -> int:
        """From how many nodes, as far as is remembered."""
        wanted = self._wanted.get(key)
        return 0 if wanted is None else len(wanted.readers)
