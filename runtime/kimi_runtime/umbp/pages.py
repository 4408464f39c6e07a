"""Which pages of an arena are free: contiguous runs first, scattered ones if there are none.

Pure. An arena is made of *segments* (one per NUMA node; one if there is one), and no run crosses
from one into the next: a block lies in one piece if any segment has a run for it, else scattered in
the segment with most room, else across segments. All-or-nothing.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from kimi_connect.wire import Extent

_LOOK_AT = 8
"""Runs of the class that may or may not fit which are tried before a larger class is cut."""


class Pages:
    """The free pages of an arena of `total` pages in `segments` (their lengths; none: one).

    `used` are pages that are taken from the start. ValueError if the segments don't add up.
    """

    def __init__(
        self, total: int, segments: Sequence[int] = (), used: Iterable[Extent] = ()
    ) -> None:
        lengths = list(segments) or [total]
        if sum(lengths) != total or min(lengths) < 0:
            raise ValueError(f"segments of {lengths} pages in an arena of {total}")
        self.total = total
        self._starts = [sum(lengths[:n]) for n in range(len(lengths))]
        self._segments = [_Segment() for _ in lengths]
        at = 0
        for first, count in [*sorted(used), Extent(total, 0)]:
            if first < at or first + count > total:
                raise ValueError(f"pages {first}+{count} overlap others or the arena's end")
            self._free_between(at, first, lengths)
            at = first + count

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        if len(self._segments) == 1:
            return self._segments[0].free  # the common case; asked for every block of a put
        return sum(segment.free for segment in self._segments)

    def take(self, count: int) -> tuple[Extent, ...] | None:
        """`count` pages, in as few runs as can be found quickly; None if fewer are free."""
        if count > self.free:
            return None
        roomy = self._segments
        if len(roomy) > 1:
            roomy = sorted(roomy, key=lambda segment: -segment.free)
        for segment in roomy:
            run = segment.take_run(count)
            if run is not None:
                return (run,)
        if count <= roomy[0].free:
            return tuple(roomy[0].take_scattered(count))
        extents: list[Extent] = []
        for segment in roomy:
            part = min(count, segment.free)
            extents += segment.take_scattered(part)
            count -= part
        return tuple(extents)

    def give_back(self, extents: Iterable[Extent]) -> None:
        """Free pages that `take` gave out. AssertionError for a page that is free already."""
        for extent in extents:
            self._segments[bisect_right(self._starts, extent.first) - 1].give_back(extent)

    def free_runs(self) -> dict[int, int]:
        """Start and length of every free run, for integrity checks."""
        return {start: n for segment in self._segments for start, n in segment.runs().items()}

    def _free_between(self, start: int, end: int, lengths: Sequence[int]) -> None:
        for segment, first, length in zip(self._segments, self._starts, lengths, strict=True):
            low, high = max(start, first), min(end, first + length)
            if low < high:
                segment.give_back(Extent(low, high - low))


class _Segment:
    """Free runs by their start and their end, so that neighbours merge at once.

    And in classes by size (powers of two), so that a fitting run is found without a scan.
    """

    def __init__(self) -> None:
        self.free = 0
        self._length_at: dict[int, int] = {}  # start of a free run -> its length
        self._start_before: dict[int, int] = {}  # page after a free run -> its start
        self._by_class: list[dict[int, None]] = [{} for _ in range(64)]
        self._classes = 0  # a bit for each class that has runs

    def runs(self) -> dict[int, int]:
        return dict(self._length_at)

    def take_run(self, count: int) -> Extent | None:
        start = self._fitting(count)
        return None if start is None else self._cut(start, count)

    def take_scattered(self, count: int) -> list[Extent]:
        extents = []
        while count:
            start = self._largest()
            extent = self._cut(start, min(count, self._length_at[start]))
            extents.append(extent)
            count -= extent.pages
        return extents

    def give_back(self, extent: Extent) -> None:
        first, count = extent
        start, length = first, count
        before = self._start_before.get(first)
        if before is not None:
            length += self._remove(before)
            start = before
        if first + count in self._length_at:
            length += self._remove(first + count)
        self._put(start, length)

    def _fitting(self, count: int) -> int | None:
        own = count.bit_length()
        best: int | None = None
        for looked, start in enumerate(self._by_class[own]):
            length = self._length_at[start]
            if length == count:
                return start
            if length > count and (best is None or length < self._length_at[best]):
                best = start
            if looked == _LOOK_AT:
                break
        if best is not None:
            return best
        larger = self._classes >> own + 1 << own + 1
        return next(iter(self._by_class[_lowest(larger)])) if larger else None

    def _largest(self) -> int:
        assert self._classes, "free pages are counted but in no run"
        return next(iter(self._by_class[self._classes.bit_length() - 1]))

    def _cut(self, start: int, count: int) -> Extent:
        length = self._length_at[start]
        number, left = length.bit_length(), length - count
        if left.bit_length() == number:  # as usual: a long run stays in its class
            del self._length_at[start]
            runs, first = self._by_class[number], start + count
            del runs[start]
            self._length_at[first] = left
            self._start_before[first + left] = first
            runs[first] = None
            self.free -= count
            return Extent(start, count)
        self._remove(start)
        if left:
            self._put(start + count, left)
        return Extent(start, count)

    def _put(self, start: int, length: int) -> None:
        assert start not in self._length_at, f"page {start} is freed twice"
        if not length:
            return
        self._length_at[start] = length
        self._start_before[start + length] = start
        number = length.bit_length()
        self._by_class[number][start] = None
        self._classes |= 1 << number
        self.free += length

    def _remove(self, start: int) -> int:
        length = self._length_at.pop(start)
        del self._start_before[start + length]
        number = length.bit_length()
        runs = self._by_class[number]
        del runs[start]
        if not runs:
            self._classes ^= 1 << number
        self.free -= length
        return length


def _lowest(bits: int) -> int:
    """The number of the lowest bit that is set."""
    return (bits & -bits).bit_length() - 1
