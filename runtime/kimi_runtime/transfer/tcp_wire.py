"""What is said on a stream of the tcp transport, after the handshake.

    opening   key u64, epoch u64, size u64              → status u8, writable u8
    request   op u8, spans u32, then per span: offset u64, bytes u64
    READ      → status u8; if OK the spans' bytes, then a closing status u8
    WRITE     the spans' bytes follow the request       → status u8

Numbers are big-endian. One request is under way at a time. The closing status says whether the
region was there until its last byte had left: a reader must not use bytes before it is OK.
"""

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum

from kimi_runtime.errors import ProtocolError
from kimi_runtime.transfer.base import Span

PURPOSE = b"tcp"
OPENING = struct.Struct("!QQQ")
OPENED = struct.Struct("!BB")
REQUEST = struct.Struct("!BI")
MAX_SPANS = 1 << 16
WINDOW_SPANS = 512
"""Buffers of one call to the system, which takes at most 1,024."""


class Op(IntEnum):
    """What the reader asks for."""

    READ = 1
    WRITE = 2


class Status(IntEnum):
    """What the owner answers."""

    OK = 0
    GONE = 1
    READ_ONLY = 2


def pack_request(op: Op, spans: Sequence[Span]) -> bytes:
    """The request for at most `MAX_SPANS` spans."""
    places = [number for span in spans for number in (span.remote, span.size)]
    return REQUEST.pack(op, len(spans)) + struct.pack(f"!{len(places)}Q", *places)


def unpack_places(data: bytes | bytearray, size_bytes: int) -> list[tuple[int, int]]:
    """Offset and size of each span; ProtocolError for one outside the region's `size_bytes`."""
    numbers = struct.unpack(f"!{len(data) // 8}Q", data)
    places = list(zip(numbers[::2], numbers[1::2], strict=True))
    for offset, size in places:
        if not size or offset + size > size_bytes:
            raise ProtocolError(f"{size} bytes at {offset} lie outside a region of {size_bytes}")
    return places


def windows(
    memory: memoryview,
    places: Sequence[tuple[int, int]],
    window_bytes: int,
    *,
    before: memoryview | None = None,
    after: memoryview | None = None,
) -> Iterator[list[memoryview]]:
    """The places as lists of views of `memory`, each at most `window_bytes` and `WINDOW_SPANS`.

    `before` and `after` go with the first and the last of them: bytes alone in a packet would wake
    the other side for next to nothing.
    """
    window: list[memoryview] = [] if before is None else [before]
    room, spans = window_bytes, WINDOW_SPANS
    for offset, size in places:
        while size:
            if not room or not spans:
                yield window
                window, room, spans = [], window_bytes, WINDOW_SPANS
            piece = min(size, room)
            window.append(memory[offset : offset + piece])
            offset, size, room, spans = offset + piece, size - piece, room - piece, spans - 1
    if after is not None:
        window.append(after)
    if window:
        yield window


def advance(window: list[memoryview], moved: int) -> list[memoryview]:
    """What is left of a window after `moved` bytes."""
    for at, view in enumerate(window):
        if moved < view.nbytes:
            return [view[moved:], *window[at + 1 :]]
        moved -= view.nbytes
    return []
