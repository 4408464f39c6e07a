"""Blocking connections to a node's pool daemon."""

import hmac
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import NamedTuple

from kimi_connect import payloads, wire
from kimi_connect.arena import Arena, ArenaGone, attach_arena
from kimi_connect.frames import Frame, FrameDecoder, pack_frame
from kimi_connect.stock import Stock
from kimi_connect.stocking import MOST_AWAITED
from kimi_connect.wire import Op

BACKOFF_S = (0.05, 2.0)
ANSWER_S = 0.25
"""Time given to end what was begun (unpin, commit) when the deadline is near or over."""

now_s = time.monotonic  # noqa: TID251  (nothing of the runtime, its clock included, is here)


class Lost(Exception):
    """There is no connection, or not any more."""


Heard = Callable[[bytes], None]
"""Takes the payload of an answer."""


class Awaited(NamedTuple):
    """A request that was told: which, its answer's kind, and who hears it."""

    number: int
    answer: Op
    heard: Heard


class Connection:
    """One authenticated connection and its arena. Any error ends it.

    `writing` are the generations of reserved pages that the caller still writes to.
    """

    def __init__(
        self,
        path: str,
        call_key: bytes,
        instance: bytes,
        name: str,
        writing: Collection[int],
        ends_s: float,
    ) -> None:
        self._decoder = FrameDecoder()
        self._number = 0
        self._awaited: deque[Awaited] = deque()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._wait_until(ends_s)
            self._socket.connect(path)
            self.welcome = self._handshake(call_key, instance, name, writing, ends_s)
            self.arena: Arena = attach_arena(
                self.welcome.arena,
                page_bytes=self.welcome.page_bytes,
                pages=self.welcome.pages,
                epoch=self.welcome.epoch,
                instance=instance,
            )
        except BaseException:
            self._socket.close()
            raise
        self.stock = Stock(self.arena)

    @property
    def awaited(self) -> int:
        """Requests that were told, and whose answers have not been heard."""
        return len(self._awaited)

    def call(self, op: Op, payload: bytes, answer: Op, ends_s: float) -> bytes:
        """The payload of the answer to a request."""
        self._number += 1
        number = self._number
        self._send(op, number, payload, ends_s)
        while self._awaited:
            self._hear(self._receive(ends_s))
        return _answer(self._receive(ends_s), number, answer)

    def tell(self, op: Op, payload: bytes, answer: Op, heard: Heard, ends_s: float) -> None:
        """Send a request, and give its answer's payload to `heard` when that is received."""
        if len(self._awaited) >= MOST_AWAITED:
            self.hear(ends_s)
        self._number += 1
        self._send(op, self._number, payload, ends_s)
        self._awaited.append(Awaited(self._number, answer, heard))

    def hear(self, ends_s: float) -> None:
        """Wait for the next answer to what was told."""
        self._hear(self._receive(ends_s))

    def hear_what_came(self) -> None:
        """Take answers to what was told that are there, without waiting."""
        while self._awaited:
            came = self._decoder.next()
            if came is None:
                self._never_wait()
                try:
                    self._received(self._socket.recv_into(self._decoder.room()))
                except BlockingIOError:
                    return
                continue
            self._hear(_accepted(came))

    def close(self) -> None:
        """End the connection; what it held ends with it. Nothing of its stock is written to."""
        self.arena.release()
        self._socket.close()

    def _hear(self, came: Frame) -> None:
        told = self._awaited.popleft()
        told.heard(_answer(came, told.number, told.answer))

    def _handshake(
        self,
        call_key: bytes,
        instance: bytes,
        name: str,
        writing: Collection[int],
        ends_s: float,
    ) -> wire.Welcome:
        challenge = self._receive(ends_s)
        if challenge.op is not Op.CHALLENGE:
            raise wire.WireError("the daemon did not begin with a challenge")
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        proof = wire.client_proof(call_key, challenge.payload, nonce, instance, name)
        hello = wire.Hello(nonce, instance, name, tuple(writing), proof)
        self._send(Op.HELLO, 0, wire.pack_hello(hello), ends_s)
        came = self._receive(ends_s)
        if came.op is not Op.WELCOME:
            raise wire.WireError(f"the daemon refused us ({came.op.name})")
        welcome = wire.unpack_welcome(came.payload)
        expected = wire.server_proof(call_key, challenge.payload, nonce)
        if not hmac.compare_digest(expected, welcome.proof):
            raise wire.WireError("who listens on the socket does not hold our call key")
        return welcome

    def _send(self, op: Op, request: int, payload: bytes, ends_s: float) -> None:
        """Without asking the kernel first whether there is room: there nearly always is."""
        _left_s(ends_s)
        frame, sent = pack_frame(op, request, payload), 0
        self._never_wait()
        with suppress(BlockingIOError):
            sent = self._socket.send(frame)
        if sent < len(frame):
            self._wait_until(ends_s)
            self._socket.sendall(frame[sent:])

    def _receive(self, ends_s: float) -> Frame:
        while True:
            came = self._decoder.next()
            if came is not None:
                return _accepted(came)
            self._wait_until(ends_s)
            self._received(self._socket.recv_into(self._decoder.room()))

    def _received(self, count: int) -> None:
        if not count:
            raise Lost("the pool daemon closed the connection")
        self._decoder.received(count)

    def _never_wait(self) -> None:
        if self._socket.gettimeout() != 0:  # to set it costs a system call
            self._socket.settimeout(0)

    def _wait_until(self, ends_s: float) -> None:
        self._socket.settimeout(_left_s(ends_s))


