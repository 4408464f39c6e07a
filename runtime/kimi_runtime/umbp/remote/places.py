"""From where in an owner's memory to where in ours. Pure."""

from collections.abc import Iterator, Sequence

from kimi_connect.wire import Extent
from kimi_runtime.transfer.base import Span


def spans_between(
    theirs: Sequence[Extent], their_page: int, ours: Sequence[Extent], our_page: int, size: int
) -> list[Span]:
    """Spans that copy a block of `size` bytes from the pages `theirs` into the pages `ours`.

    Offsets are from page 0 of either memory. ValueError if either has fewer bytes than the block.
    """
    spans: list[Span] = []
    remote, local = _ranges(theirs, their_page), _ranges(ours, our_page)
    from_at = from_end = to_at = to_end = 0
    left = size
    while left:
        if from_at == from_end:
            from_at, from_end = next(remote, (0, 0))
        if to_at == to_end:
            to_at, to_end = next(local, (0, 0))
        step = min(left, from_end - from_at, to_end - to_at)
        if step < 1:
            raise ValueError(f"pages are {left} bytes too few for a block of {size}")
        spans.append(Span(from_at, to_at, step))
        from_at, to_at, left = from_at + step, to_at + step, left - step
    return spans


def _ranges(extents: Sequence[Extent], page_bytes: int) -> Iterator[tuple[int, int]]:
    for first, pages in extents:
        yield first * page_bytes, (first + pages) * page_bytes
