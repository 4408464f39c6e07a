"""Copies that leave the interpreter free.

A slice assignment between memoryviews holds the interpreter's lock for the whole copy, so a thread
that copies would still stop the event loop; numpy's copy releases it. Without numpy the copy is
the slice assignment, in pieces small enough that others get their turn.
"""

from collections.abc import Callable, Iterator, Sequence

try:
    import numpy as np
except ImportError:  # an engine without numpy copies correctly, only less politely
    np = None  # type: ignore[assignment]

PIECE_BYTES = 1 << 20
"""Bytes copied at a time: how late a stop is noticed (some 0.1 ms)."""

_SMALL_BYTES = 4096

Copier = Callable[[int, int], None]
"""Copies the bytes from one offset to another of two stretches of memory."""


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy `source` over `target`, both flat bytes of one size (ValueError otherwise)."""
    if target.nbytes != source.nbytes:
        raise ValueError(f"a copy of {source.nbytes} bytes into {target.nbytes}")
    if np is None or source.nbytes <= _SMALL_BYTES:
        for start in range(0, source.nbytes, PIECE_BYTES):
            target[start : start + PIECE_BYTES] = source[start : start + PIECE_BYTES]
        return
    np.frombuffer(target, np.uint8)[...] = np.frombuffer(source, np.uint8)


def copier(target: memoryview, source: memoryview) -> Copier:
    """Copies `source` over `target`, both flat bytes of one size (ValueError otherwise), piece by
    piece: what is the same for all pieces is done once.
    """
    if target.nbytes != source.nbytes:
        raise ValueError(f"a copy of {source.nbytes} bytes into {target.nbytes}")
    if np is None or source.nbytes <= _SMALL_BYTES:
        return lambda start, end: copy_bytes(target[start:end], source[start:end])
    to, of = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)

    def copy(start: int, end: int) -> None:
        to[start:end] = of[start:end]

    return copy


def matched(
    parts: "Sequence[memoryview]", whole: memoryview
) -> "Iterator[tuple[memoryview, memoryview]]":
    """Each of a block's parts, with the bytes of the `whole` block that belong there."""
    at = 0
    for part in parts:
        yield part, whole[at : at + part.nbytes]
        at += part.nbytes
