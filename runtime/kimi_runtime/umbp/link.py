"""One authenticated connection to a pool daemon, and the arena it announced.

Requests may overlap; each has its answer. A request that its caller gave up (deadline, cancelled)
is not forgotten: when its answer comes, what it granted is given back.
"""

import asyncio
import hmac
import secrets
from pathlib import Path

from kimi_connect import payloads, wire
from kimi_connect.arena import Arena, ArenaGone, attach_arena
from kimi_connect.frames import Frame
from kimi_connect.stock import Stock
from kimi_connect.stocking import MOST_AWAITED, Told
from kimi_connect.wire import Grant, Op, WireError
from kimi_runtime import clock
from kimi_runtime.umbp.framed import Framed

HUNG_S = 5.0
"""A daemon that owes an answer for this long is treated as gone."""


class LinkLost(Exception):
    """There is no connection, or not any more."""


class Link(Framed):
    """Use `open_link`."""

    def __init__(
        self, call_key: bytes, instance: bytes, name: str, writing: frozenset[int]
    ) -> None:
        super().__init__()
        self.arena: Arena | None = None
        self.stock: Stock | None = None
        self.writing = writing
        self.lost = False
        self.pin_lease_s = 0.0
        self.welcomed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._call_key, self._instance, self._name = call_key, instance, name
        self._nonce = secrets.token_bytes(wire.NONCE_BYTES)
        self._server_nonce: bytes | None = None
        self._number = 0
        self._pending: dict[int, tuple[asyncio.Future[Frame], float]] = {}
        self._given_up: set[int] = set()
        self._told: dict[int, Told] = {}

    def connection_lost(self, exc: Exception | None) -> None:
        """Every open request fails."""
        self._lose(f"the pool daemon closed the connection ({exc or 'no reason given'})")

    def arrived(self, frame: Frame) -> None:
        """Hand out an answer."""
        if self.arena is None:
            self._handshake(frame)
        else:
            self._answered(frame)

    def failed(self, error: WireError) -> None:
        """The daemon refused us, or is none."""
        self._lose(str(error))

    async def call(self, op: Op, payload: bytes, *, within_s: float) -> Frame:
        """The answer to a request. LinkLost; TimeoutError if it did not come in time."""
        oldest_s = min((at_s for _, at_s in self._pending.values()), default=None)
        if oldest_s is not None and clock.now_s() - oldest_s > HUNG_S:
            self._lose(f"the pool daemon has not answered for {HUNG_S:.0f} s")
        return await self._answer_to(self._send(op, payload), within_s)

    def tell(self, op: Op, payload: bytes) -> None:
        """A request whose answer nobody needs; nothing happens without a connection."""
        if not self.lost:
            self._given_up.add(self._send(op, payload))

    async def keep(self, told: Told, *, within_s: float) -> None:
        """Tell the daemon of a stock. LinkLost.

        Its answer is waited for, or TimeoutError, only if it owes several, or reads so slowly that
        this could end with our process.
        """
        assert self.transport is not None
        try:
            number = self._send(Op.KEEP, told.payload)
        except LinkLost:
            told.unheard()
            raise
        self._told[number] = told
        if len(self._told) > MOST_AWAITED or self.transport.get_write_buffer_size():
            await self._answer_to(number, within_s)
        else:
            self._given_up.add(number)

    def close(self) -> None:
        """End the connection at once."""
        self._lose("the pool client was closed")

    def _send(self, op: Op, payload: bytes) -> int:
        if self.lost or self.transport is None:
            raise LinkLost("there is no connection to the pool daemon")
        self._number += 1
        self.send(op, self._number, payload)
        return self._number

    async def _answer_to(self, number: int, within_s: float) -> Frame:
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._pending[number] = (future, clock.now_s())
        try:
            async with asyncio.timeout(max(0.0, within_s)):
                return await future
        except (TimeoutError, asyncio.CancelledError):
            if future.done() and not future.cancelled() and future.exception() is None:
                self._give_back(future.result())  # it came in the same moment
            elif number in self._pending:
                self._given_up.add(number)
            raise

    def _handshake(self, frame: Frame) -> None:
        if frame.op is Op.REFUSED:
            raise WireError(f"the pool daemon refused us: {wire.unpack_text(frame.payload)}")
        if self._server_nonce is None and frame.op is Op.CHALLENGE:
            self._server_nonce = frame.payload
            fields = (self._server_nonce, self._nonce, self._instance, self._name)
            proof = wire.client_proof(self._call_key, *fields)
            hello = wire.Hello(self._nonce, self._instance, self._name, tuple(self.writing), proof)
            self._send(Op.HELLO, wire.pack_hello(hello))
            return
        if self._server_nonce is None or frame.op is not Op.WELCOME:
            raise WireError(f"{frame.op.name} has no place in a handshake")
        welcome = wire.unpack_welcome(frame.payload)
        expected = wire.server_proof(self._call_key, self._server_nonce, self._nonce)
        if not hmac.compare_digest(expected, welcome.proof):
            raise WireError("who listens on the socket does not hold our call key")
        self.pin_lease_s = welcome.pin_lease_s
        try:
            self.arena = attach_arena(
                welcome.arena,
                page_bytes=welcome.page_bytes,
                pages=welcome.pages,
                epoch=welcome.epoch,
                instance=self._instance,
            )
        except ArenaGone as exc:
            raise WireError(str(exc)) from exc
        self.stock = Stock(self.arena)
        if not self.welcomed.done():
            self.welcomed.set_result(None)

    def _answered(self, frame: Frame) -> None:
        if frame.op in (Op.REFUSED, Op.ERROR):
            raise WireError(f"the pool daemon refused: {wire.unpack_text(frame.payload)}")
        if frame.request in self._told:
            self._told[frame.request].heard(answered(frame, Op.KEPT))
            del self._told[frame.request]
        future, _ = self._pending.pop(frame.request, (None, 0.0))
        if frame.request in self._given_up:
            self._given_up.discard(frame.request)
            self._give_back(frame)
        elif future is None:
            raise WireError(f"an answer to request {frame.request}, which is not open")
        elif future.done():
            self._give_back(frame)
        else:
            future.set_result(frame)

    def _give_back(self, frame: Frame) -> None:
        if frame.op is Op.RESERVED:
            grants = payloads.unpack_reserved(frame.payload)
            mine = [granted.generation for granted in grants if granted.grant is Grant.RESERVED]
            self.tell(Op.ABORT, payloads.pack_generations(mine))
        elif frame.op is Op.PINNED:
            pin, _, blocks = payloads.unpack_pinned(frame.payload)
            if blocks:
                self.tell(Op.UNPIN, payloads.pack_unpin(pin, 0, corrupt=False))

    def _lose(self, why: str) -> None:
        if self.lost:
            return
        self.lost = True
        self.abort()
        for future, _ in self._pending.values():
            if not future.done():
                future.set_exception(LinkLost(why))
        for told in self._told.values():
            told.unheard()
        self._told.clear()
        self._pending.clear()
        self._given_up.clear()
        if not self.welcomed.done():
            self.welcomed.set_exception(LinkLost(why))


async def open_link(
    path: Path,
    call_key: bytes,
    *,
    instance: bytes,
    name: str,
    writing: frozenset[int],
    within_s: float,
) -> Link:
    """Connect, prove the call key both ways and map the arena. LinkLost if that fails in time."""
    link = Link(call_key, instance, name, writing)
    try:
        async with asyncio.timeout(within_s):
            await asyncio.get_running_loop().create_unix_connection(lambda: link, str(path))
            await link.welcomed
    except (OSError, TimeoutError) as exc:
        raise LinkLost(f"no pool daemon answers on {path}: {exc or 'too late'}") from exc
    finally:
        if link.arena is None:
            link.close()
            if link.welcomed.done() and not link.welcomed.cancelled():
                link.welcomed.exception()  # seen: it is what was raised, or nobody waits
    return link


def answered(frame: Frame, op: Op) -> bytes:
    """The payload of an answer; WireError for one of another kind."""
    if frame.op is not op:
        raise WireError(f"{op.name} was to come, not {frame.op.name}")
    return frame.payload
