"""Frames: how messages follow each other on a pool daemon's Unix socket.

A frame is `<length u32> <op u8> <request u64>` and `length` bytes of payload, little-endian.
"""

import struct
from typing import NamedTuple

from kimi_connect.wire import Op, WireError

MAX_PAYLOAD = 8 << 20
_HEADER = struct.Struct("<IBQ")
_BUFFER_BYTES = 256 << 10


class Frame(NamedTuple):
    """One frame as received."""

    op: Op
    request: int
    payload: bytes


def pack_frame(op: Op, request: int, payload: bytes = b"") -> bytes:
    """One frame."""
    if len(payload) > MAX_PAYLOAD:
        raise WireError(f"a payload of {len(payload)} bytes passes the limit of {MAX_PAYLOAD}")
    return _HEADER.pack(len(payload), op, request) + payload


class FrameDecoder:
    """Cuts a byte stream into frames. Nothing is lost if its reader is cancelled.

    Bytes are received into its buffer (`room`, `received`): a buffer of that size made anew for
    each call would cost more than all else that is done for a small message.
    """

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0

    def room(self) -> memoryview:
        """Where to receive the next bytes. Take every frame that is whole (`next`) before."""
        held = self._buffer[self._start : self._end]
        need = _HEADER.size
        if held.nbytes >= need:
            need += _HEADER.unpack_from(held)[0]
        if self._start + need > self._buffer.nbytes or not held.nbytes:
            if need > self._buffer.nbytes:
                self._buffer = memoryview(bytearray(need))
            elif not held.nbytes and self._buffer.nbytes > _BUFFER_BYTES:
                self._buffer = memoryview(bytearray(_BUFFER_BYTES))
            self._buffer[: held.nbytes] = held
            self._start, self._end = 0, held.nbytes
        return self._buffer[self._end :]

    def received(self, count: int) -> None:
        """So many bytes lie in what `room` gave."""
        self._end += count

    def next(self) -> "Frame | None":
        """The next whole frame; None: more bytes are needed. WireError ends the connection."""
        at = self._start + _HEADER.size
        if self._end < at:
            return None
        length, op, request = _HEADER.unpack_from(self._buffer, self._start)
        if length > MAX_PAYLOAD:
            raise WireError(f"a frame announces {length} bytes; at most {MAX_PAYLOAD} are allowed")
        if self._end < at + length:
            return None
        self._start = at + length
        try:
            return Frame(Op(op), request, bytes(self._buffer[at : self._start]))
        except ValueError as exc:
            raise WireError(f"there is no frame of kind {op}") from exc
