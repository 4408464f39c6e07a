"""One stream of a tcp session: a connection to a peer's region. Blocking; for threads."""

import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress

from kimi_runtime.errors import PeerGone, RegionGone
from kimi_runtime.spec.request import RegionRef
from kimi_runtime.transfer.background import Stop
from kimi_runtime.transfer.base import Span
from kimi_runtime.transfer.dialling import abort, dial
from kimi_runtime.transfer.handshake import receive_exactly
from kimi_runtime.transfer.network import NetworkSettings
from kimi_runtime.transfer.tcp_wire import (
    MAX_SPANS,
    OPENED,
    OPENING,
    PURPOSE,
    Op,
    Status,
    advance,
    pack_request,
    windows,
)

_WINDOW_BYTES = 8 << 20
_ABORT = struct.pack("ii", 1, 0)


class Stream:
    """A connection made when it is first needed, and made anew after it broke."""

    def __init__(self, remote: RegionRef, settings: NetworkSettings) -> None:
        self._remote, self._settings = remote, settings
        self._sock: socket.socket | None = None
        self.writable = False

    def connect(self, stop: Stop) -> None:
        """Open the region, unless that is done. RegionGone, PeerGone."""
        if self._sock is not None:
            return
        ref = self._remote
        sock = dial(ref, self._settings, PURPOSE, stop)
        try:
            with stop.waking(lambda: abort(sock)):
                sock.sendall(OPENING.pack(ref.key, ref.epoch, ref.size_bytes))
                status, writable = OPENED.unpack(receive_exactly(sock, OPENED.size))
        except OSError as exc:
            sock.close()
            raise PeerGone(f"{ref.peer} at {ref.address} broke off: {exc}") from exc
        if status != Status.OK:
            sock.close()
            raise RegionGone(self._gone())
        self._sock, self.writable = sock, bool(writable)

    def move(self, spans: Sequence[Span], local: memoryview, writes: bool, stop: Stop) -> bool:
        """Move the spans; False if `stop` ended it. RegionGone, PeerGone.

        A connection that broke while it was not used (its owner restarted, a firewall forgot it)
        shows only now, so what fails on an old one is tried once on a new one.
        """
        for start in range(0, len(spans), MAX_SPANS):
            some = spans[start : start + MAX_SPANS]
            fresh = self._sock is None
            moved = self._attempt(some, local, writes, stop, last=fresh)
            if not moved and not stop():
                moved = self._attempt(some, local, writes, stop, last=True)
            if not moved:
                return False
        return True

    def close(self, *, abortive: bool = False) -> None:
        """End the connection. `abortive`: with a reset, so that the owner stops sending at once."""
        if self._sock is not None:
            with suppress(OSError):
                if abortive:
                    self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
            self._sock.close()
            self._sock = None

    def _attempt(
        self, spans: Sequence[Span], local: memoryview, writes: bool, stop: Stop, *, last: bool
    ) -> bool:
        move: Callable[[socket.socket, Sequence[Span], memoryview, Stop], Status | None]
        move = _write if writes else _read
        try:
            self.connect(stop)
            assert self._sock is not None
            sock = self._sock
            with stop.waking(lambda: abort(sock)):
                status = move(sock, spans, local, stop)
        except (OSError, PeerGone) as exc:
            self.close(abortive=True)
            if stop() or not last:
                return False
            if isinstance(exc, PeerGone):
                raise
            raise PeerGone(f"{self._remote.peer} broke off a transfer: {exc}") from exc
        except BaseException:
            self.close(abortive=True)
            raise
        if stop() or status is not Status.OK:
            self.close(abortive=True)
        if status is Status.READ_ONLY:
            raise RegionGone(f"region {self._remote.key} is registered for reading only")
        if status is Status.GONE:
            raise RegionGone(self._gone())
        return status is Status.OK

    def _gone(self) -> str:
        peer = self._remote.peer
        return (
            f"region {self._remote.key} of {peer} was released, or {peer} restarted; "
            "look its blocks up again"
        )


def _read(
    sock: socket.socket, spans: Sequence[Span], into: memoryview, stop: Stop
) -> Status | None:
    """None: stopped half way."""
    sock.sendall(pack_request(Op.READ, spans))
    status = Status(receive_exactly(sock, 1)[0])
    if status is not Status.OK:
        return status
    for window in windows(into, [(span.local, span.size) for span in spans], _WINDOW_BYTES):
        left = window
        while left:
            got, _, _, _ = sock.recvmsg_into(left, 0, socket.MSG_WAITALL)
            if stop():
                return None
            if not got:
                raise ConnectionResetError("the peer closed the connection")
            left = advance(left, got)
    return Status(receive_exactly(sock, 1)[0])


def _write(
    sock: socket.socket, spans: Sequence[Span], data: memoryview, stop: Stop
) -> Status | None:
    """None: stopped half way."""
    sock.sendall(pack_request(Op.WRITE, spans))
    for window in windows(data, [(span.local, span.size) for span in spans], _WINDOW_BYTES):
        left = window
        while left:
            left = advance(left, sock.sendmsg(left))
            if stop():
                return None
    return Status(receive_exactly(sock, 1)[0])
