"""The owner's side of the tcp transport: it answers on streams straight from its regions.

Bytes go from a region to the socket, or from the socket to a region, without a copy of ours. Each
such call holds the region's lock, never blocks and moves at most a megabyte: releasing a region
waits for no peer. What is still owed of a region that is gone is made up with zeros, so that the
closing status, which says so, is found where it belongs.
"""

import struct
from collections.abc import Sequence

from kimi_runtime.errors import ProtocolError
from kimi_runtime.transfer.exports import Export, Exports
from kimi_runtime.transfer.handshake import accept_from
from kimi_runtime.transfer.serving import READ, WRITE, Connection, Steps
from kimi_runtime.transfer.tcp_wire import (
    MAX_SPANS,
    OPENED,
    OPENING,
    PURPOSE,
    REQUEST,
    Op,
    Status,
    advance,
    unpack_places,
    windows,
)

_WINDOW_BYTES = 1 << 20
_ZEROS = memoryview(bytes(_WINDOW_BYTES))
_PLACE = struct.Struct("!QQ")


class Owner:
    """Answers for `exports` to holders of one of `call_keys`."""

    def __init__(self, exports: Exports, call_keys: Sequence[bytes]) -> None:
        self._exports, self._call_keys = exports, call_keys

    def serve(self, connection: Connection) -> Steps:
        """One stream, until the peer closes it."""
        yield from accept_from(connection, self._call_keys, PURPOSE)
        opening = bytearray(OPENING.size)
        yield from connection.receive(memoryview(opening))
        export = self._exports.find(*OPENING.unpack(opening))
        if export is None:
            yield from connection.send(OPENED.pack(Status.GONE, False))
            return
        yield from connection.send(OPENED.pack(Status.OK, export.writable))
        head = bytearray(REQUEST.size)
        while True:
            connection.idle()
            yield from connection.receive(memoryview(head))
            op, count = REQUEST.unpack(head)
            if op not in (Op.READ, Op.WRITE) or not 0 < count <= MAX_SPANS:
                raise ProtocolError(f"a request {op} for {count} spans")
            listed = bytearray(count * _PLACE.size)
            yield from connection.receive(memoryview(listed))
            places = unpack_places(listed, export.ref.size_bytes)
            if op == Op.READ:
                view = export.view
                if view is None:  # the end of the connection wakes who waits for more bytes
                    yield from connection.send(bytes([Status.GONE]))
                    return
                yield from _read(connection, export, view, places)
            else:
                yield from _write(connection, export, places)


def _read(
    connection: Connection, export: Export, view: memoryview, places: Sequence[tuple[int, int]]
) -> Steps:
    opening, closing = memoryview(bytes([Status.OK])), memoryview(bytearray(1))
    for window in windows(view, places, _WINDOW_BYTES, before=opening, after=closing):
        left = window
        while left:
            with export.touched() as here:
                closing[0] = Status.OK if here else Status.GONE
                sent = _send(connection, left if here else _stand_ins(_ZEROS, left, closing))
            left = advance(left, sent)
            if connection.moved(sent) or left:  # the system takes no more for now
                yield WRITE


def _write(connection: Connection, export: Export, places: Sequence[tuple[int, int]]) -> Steps:
    nowhere = memoryview(bytearray(_WINDOW_BYTES))
    view = export.view if export.writable else None
    if view is None:
        for size in (size for _, size in places):
            for at in range(0, size, _WINDOW_BYTES):
                yield from connection.receive(nowhere[: min(_WINDOW_BYTES, size - at)])
    else:
        missing = sum(size for _, size in places)
        for window in windows(view, places, _WINDOW_BYTES):
            left = window
            while left:
                with export.touched() as here:
                    got = _receive(connection, left if here else _stand_ins(nowhere, left))
                left, missing = advance(left, got), missing - got
                if connection.moved(got) or left:  # no more has come
                    connection.expect(max(missing, 1))
                    yield READ
    status = Status.OK if export.writable else Status.READ_ONLY
    yield from connection.send(bytes([Status.GONE if export.view is None else status]))


def _send(connection: Connection, window: list[memoryview]) -> int:
    """Bytes the system took; 0: it would have to wait."""
    try:
        return connection.sock.sendmsg(window)
    except BlockingIOError:
        return 0


def _receive(connection: Connection, window: list[memoryview]) -> int:
    """Bytes that were there; 0: none yet."""
    try:
        got, _, _, _ = connection.sock.recvmsg_into(window)
    except BlockingIOError:
        return 0
    if not got:
        raise ConnectionResetError("the peer closed the connection in the middle of a write")
    return got


def _stand_ins(
    memory: memoryview, window: list[memoryview], closing: memoryview | None = None
) -> list[memoryview]:
    """Views as long as those of `window`, all of `memory` but for the closing status itself."""
    return [view if view is closing else memory[: view.nbytes] for view in window]
