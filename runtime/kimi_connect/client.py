"""A blocking pool client, for use inside other engines' processes.

The same protocol and promises as the runtime's asynchronous client: bytes are verified after they
were copied, a missing daemon is an outcome and no exception, and a deadline ends every wait. One
connection; calls from several threads take turns. A forked child must make its own client.
"""

import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence

from kimi_connect import payloads, wire
from kimi_connect.arena import Arena, ArenaGone, attach_arena
from kimi_connect.blocks import check_store, copy_in, copy_local, copy_out, flat
from kimi_connect.payloads import DEFAULT_TENANT
from kimi_connect.tags import Leaves, numpy_leaves
from kimi_connect.wire import Commitment, Gap, Grant, HintKind, Op, Outcome, Priority

BACKOFF_S = (0.05, 2.0)
ANSWER_S = 0.25
"""Time given to end what was begun (unpin, commit) when the deadline is near or over."""

KEYS_A_CALL = 256

SERVED_KEYS, SERVED_S = 256, 0.05
"""Blocks taken from the arena that the daemon is told of together, and how late at most."""

_now_s = time.monotonic  # noqa: TID251  (nothing of the runtime, its clock included, is here)


class _Lost(Exception):
    """There is no connection, or not any more."""


class _Connection:
    """One authenticated connection and its arena. Any error ends it."""

    def __init__(self, path: str, call_key: bytes, instance: bytes, name: str, ends_s: float):
        self._decoder = wire.FrameDecoder()
        self._number = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._wait_until(ends_s)
            self._socket.connect(path)
            self.welcome = self._handshake(call_key, instance, name, ends_s)
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

    def call(self, op: Op, payload: bytes, answer: Op, ends_s: float) -> bytes:
        """The payload of the answer to a request."""
        self._number += 1
        self._send(op, self._number, payload, ends_s)
        frame = self._receive(ends_s)
        if frame.op is not answer or frame.request != self._number:
            raise wire.WireError(f"{answer.name} was to come, not {frame.op.name}")
        return frame.payload

    def close(self) -> None:
        """End the connection; what it held ends with it."""
        self._socket.close()

    def _handshake(
        self, call_key: bytes, instance: bytes, name: str, ends_s: float
    ) -> wire.Welcome:
        challenge = self._receive(ends_s)
        if challenge.op is not Op.CHALLENGE:
            raise wire.WireError("the daemon did not begin with a challenge")
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        proof = wire.client_proof(call_key, challenge.payload, nonce, instance, name)
        # this client copies in the calling thread, so nothing is being written between its calls
        hello = wire.Hello(nonce, instance, name, (), proof)
        self._send(Op.HELLO, 0, wire.pack_hello(hello), ends_s)
        frame = self._receive(ends_s)
        if frame.op is not Op.WELCOME:
            raise wire.WireError(f"the daemon refused us ({frame.op.name})")
        welcome = wire.unpack_welcome(frame.payload)
        expected = wire.server_proof(call_key, challenge.payload, nonce)
        if not hmac.compare_digest(expected, welcome.proof):
            raise wire.WireError("who listens on the socket does not hold our call key")
        return welcome

    def _send(self, op: Op, request: int, payload: bytes, ends_s: float) -> None:
        self._wait_until(ends_s)
        self._socket.sendall(wire.frame(op, request, payload))

    def _receive(self, ends_s: float) -> wire.Frame:
        while True:
            frame = self._decoder.next()
            if frame is not None:
                if frame.op in (Op.REFUSED, Op.ERROR):
                    raise wire.WireError(f"the daemon refused: {wire.unpack_text(frame.payload)}")
                return frame
            self._wait_until(ends_s)
            data = self._socket.recv(1 << 18)
            if not data:
                raise _Lost("the pool daemon closed the connection")
            self._decoder.feed(data)

    def _wait_until(self, ends_s: float) -> None:
        left_s = ends_s - _now_s()
        if left_s <= 0:
            raise TimeoutError("the deadline passed while waiting for the pool daemon")
        self._socket.settimeout(left_s)


