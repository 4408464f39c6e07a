"""Samples of the last while, in bounded memory: counts by bucket, one table per slice of time.

Pure: time is an argument. A window forgets a slice as a whole, so it covers between
`window_s - window_s/slices` and `window_s`.
"""

from collections import Counter, deque

from kimi_runtime.spec.signals import bucket_of

SLICES = 12


class Window:
    """Durations of the last `window_s` seconds, by bucket."""

    def __init__(self, window_s: float) -> None:
        self._slice_s = window_s / SLICES
        self._slices: deque[tuple[int, Counter[int]]] = deque()

    def add(self, value: float, *, now_s: float) -> None:
        """One sample."""
        self._slice(now_s)[bucket_of(value)] += 1

    def counts(self, now_s: float) -> dict[int, int]:
        """Samples by bucket."""
        self._forget(now_s)
        total: Counter[int] = Counter()
        for _, counts in self._slices:
            total.update(counts)
        return dict(total)

    def _slice(self, now_s: float) -> Counter[int]:
        self._forget(now_s)
        number = int(now_s // self._slice_s)
        if not self._slices or self._slices[-1][0] < number:
            self._slices.append((number, Counter()))
        return self._slices[-1][1]

    def _forget(self, now_s: float) -> None:
        oldest = int(now_s // self._slice_s) - SLICES + 1
        while self._slices and self._slices[0][0] < oldest:
            self._slices.popleft()


class Sum:
    """The sum of amounts of the last `window_s` seconds."""

    def __init__(self, window_s: float) -> None:
        self._slice_s = window_s / SLICES
        self._slices: deque[tuple[int, float]] = deque()

    def add(self, amount: float, *, now_s: float) -> None:
        """One amount more."""
        number = int(now_s // self._slice_s)
        if self._slices and self._slices[-1][0] >= number:
            last, before = self._slices.pop()
            self._slices.append((last, before + amount))
        else:
            self._slices.append((number, amount))
        self.total(now_s)

    def total(self, now_s: float) -> float:
        """The sum now."""
        oldest = int(now_s // self._slice_s) - SLICES + 1
        while self._slices and self._slices[0][0] < oldest:
            self._slices.popleft()
        return sum(amount for _, amount in self._slices)
