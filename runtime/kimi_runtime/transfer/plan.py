"""How a batch of spans is moved: merged, cut and spread over streams. Pure.

Requests below 256 KiB don't reach a link's rate (one 64 KiB RDMA read runs at a sixth of it), so
spans that are contiguous on both sides become one, and a large span is cut only into pieces of at
least that.
"""

from collections.abc import Iterable, Iterator, Sequence

from kimi_runtime.transfer.base import Span

MIN_CHUNK_BYTES = 256 << 10


def check_bounds(spans: Iterable[Span], *, remote_bytes: int, local_bytes: int) -> None:
    """ValueError for the first span that is empty or outside either memory."""
    for span in spans:
        if span.size < 1 or span.remote < 0 or span.local < 0:
            raise ValueError(f"{span} has no bytes, or starts before its memory")
        if span.remote + span.size > remote_bytes:
            raise ValueError(f"{span} ends outside the region's {remote_bytes} bytes")
        if span.local + span.size > local_bytes:
            raise ValueError(f"{span} ends outside the local {local_bytes} bytes")


def merge(spans: Iterable[Span]) -> list[Span]:
    """The same bytes in as few spans as possible, by rising remote address.

    Where targets overlap, which source wins is undefined, before and after.
    """
    merged: list[Span] = []
    for span in sorted(spans):
        last = merged[-1] if merged else None
        if (
            last is not None
            and span.remote == last.remote + last.size
            and span.local == last.local + last.size
        ):
            merged[-1] = Span(last.remote, last.local, last.size + span.size)
        else:
            merged.append(span)
    return merged


def spread(
    spans: Iterable[Span], streams: int, *, chunk_bytes: int = MIN_CHUNK_BYTES
) -> tuple[tuple[Span, ...], ...]:
    """Merged spans on at most `streams` streams of about equal bytes; none is empty.

    A span is cut where a stream has its share, but into no piece below `chunk_bytes`. A stream's
    spans stay in order of their addresses.
    """
    if streams < 1 or chunk_bytes < 1:
        raise ValueError(f"{streams} streams of chunks of {chunk_bytes} bytes")
    left = merge(spans)[::-1]
    total = sum(span.size for span in left)
    plans: list[tuple[Span, ...]] = []
    for stream in range(streams, 0, -1):
        share = -(-total // stream)
        plan: list[Span] = []
        while left and share > 0:
            span = left.pop()
            if stream > 1 and span.size - share >= chunk_bytes and share >= chunk_bytes:
                left.append(Span(span.remote + share, span.local + share, span.size - share))
                span = Span(span.remote, span.local, share)
            plan.append(span)
            share -= span.size
            total -= span.size
        if plan:
            plans.append(tuple(plan))
    return tuple(plans)


def cut(spans: Iterable[Span], limit_bytes: int) -> Iterator[Span]:
    """The same bytes in spans of at most `limit_bytes`: a device's largest message."""
    for remote, local, size in spans:
        for at in range(0, size, limit_bytes):
            yield Span(remote + at, local + at, min(limit_bytes, size - at))


def total_bytes(spans: Sequence[Span]) -> int:
    """Bytes of a batch."""
    return sum(span.size for span in spans)