class ArenaClient:
    """Loads and stores blocks of a node's pool.

    `group_bytes` are the sizes of a block's layer groups, one tag each; empty: one tag a block.
    `leaves` is the leaf function of the tags; None takes numpy's (ImportError without numpy). The
    runtime's `kimi_runtime.umbp.tags.leaves` is the same function in C, and tens of times faster.
    """

    def __init__(
        self,
        socket_path: "str | os.PathLike[str]",
        call_key: bytes,
        *,
        name: str = "engine",
        group_bytes: Sequence[int] = (),
        leaves: "Leaves | None" = None,
        connect_s: float = 1.0,
    ) -> None:
        self._path, self._call_key, self._name = os.fspath(socket_path), call_key, name
        self._group_bytes = tuple(group_bytes)
        self._leaves = leaves or numpy_leaves()
        self._connect_s = connect_s
        self._instance = secrets.token_bytes(16)
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
        self._arena: Arena | None = None
        self._served: list[bytes] = []
        self._served_s = 0.0
        self._retry_s, self._backoff_s = 0.0, BACKOFF_S[0]
        self._closed = False

    def held(self, keys: Sequence[bytes], *, deadline_s: float = 1.0) -> int:
        """Length of the leading run the pool holds; 0 without a daemon. Renews nothing."""
        ends_s, run = _now_s() + deadline_s, 0
        with self._lock:
            while run < len(keys):
                part = list(keys[run : run + wire.MAX_KEYS])
                try:
                    count = self._number(Op.HELD, payloads.pack_keys(part), ends_s)
                except (_Lost, TimeoutError):
                    return run
                run += count
                if count < len(part):
                    break
        return run

    def load(
        self,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        *,
        deadline_s: float,
        tenant: str = DEFAULT_TENANT,
    ) -> "tuple[int, Outcome]":
        """Copy the leading run into `into`, one writable view per key, verified after the copy.

        Returns the run's length and why it ended. ValueError if the lengths differ.
        """
        if len(keys) != len(into):
            raise ValueError(f"{len(keys)} keys for {len(into)} targets")
        ends_s = _now_s() + deadline_s
        outcome = Outcome.HIT
        with self._lock:
            done = self._load_local(keys, into, ends_s)
            while done < len(keys) and outcome is Outcome.HIT:
                part = slice(done, done + KEYS_A_CALL)
                count, outcome = self._load_part(keys[part], into[part], ends_s, tenant)
                done += count
            if done > KEYS_A_CALL:
                self._touch(keys[:done])
        return done, outcome

    def store(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[memoryview],
        *,
        deadline_s: float,
        tenant: str = DEFAULT_TENANT,
        priority: Priority = Priority.NORMAL,
    ) -> int:
        """Put blocks, evicting colder ones; how many leading ones the pool holds now."""
        check_store(keys, blocks, self._group_bytes)
        ends_s, done, mine = _now_s() + deadline_s, 0, 0
        with self._lock:
            while done < len(keys):
                part = slice(done, done + KEYS_A_CALL)
                try:
                    asked, kept, mine = self._store_part(
                        keys[part], blocks[part], ends_s, tenant, priority
                    )
                except (_Lost, TimeoutError):
                    break
                done += kept
                if kept < asked or not asked:
                    break
            if done > mine:  # what one commit made visible is in order already
                self._touch(keys[:done])
        return done

    def prefault(self) -> None:
        """Map the whole arena now, so that no put or get has to; nothing without a daemon."""
        self.held([b"\0" * wire.KEY_BYTES])
        arena = self._arena
        if arena is not None:
            arena.prefault()

    def used(self, keys: Sequence[bytes]) -> None:
        """These were found in the engine's own memory: they are worth keeping in the pool too."""
        with self._lock:
            self._tell(Op.USED, keys)

    def hint(
        self,
        session: bytes,
        kind: HintKind,
        keys: Sequence[bytes] = (),
        *,
        expected_s: "float | None" = None,
        child: bytes = b"",
        tenant: str = DEFAULT_TENANT,
    ) -> None:
        """Tell the pool where a session stands; nothing happens without a connection.

        `session` and `child` are 16 bytes (ValueError). ACTIVE and PAUSED name all blocks of the
        session, or none if they are those told before; COMPACTED those it gives up; FORKED those
        that `child` goes on from, or none for all. `expected_s` is how long a pause is to take.
        """
        fields = payloads.HintFields(session, kind, list(keys), expected_s, child, tenant)
        payload = payloads.pack_hint(fields)
        with self._lock:
            try:
                self._number(Op.HINT, payload, _now_s() + ANSWER_S)
            except (_Lost, TimeoutError):
                return

    def close(self) -> None:
        """End the connection; pins and reservations end with it."""
        with self._lock:
            if self._connection is not None:
                self._tell_served()
            self._closed = True
            self._arena = None
            self._drop()

    def _load_local(self, keys: Sequence[bytes], into: Sequence[memoryview], ends_s: float) -> int:
        """How many leading blocks came from the arena without the daemon."""
        if self._arena is None or not self._arena.live:
            return 0
        done = copy_local(self._arena, keys, into, self._leaves, lambda: _now_s() >= ends_s)
        if done:
            self._served_s = self._served_s if self._served else _now_s()
            self._served += keys[:done]
            if len(self._served) >= SERVED_KEYS or _now_s() - self._served_s >= SERVED_S:
                self._tell_served()
        return done

    def _tell_served(self) -> None:
        served, self._served = self._served, []
        self._tell(Op.SERVED, served)

    def _load_part(
        self, keys: Sequence[bytes], into: Sequence[memoryview], ends_s: float, tenant: str
    ) -> "tuple[int, Outcome]":
        try:
            asked = payloads.pack_pin(list(keys), ends_s - _now_s(), tenant)
            payload = self._call(Op.PIN, asked, Op.PINNED, ends_s)
            pin, gap, blocks = payloads.unpack_pinned(payload)
            if not blocks:
                return 0, wire.outcome_of(gap) if gap is not Gap.NONE else Outcome.MISS
            stop = self._stop(ends_s, renew=pin)
            copied = copy_out(self._live_arena(), keys, blocks, into, self._leaves, stop)
            unpin = payloads.pack_unpin(pin, copied.good, corrupt=copied.corrupt is not None)
            protected = self._number(Op.UNPIN, unpin, max(ends_s, _now_s() + ANSWER_S))
        except TimeoutError:
            return 0, Outcome.LATE
        except _Lost:
            return 0, Outcome.UNAVAILABLE
        except BaseException:
            self._drop()  # ends the pin
            raise
        if not protected:
            return 0, Outcome.LATE
        if copied.corrupt is not None:
            return copied.good, Outcome.CORRUPT
        if copied.good < len(blocks):
            return copied.good, Outcome.LATE
        return copied.good, wire.outcome_of(gap)

    def _store_part(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[memoryview],
        ends_s: float,
        tenant: str,
        priority: Priority,
    ) -> "tuple[int, int, int]":
        """How many keys were asked for, how many leading ones are kept, how many were put now."""
        views = [flat(block) for block in blocks]
        items = [(key, view.nbytes) for key, view in zip(keys, views, strict=True)]
        asked = payloads.pack_reserve(items, tenant, priority)
        payload = self._call(Op.RESERVE, asked, Op.RESERVED, ends_s)
        grants = payloads.unpack_reserved(payload)
        mine = [n for n, granted in enumerate(grants) if granted.grant is Grant.RESERVED]
        try:
            written = copy_in(
                self._live_arena(),
                [keys[n] for n in mine],
                [grants[n] for n in mine],
                [views[n] for n in mine],
                self._group_bytes,
                self._leaves,
                self._stop(ends_s),
            )
        except BaseException:
            self._drop()  # the daemon frees what was reserved when we are back
            raise
        answer_s = max(ends_s, _now_s() + ANSWER_S)
        payload = self._call(Op.COMMIT, payloads.pack_commit(written), Op.COMMITTED, answer_s)
        states = payloads.unpack_committed(payload)
        unwritten = [grants[n].generation for n in mine[len(written) :]]
        if unwritten:
            self._number(Op.ABORT, payloads.pack_generations(unwritten), answer_s)
        kept = {n for n, granted in enumerate(grants) if granted.grant is Grant.HELD}
        fresh = {n for n, s in zip(mine, states, strict=False) if s is not Commitment.EXPIRED}
        kept |= fresh
        run = next((n for n in range(len(grants)) if n not in kept), len(grants))
        return len(grants), run, len(fresh)

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Keep the head of a chain warmer than what hangs on it."""
        self._tell(Op.TOUCH, keys)

    def _tell(self, op: Op, keys: Sequence[bytes]) -> None:
        try:
            for start in reversed(range(0, len(keys), wire.MAX_KEYS)):
                part = list(keys[start : start + wire.MAX_KEYS])
                self._number(op, payloads.pack_keys(part), _now_s() + ANSWER_S)
        except (_Lost, TimeoutError):
            return

    def _stop(self, ends_s: float, renew: "int | None" = None) -> "_Stopper":
        assert self._connection is not None
        lease_s = self._connection.welcome.pin_lease_s
        return _Stopper(self, ends_s, renew, lease_s / 3)

    def _live_arena(self) -> Arena:
        if self._connection is None:
            raise _Lost("there is no connection to the pool daemon")
        return self._connection.arena

    def _number(self, op: Op, payload: bytes, ends_s: float) -> int:
        return payloads.unpack_number(self._call(op, payload, Op.COUNT, ends_s))

    def _call(self, op: Op, payload: bytes, answer: Op, ends_s: float) -> bytes:
        """One request. _Lost and TimeoutError leave no connection, so nothing is held there."""
        try:
            return self._connected(ends_s).call(op, payload, answer, ends_s)
        except TimeoutError:
            self._drop()
            raise
        except (OSError, wire.WireError, ArenaGone) as exc:
            self._drop()
            raise _Lost(str(exc)) from exc
        except BaseException:
            self._drop()
            raise

    def _connected(self, ends_s: float) -> _Connection:
        if self._connection is not None:
            return self._connection
        if self._closed or _now_s() < self._retry_s:
            raise _Lost("the pool daemon could not be reached a moment ago")
        ends_s = min(ends_s, _now_s() + self._connect_s)
        try:
            self._connection = _Connection(
                self._path, self._call_key, self._instance, self._name, ends_s
            )
        except (OSError, wire.WireError, ArenaGone, _Lost) as exc:
            self._retry_s = _now_s() + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, BACKOFF_S[1])
            raise _Lost(f"no pool daemon answers on {self._path}: {exc}") from exc
        self._backoff_s = BACKOFF_S[0]
        self._arena = self._connection.arena
        return self._connection

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _Stopper:
    """Looked at between pieces of a copy: ends it at the deadline, and renews its pin meanwhile."""

    def __init__(self, client: ArenaClient, ends_s: float, pin: "int | None", every_s: float):
        self._client, self._ends_s = client, ends_s
        self._pin, self._every_s = pin, every_s
        self._renew_s = _now_s() + every_s

    def __call__(self) -> bool:
        now_s = _now_s()
        if now_s >= self._ends_s:
            return True
        if self._pin is not None and now_s >= self._renew_s:
            self._renew_s = now_s + self._every_s
            answer_s = now_s + ANSWER_S
            self._client._number(Op.RENEW, payloads.pack_number(self._pin), answer_s)
        return False
