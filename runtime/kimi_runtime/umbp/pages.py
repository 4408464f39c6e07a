"""Which pages of an arena are free: contiguous runs first, scattered ones if there are none.

Pure. Free runs are kept by their start and their end, so that neighbours merge at once, and in
classes by size (powers of two), so that a fitting run is found without a scan. All-or-nothing.
"""

from collections.abc import Iterable

from kimi_connect.wire import Extent

_LOOK_AT = 8
"""Runs of the class that may or may not fit which are tried before a larger class is cut."""


class Pages:
    """The free pages of an arena of `total` pages."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = 0
        self._length_at: dict[int, int] = {}  # start of a free run -> its length
        self._start_before: dict[int, int] = {}  # page after a free run -> its start
        self._by_class: list[dict[int, None]] = [{} for _ in range(total.bit_length() + 1)]
        self._put(0, total)

    def take(self, count: int) -> tuple[Extent, ...] | None:
        """`count` pages, in as few runs as can be found quickly; None if fewer are free."""
        if count > self.free:
            return None
        start = self._fitting(count)
        if start is not None:
            return (self._cut(start, count),)
        extents = []
        while count:
            start = self._largest()
            extent = self._cut(start, min(count, self._length_at[start]))
            extents.append(extent)
            count -= extent.pages
        return tuple(extents)

    def give_back(self, extents: Iterable[Extent]) -> None:
        """Free pages that `take` gave out. AssertionError for a page that is free already."""
        for first, count in extents:
            start, length = first, count
            before = self._start_before.get(first)
            if before is not None:
                length += self._remove(before)
                start = before
            if first + count in self._length_at:
                length += self._remove(first + count)
            self._put(start, length)

    def free_runs(self) -> dict[int, int]:
        """Start and length of every free run, for integrity checks."""
        return dict(self._length_at)

    def _fitting(self, count: int) -> int | None:
        own = count.bit_length()
        best: int | None = None
        for looked, start in enumerate(self._by_class[own]):
            length = self._length_at[start]
            if length >= count and (best is None or length < self._length_at[best]):
                best = start
            if looked == _LOOK_AT:
                break
        if best is not None:
            return best
        for larger in self._by_class[own + 1 :]:
            if larger:
                return next(iter(larger))
        return None

    def _largest(self) -> int:
        for runs in reversed(self._by_class):
            if runs:
                return next(iter(runs))
        raise AssertionError("free pages are counted but in no run")

    def _cut(self, start: int, count: int) -> Extent:
        length = self._remove(start)
        if length > count:
            self._put(start + count, length - count)
        return Extent(start, count)

    def _put(self, start: int, length: int) -> None:
        assert start not in self._length_at, f"page {start} is freed twice"
        if not length:
            return
        self._length_at[start] = length
        self._start_before[start + length] = start
        self._by_class[length.bit_length()][start] = None
        self.free += length

    def _remove(self, start: int) -> int:
        length = self._length_at.pop(start)
        del self._start_before[start + length]
        del self._by_class[length.bit_length()][start]
        self.free -= length
        return length
