"""One stream of a tcp session: a connection to a peer's region and what is said on it; for threads.

What moves is a generator, as on the owner's side (`serving`): it yields `READ` or `WRITE` where its
socket is not ready, and `BLOCKS` before it takes longer, so that one thread serves several streams
(`tcp_drive`).
"""

import socket
import struct
from collections.abc import Generator, Sequence
from contextlib import suppress

from kimi_runtime.errors import PeerGone, RegionGone
from kimi_runtime.spec.request import RegionRef
from kimi_runtime.transfer.background import Stop
from kimi_runtime.transfer.base import Span
from kimi_runtime.transfer.dialling import abort, dial
from kimi_runtime.transfer.handshake import receive_exactly
from kimi_runtime.transfer.network import NetworkSettings
from kimi_runtime.transfer.plan import total_bytes
from kimi_runtime.transfer.serving import READ, WRITE
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
from kimi_runtime.transfer.threshold import Threshold

Moving = Generator[int, None, bool]
"""What a stream does; at the end, whether all was moved."""

BLOCKS = 0
"""What comes next takes longer than an event loop could wait."""

_WINDOW_BYTES = 8 << 20
_ABORT = struct.pack("ii", 1, 0)


class Stream:
    """A connection made when it is first needed, and made anew after it broke."""

    def __init__(self, remote: RegionRef, settings: NetworkSettings) -> None:
        self._remote, self._settings = remote, settings
        self._sock: socket.socket | None = None
        self.writable = False

    def connect(self, stop: Stop) -> socket.socket:
        """Open the region, unless that is done. Blocks. RegionGone, PeerGone."""
        if self._sock is not None:
            return self._sock
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
        sock.setblocking(False)
        self._sock, self.writable = sock, bool(writable)
        self._threshold = Threshold(sock)
        return sock

    def fileno(self) -> int:
        """The connection's descriptor, for who waits for it."""
        assert self._sock is not None
        return self._sock.fileno()

    def move(self, spans: Sequence[Span], local: memoryview, writes: bool, stop: Stop) -> Moving:
        """Move the spans, or what there is time for before `stop`. RegionGone, PeerGone.

        A connection that broke while it was not used (its owner restarted, a firewall forgot it)
        shows only now, so what fails on an old one is tried once on a new one.
        """
        for start in range(0, len(spans), MAX_SPANS):
            some = spans[start : start + MAX_SPANS]
            fresh = self._sock is None
            moved = yield from self._attempt(some, local, writes, stop, last=fresh)
            if not moved and not stop():
                moved = yield from self._attempt(some, local, writes, stop, last=True)
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
    ) -> Moving:
        """Whether they were moved; False: the connection broke, or `stop` came."""
        move = _write if writes else _read
        if writes or self._sock is None:
            yield BLOCKS
        try:
            sock = self.connect(stop)
            with stop.waking(lambda: abort(sock)):
                status = yield from move(sock, self._threshold, spans, local, stop)
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
    sock: socket.socket, threshold: Threshold, spans: Sequence[Span], into: memoryview, stop: Stop
) -> Generator[int, None, Status | None]:
    """None: stopped half way."""
    yield from _send(sock, [memoryview(pack_request(Op.READ, spans))], stop)
    opening, closing = memoryview(bytearray(1)), memoryview(bytearray(1))
    places = [(span.local, span.size) for span in spans]
    missing = total_bytes(spans) + opening.nbytes + closing.nbytes
    for window in windows(into, places, _WINDOW_BYTES, before=opening, after=closing):
        left = window
        while left:
            threshold.expect(missing)
            yield READ
            try:
                got, _, _, _ = sock.recvmsg_into(left)
            except BlockingIOError:
                continue
            if stop():
                return None
            if not got:
                raise ConnectionResetError("the peer closed the connection")
            if opening[0] != Status.OK:
                return Status(opening[0])
            left, missing = advance(left, got), missing - got
    return Status(closing[0])


def _write(
    sock: socket.socket, threshold: Threshold, spans: Sequence[Span], data: memoryview, stop: Stop
) -> Generator[int, None, Status | None]:
    """None: stopped half way."""
    request = memoryview(pack_request(Op.WRITE, spans))
    places = [(span.local, span.size) for span in spans]
    for window in windows(data, places, _WINDOW_BYTES, before=request):
        yield from _send(sock, window, stop)
    answer = bytearray(1)
    threshold.expect(len(answer))
    while not stop():
        try:
            if not sock.recv_into(answer):
                raise ConnectionResetError("the peer closed the connection")
        except BlockingIOError:
            yield READ
            continue
        return Status(answer[0])
    return None


def _send(sock: socket.socket, window: list[memoryview], stop: Stop) -> Generator[int, None, None]:
    """Send a window, or what there is time for before `stop`."""
    while window and not stop():
        try:
            window = advance(window, sock.sendmsg(window))
        except BlockingIOError:
            yield WRITE
