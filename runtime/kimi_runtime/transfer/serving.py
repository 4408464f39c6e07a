"""Threads that serve connections, so that peers are answered while the event loop computes.

What is said on a connection is a generator: it yields `READ` or `WRITE` where it must wait for its
socket, and its thread resumes it when that is ready. A few threads serve any number of connections,
none can block another, and nothing is buffered here: a peer that does not read is not written for.
"""

import logging
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress

from kimi_runtime import clock
from kimi_runtime.errors import KimistackError
from kimi_runtime.transfer.threshold import Threshold

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE
Steps = Generator[int, None, None]

STALL_S = 30.0
"""How long a peer may rest in the middle of something; between requests it may rest for ever."""
HELLO_S = 5.0
"""How long a new connection may take to say who it is."""
MAX_CONNECTIONS = 8192
TURN_BYTES = 8 << 20
"""After so many bytes without a wait, the other connections of the thread get their turn."""
_TICK_S = 1.0

_log = logging.getLogger(__name__)


class Connection:
    """An accepted socket and when to give it up. Used by its thread alone."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.expires_s: float | None = clock.now_s() + HELLO_S
        self._admitted = False
        self._turn = 0
        self._threshold = Threshold(sock)

    def admit(self) -> None:
        """The peer has said who it is: from now on progress earns it more time."""
        self._admitted = True

    def idle(self) -> None:
        """The peer owes us nothing now."""
        self.expires_s = None

    def moved(self, size: int) -> bool:
        """Note progress; whether others should have their turn now."""
        if self._admitted:
            self.expires_s = clock.now_s() + STALL_S
        self._turn += size
        over = self._turn >= TURN_BYTES
        if over:
            self._turn = 0
        return over

    def expect(self, left: int) -> None:
        """Before a wait for `left` bytes: wake us when there is enough to be worth it."""
        self._threshold.expect(left)

    def receive(self, into: memoryview) -> Steps:
        """Fill `into`; ConnectionResetError if the peer closes before."""
        while into:
            try:
                got = self.sock.recv_into(into)
            except BlockingIOError:
                self.expect(into.nbytes)
                yield READ
                continue
            if not got:
                raise ConnectionResetError("the peer closed the connection")
            into = into[got:]
            if self.moved(got):
                yield READ

    def send(self, data: bytes) -> Steps:
        """Send a few bytes."""
        view = memoryview(data)
        while view:
            try:
                view = view[self.sock.send(view) :]
            except BlockingIOError:
                yield WRITE


class Server:
    """Accepts on `listener` and runs `serve(connection)` for each peer, until `close`."""

    def __init__(
        self,
        listener: socket.socket,
        serve: Callable[[Connection], Steps],
        *,
        threads: int,
        name: str,
    ) -> None:
        self._threads = [_Thread(serve, f"{name}-{n}") for n in range(threads)]
        self._threads[0].accept(listener, self._threads)
        for thread in self._threads:
            thread.start()

    @property
    def connections(self) -> int:
        """How many are open."""
        return sum(thread.load for thread in self._threads)

    def close(self) -> None:
        """Close every connection and the listener; all threads have ended when it returns."""
        for thread in self._threads:
            thread.end()
        for thread in self._threads:
            thread.join()


class _Thread(threading.Thread):
    def __init__(self, serve: Callable[[Connection], Steps], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.load = 0
        self._load_lock = threading.Lock()
        self._serve = serve
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._selector.register(self._woken, READ)
        self._arrived: deque[socket.socket] = deque()
        self._ending = False
        self._listener: socket.socket | None = None
        self._deaf_until_s: float | None = None
        self._all: Sequence[_Thread] = ()
        self._swept_s = clock.now_s()

    def accept(self, listener: socket.socket, threads: Sequence["_Thread"]) -> None:
        """Before the start: take connections and deal them out to `threads`."""
        self._listener, self._all = listener, threads
        self._selector.register(listener, READ)

    def take(self, sock: socket.socket) -> None:
        """Serve a connection; from another thread."""
        with self._load_lock:
            self.load += 1
        self._arrived.append(sock)
        self._rouse()

    def end(self) -> None:
        """Ask it to end; from another thread."""
        self._ending = True
        self._rouse()

    def run(self) -> None:
        """Until it is asked to end."""
        try:
            while not self._ending:
                for key, _ in self._selector.select(self._wait_s()):
                    if isinstance(key.data, _Served):
                        self._resume(key.data, key.events)
                    elif key.fileobj is self._listener:
                        self._accept_some()
                    else:
                        self._welcome()
                self._sweep()
        finally:
            for key in list(self._selector.get_map().values()):
                if isinstance(key.data, _Served):
                    self._drop(key.data)
            for sock in self._arrived:
                sock.close()
            if self._listener is not None:
                self._listener.close()
            self._selector.close()
            self._woken.close()
            self._wake.close()

    def _rouse(self) -> None:
        with suppress(OSError):  # full: it is being roused already; closed: it has ended
            self._wake.send(b"\0")

    def _wait_s(self) -> float | None:
        return _TICK_S if self.load or self._deaf_until_s is not None else None

    def _accept_some(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as exc:  # no descriptors left: it would be ready again at once
            _log.warning("no connection can be accepted for now: %s", exc)
            self._selector.unregister(self._listener)
            self._deaf_until_s = clock.now_s() + _TICK_S
            return
        if sum(thread.load for thread in self._all) >= MAX_CONNECTIONS:
            sock.close()
            return
        tune(sock)
        sock.setblocking(False)
        min(self._all, key=lambda thread: thread.load).take(sock)

    def _welcome(self) -> None:
        self._woken.recv(4096)
        while self._arrived:
            sock = self._arrived.popleft()
            connection = Connection(sock)
            served = _Served(connection, self._serve(connection))
            self._selector.register(sock, READ, served)
            self._resume(served, READ)

    def _resume(self, served: "_Served", events: int) -> None:
        try:
            want = next(served.steps)
        except StopIteration:
            self._drop(served)
        except (OSError, KimistackError) as exc:
            _log.debug("a peer's connection ended: %s", exc)
            self._drop(served)
        except Exception:
            _log.exception("a peer's connection was dropped by our own fault")
            self._drop(served)
        else:
            if want != events:
                self._selector.modify(served.connection.sock, want, served)

    def _drop(self, served: "_Served") -> None:
        self._selector.unregister(served.connection.sock)
        served.steps.close()
        served.connection.sock.close()
        with self._load_lock:
            self.load -= 1

    def _sweep(self) -> None:
        now_s = clock.now_s()
        if now_s - self._swept_s < _TICK_S:
            return
        self._swept_s = now_s
        if self._deaf_until_s is not None and now_s >= self._deaf_until_s:
            assert self._listener is not None
            self._deaf_until_s = None
            self._selector.register(self._listener, READ)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Served):
                expires_s = key.data.connection.expires_s
                if expires_s is not None and now_s >= expires_s:
                    _log.debug("a peer's connection rested for too long")
                    self._drop(key.data)


class _Served:
    """A connection and what is said on it."""

    __slots__ = ("connection", "steps")

    def __init__(self, connection: Connection, steps: Steps) -> None:
        self.connection, self.steps = connection, steps


def tune(sock: socket.socket) -> None:
    """No waiting to fill packets; a dead host is noticed within half a minute."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