def _left_s(ends_s: float) -> float:
    left_s = ends_s - now_s()
    if left_s <= 0:
        raise TimeoutError("the deadline passed while waiting for the pool daemon")
    return left_s


def _accepted(came: Frame) -> Frame:
    if came.op in (Op.REFUSED, Op.ERROR):
        raise wire.WireError(f"the daemon refused: {wire.unpack_text(came.payload)}")
    return came


def _answer(came: Frame, number: int, answer: Op) -> bytes:
    if came.op is not answer or came.request != number:
        raise wire.WireError(f"{answer.name} was to come, not {came.op.name}")
    return came.payload


class Reconnecting:
    """The connection a client has, made again, with backoff, by the next call that needs it.

    `writing` are the generations of reserved pages that are still being written to. `arena` is the
    one of the latest connection: it can be read while there is none.
    """

    def __init__(self, path: str, call_key: bytes, name: str, connect_s: float) -> None:
        self.arena: Arena | None = None
        self.writing: set[int] = set()
        self._path, self._call_key, self._name = path, call_key, name
        self._connect_s = connect_s
        self._instance = secrets.token_bytes(16)
        self._connection: Connection | None = None
        self._retry_s, self._backoff_s = 0.0, BACKOFF_S[0]
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._connection is not None

    def call(self, op: Op, payload: bytes, answer: Op, ends_s: float) -> bytes:
        """One request. Lost and TimeoutError leave no connection, so nothing is held there."""
        with self.using(ends_s) as connection:
            return connection.call(op, payload, answer, ends_s)

    def using(self, ends_s: float) -> "_Using":
        """The connection, as a context manager that leaves none when anything fails in it.

        Raises Lost, or TimeoutError.
        """
        return _Using(self, ends_s)

    def number(self, op: Op, payload: bytes, ends_s: float) -> int:
        """A request that is answered with a number."""
        return payloads.unpack_number(self.call(op, payload, Op.COUNT, ends_s))

    def live_arena(self) -> Arena:
        """The connection's arena; Lost without a connection."""
        if self._connection is None:
            raise Lost("there is no connection to the pool daemon")
        return self._connection.arena

    def lease_s(self) -> float:
        """How long a pin lasts; Lost without a connection."""
        if self._connection is None:
            raise Lost("there is no connection to the pool daemon")
        return self._connection.welcome.pin_lease_s

    def tell(self, op: Op, payload: bytes, ends_s: float) -> None:
        """A request that is answered with a number nobody needs; not waited for."""
        with self.using(ends_s) as connection:
            connection.tell(op, payload, Op.COUNT, lambda number: None, ends_s)

    def drop(self) -> None:
        """End the connection, and with it all that it held."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def finish(self, ends_s: float) -> None:
        """Give the stock back, and wait until the daemon has read that and all before.

        Of who has hung up with answers left to read, nothing more is read.
        """
        if self._connection is not None:
            with suppress(Lost, TimeoutError), self.using(ends_s) as connection:
                while connection.awaited:
                    connection.hear(ends_s)  # it may bring more for the stock
                given_up = payloads.pack_generations(connection.stock.everything())
                connection.call(Op.ABORT, given_up, Op.COUNT, ends_s)

    def close(self) -> None:
        """End the connection for good."""
        self._closed, self.arena = True, None
        self.drop()

    def connection(self, ends_s: float) -> Connection:
        """The one there is, or a new one; Lost."""
        if self._connection is not None:
            return self._connection
        if self._closed or now_s() < self._retry_s:
            raise Lost("the pool daemon could not be reached a moment ago")
        ends_s = min(ends_s, now_s() + self._connect_s)
        try:
            self._connection = Connection(
                self._path, self._call_key, self._instance, self._name, self.writing, ends_s
            )
        except (OSError, wire.WireError, ArenaGone, Lost) as exc:
            self._retry_s = now_s() + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, BACKOFF_S[1])
            raise Lost(f"no pool daemon answers on {self._path}: {exc}") from exc
        self._backoff_s = BACKOFF_S[0]
        self.arena = self._connection.arena
        return self._connection


class _Using:
    """See `Reconnecting.using`: a generator would cost every put three times as much."""

    def __init__(self, daemon: Reconnecting, ends_s: float) -> None:
        self._daemon, self._ends_s = daemon, ends_s

    def __enter__(self) -> Connection:
        try:
            return self._daemon.connection(self._ends_s)
        except TimeoutError:
            self._daemon.drop()
            raise

    def __exit__(self, kind: object, exc: "BaseException | None", trace: object) -> None:
        if exc is None:
            return
        self._daemon.drop()
        if isinstance(exc, (OSError, wire.WireError, ArenaGone)) and not isinstance(
            exc, TimeoutError
        ):
            raise Lost(str(exc)) from exc


class Stopper:
    """Looked at between pieces of a copy: ends it at the deadline, and renews its pin meanwhile."""

    def __init__(self, daemon: Reconnecting, ends_s: float, pin: "int | None") -> None:
        self._daemon, self._ends_s, self._pin = daemon, ends_s, pin
        self._every_s = daemon.lease_s() / 3
        self._renew_s = now_s() + self._every_s

    def __call__(self) -> bool:
        at_s = now_s()
        if at_s >= self._ends_s:
            return True
        if self._pin is not None and at_s >= self._renew_s:
            self._renew_s = at_s + self._every_s
            self._daemon.number(Op.RENEW, payloads.pack_number(self._pin), at_s + ANSWER_S)
        return False
