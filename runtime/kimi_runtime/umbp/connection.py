"""One engine's connection to the daemon: its handshake, and what is done for each of its requests.

It is an asyncio protocol, not a task: memory answers at once, so a request is handled where it
arrives, and received where it is decoded. Only a PIN of what an SSD or a peer has to bring is
answered later, by a task.
"""

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import socket
from collections.abc import Sequence

from kimi_connect import payloads, wire
from kimi_connect.frames import Frame
from kimi_connect.keeping import (
    STOCK_BLOCKS,
    STOCK_BYTES,
    Keep,
    Kept,
    pack_kept,
    unpack_keep,
)
from kimi_connect.small_puts import SmallBlock, unpack_put
from kimi_connect.wire import Gap, Grant, Granted, Op, Priority, WireError
from kimi_runtime import clock
from kimi_runtime.umbp.clients import Clients
from kimi_runtime.umbp.framed import Framed
from kimi_runtime.umbp.funnel import Lost
from kimi_runtime.umbp.peers import open_peer_process
from kimi_runtime.umbp.pins import PAGES_AN_ANSWER, count_missed, pinned_payload
from kimi_runtime.umbp.putting import put
from kimi_runtime.umbp.retention import Hint

HANDSHAKE_S = 5.0

_COUNTED = {
    *(Op.ABORT, Op.RENEW, Op.UNPIN, Op.REPORT, Op.HINT, Op.DEEPEST),
    *(Op.HELD, Op.TOUCH, Op.USED, Op.SERVED, Op.PUT),
}
"""What is answered with a number."""

_LOOKUPS = {Op.PIN, Op.HELD, Op.QUOTE, Op.DEEPEST}
"""What tells of blocks that are not there."""

log = logging.getLogger(__name__)


