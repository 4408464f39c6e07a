"""Which shared prefixes are hot: requests per second that start with each. Pure.

Rates fade with `FADING_S`; of more than `max_keys` prefixes the coldest is given up for a new one
(as in Space-Saving, Metwally 2005, without its over-estimate: a newcomer starts from nothing).
"""

import math
from collections.abc import Iterable

FADING_S = 60.0
MAX_KEYS = 4096


class PrefixHeat:
    """Counts by key of the prefix's last block."""

    def __init__(self, *, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._known: dict[bytes, tuple[float, float]] = {}

    def __len__(self) -> int:
        """How many prefixes are known."""
        return len(self._known)

    def observe(self, keys: Iterable[bytes], *, now_s: float) -> None:
        """A request starts with each of these prefixes."""
        for key in keys:
            count = self._faded(key, now_s) + 1
            if key not in self._known and len(self._known) >= self._max_keys:
                coldest = min(self._known, key=lambda one: self._faded(one, now_s))
                del self._known[coldest]
            self._known[key] = count, now_s

    def per_s(self, key: bytes, *, now_s: float) -> float:
        """Requests per second, over the last minute or so; 0 for an unknown prefix."""
        return self._faded(key, now_s) / FADING_S

    def hottest(self, count: int, *, now_s: float) -> list[tuple[bytes, float]]:
        """The prefixes with the highest rates, and those."""
        rates = [(key, self.per_s(key, now_s=now_s)) for key in self._known]
        return sorted(rates, key=lambda one: (-one[1], one[0]))[:count]

    def _faded(self, key: bytes, now_s: float) -> float:
        count, at_s = self._known.get(key, (0.0, now_s))
        return count * math.exp(-max(now_s - at_s, 0.0) / FADING_S)