class Connection(Framed):
    """One client."""

    def __init__(self, clients: Clients) -> None:
        super().__init__()
        self.number, self.name = clients.next_number(), "a client"
        self.instance: bytes | None = None
        self._clients, self._pool = clients, clients.pool
        self._nonce = secrets.token_bytes(wire.NONCE_BYTES)
        self._hurry: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Challenge the caller."""
        super().connection_made(transport)
        self._clients.opened(self)
        self._hurry = asyncio.get_running_loop().call_later(
            HANDSHAKE_S, self._refuse, f"no HELLO came within {HANDSHAKE_S:.0f} s"
        )
        self.send(Op.CHALLENGE, 0, self._nonce)

    def connection_lost(self, exc: Exception | None) -> None:
        """Give back what it held."""
        if self._hurry is not None:
            self._hurry.cancel()
        if isinstance(exc, OSError) and self.instance is not None:
            self._hear_out()
        self._clients.closed(self)
        self._clients.changed()

    def pause_writing(self) -> None:
        """The client does not read its answers: ask it nothing more."""
        if self.transport is not None:
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        """It reads again."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def buffer_updated(self, nbytes: int) -> None:
        """Handle every frame that is whole, then what that changed for others."""
        super().buffer_updated(nbytes)
        self._clients.changed()
        if self._pool.crowded:
            self._clients.crowded.set()

    def arrived(self, frame: Frame) -> None:
        """Answer it."""
        if self.instance is None:
            self._handshake(frame)
        elif frame.op in _LOOKUPS and self._pool.stocks:
            # what others have told of their stocks by now is read first: they did not wait for it
            asyncio.get_running_loop().call_soon(self._look_up, frame)
        else:
            self._answer(frame)

    def failed(self, error: WireError) -> None:
        """Say why, and close."""
        self._refuse(str(error))

    def open_process(self) -> int | None:
        """A pidfd of the client's process."""
        assert self.transport is not None
        return open_peer_process(self.transport.get_extra_info("socket"))

    def _hear_out(self) -> None:
        """Handle what a client had told before it hung up: a transport reads no more once an answer
        to it could not be sent.
        """
        assert self.transport is not None
        ours = self.transport.get_extra_info("socket").fileno()
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(ours)) as rest:
            while count := rest.recv_into(self._decoder.room()):
                super().buffer_updated(count)

    def _look_up(self, frame: Frame) -> None:
        if self.instance is None:
            return  # it hung up meanwhile
        try:
            self._answer(frame)
        except WireError as exc:
            self.failed(exc)
        self._clients.changed()

    def _refuse(self, why: str) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        self._clients.refused += 1
        log.warning("umbp: refused %s: %s", self.name, why)
        self.send(Op.REFUSED, 0, wire.pack_text(why))
        self.transport.close()

    def _handshake(self, frame: Frame) -> None:
        if frame.op is not Op.HELLO:
            raise WireError("the first frame must be HELLO")
        hello = wire.unpack_hello(frame.payload)
        fields = (self._nonce, hello.nonce, hello.instance, hello.name)
        call_key = None
        for candidate in self._clients.call_keys:
            if hmac.compare_digest(wire.client_proof(candidate, *fields), hello.proof):
                call_key = candidate
        if call_key is None:
            raise WireError("the proof does not match this deployment's call key")
        if self._hurry is not None:
            self._hurry.cancel()
        self.name = hello.name or self.name
        self._clients.welcomed(self, hello)
        welcome = wire.Welcome(
            proof=wire.server_proof(call_key, self._nonce, hello.nonce),
            epoch=self._clients.arena.epoch,
            page_bytes=self._pool.page_bytes,
            pages=self._pool.total_pages,
            pin_lease_s=self._pool.pin_lease_s,
            reservation_ttl_s=self._pool.reservation_ttl_s,
            arena=self._clients.arena_path,
        )
        self.send(Op.WELCOME, frame.request, wire.pack_welcome(welcome))

    def _answer(self, frame: Frame) -> None:
        op, request, payload = frame
        match op:
            case Op.RESERVE:
                self.send(Op.RESERVED, request, self._reserve(payload))
            case Op.COMMIT:
                self.send(Op.COMMITTED, request, self._commit(payload))
            case Op.KEEP:
                self.send(Op.KEPT, request, self._keep(unpack_keep(payload)))
            case Op.PIN:
                self._pin(request, payload)
            case Op.QUOTE:
                self.send(Op.QUOTED, request, self._quote(*payloads.unpack_quote(payload)))
            case _ if op in _COUNTED:
                self.send(Op.COUNT, request, payloads.pack_number(self._count(op, payload)))
            case _:
                raise WireError(f"a client may not send {op.name}")

    def _count(self, op: Op, payload: bytes) -> int:
        now_s = clock.now_s()
        if op in (Op.HELD, Op.TOUCH, Op.USED, Op.SERVED):
            return self._run(op, payloads.unpack_keys(payload))
        if op is Op.DEEPEST:
            return self._clients.deepest(*payloads.unpack_deepest(payload))
        if op is Op.PUT:
            return self._put(*unpack_put(payload))
        if op is Op.HINT:
            return self._hint(payloads.unpack_hint(payload))
        if op is Op.RENEW:
            pin = payloads.unpack_number(payload)
            return int(self._pool.renew(pin, reader=self.number, now_s=now_s))
        if op is Op.UNPIN:
            return int(self._unpin(payload))
        if op is Op.ABORT:
            assert self.instance is not None
            return self._pool.abort(payloads.unpack_generations(payload), writer=self.instance)
        unavailable, _ = payloads.unpack_report(payload)
        self._pool.funnel.unreachable(unavailable)  # late ones: their own request is counted
        return 1

    def _reserve(self, payload: bytes) -> bytes:
        assert self.instance is not None
        items: list[tuple[bytes, int]] = []
        pages = 0
        asked, tenant, priority = payloads.unpack_reserve(payload)
        for key, size in asked:
            pages += -(-size // self._pool.page_bytes)
            if items and pages > PAGES_AN_ANSWER:
                break
            items.append((key, size))
        if self._clients.draining:
            grants = [Granted(Grant.HELD if self._pool.held([k]) else Grant.FULL) for k, _ in items]
        else:
            grants = self._pool.reserve(
                items,
                writer=self.instance,
                now_s=clock.now_s(),
                tenant=tenant,
                priority=priority,
                as_one=True,
            )
        return payloads.pack_reserved(grants)

    def _put(self, blocks: Sequence[SmallBlock], tenant: str, priority: Priority) -> int:
        if self._clients.draining:
            return self._pool.held([block.key for block in blocks])
        return put(
            self._pool,
            self._clients.arena,
            blocks,
            tenant=tenant,
            priority=priority,
            now_s=clock.now_s(),
        )

    def _keep(self, keep: Keep) -> bytes:
        assert self.instance is not None
        pool, writer, at_s = self._pool, self.instance, clock.now_s()
        pool.abort(keep.returned, writer=writer)
        pool.keep(keep.blocks, writer=writer, now_s=at_s, priority=keep.priority)
        granted: list[Granted] = []
        if keep.wish.blocks and not self._clients.draining:
            size, left = keep.wish.size, STOCK_BYTES - pool.stock_of(writer) * pool.page_bytes
            most = min(STOCK_BLOCKS, max(0, left) // -(-size // pool.page_bytes * pool.page_bytes))
            asked = min(keep.wish.blocks, most)
            granted = pool.stock(asked, size, writer=writer, now_s=at_s, tenant=keep.tenant)
        return pack_kept(Kept(self._clients.arena.revoked, granted))

    def _commit(self, payload: bytes) -> bytes:
        assert self.instance is not None
        blocks = payloads.unpack_commit(payload)
        states = self._pool.commit(blocks, writer=self.instance, now_s=clock.now_s())
        return payloads.pack_committed(states)

    def _run(self, op: Op, keys: list[bytes]) -> int:
        if op is Op.HELD:
            return self._clients.held(keys)
        if op is Op.SERVED:
            self._pool.funnel.served(keys)
            self._pool.ghosts.asked(keys, len(keys), lambda key: True)
        if op is not Op.TOUCH:
            self._use(keys)
        return self._pool.touch(keys, clock.now_s())

    def _use(self, keys: list[bytes]) -> None:
        self._pool.use(keys, clock.now_s())
        if self._clients.second is not None:
            self._clients.second.used(keys)

    def _hint(self, told: payloads.HintFields) -> int:
        hint = Hint(
            tenant=told.tenant,
            session=told.session,
            kind=told.kind,
            keys=told.keys,
            expected_s=told.expected_s,
            child=told.child,
        )
        return self._pool.hint(hint, clock.now_s())

    def _pin(self, request: int, payload: bytes) -> None:
        keys, within_s, tenant = payloads.unpack_pin(payload)
        second, remote = self._clients.second, self._clients.remote

        def answer(gap: Gap) -> None:
            if self.instance is None:
                return  # it hung up meanwhile: nothing would end its pin
            run = self._pool.held(keys)
            pinned = pinned_payload(
                self._pool,
                keys,
                reader=self.number,
                elsewhere=self._clients.elsewhere,
                failure=gap,
                more=gap is Gap.NONE and self._clients.lacks(keys),
            )
            self.send(Op.PINNED, request, pinned)
            self._use(keys[:run])

        for tier in (second, remote):
            if tier is not None and tier.help(keys, answer, within_s=within_s, tenant=tenant):
                return
        answer(Gap.MISS)

    def _quote(self, keys: Sequence[bytes], block_bytes: int) -> bytes:
        """QUOTED's payload. What is not quoted is asked for by nobody, and so is lost here."""
        quoted = self._clients.quote(keys, block_bytes)
        found = sum(stretch.blocks for stretch in quoted)
        count_missed(self._pool, keys[found:], 0, Gap.MISS, self._clients.elsewhere)
        return payloads.pack_quoted(quoted)

    def _unpin(self, payload: bytes) -> bool:
        pin, good, corrupt = payloads.unpack_unpin(payload)
        bad = [good] if corrupt else []
        held = self._pool.unpin(pin, bad, reader=self.number, now_s=clock.now_s())
        rest = Lost.CORRUPT if held and corrupt else Lost.LATE
        self._pool.funnel.read(pin, good if held else 0, rest)
        return held
