"""A blocking pool client, for use inside other engines' processes.

The same protocol and promises as the runtime's asynchronous client: bytes are verified after they
were copied, a missing daemon is an outcome and no exception, and a deadline ends every wait. One
connection; calls from several threads take turns. A forked child must make its own client.
"""

import os
import threading
from collections.abc import Sequence

from kimi_connect import payloads, wire
from kimi_connect.batches import Batches
from kimi_connect.blocks import check_store, intact_run
from kimi_connect.borrowing import Borrowed
from kimi_connect.connection import ANSWER_S, Lost, Reconnecting, Stopper, now_s
from kimi_connect.payloads import DEFAULT_TENANT
from kimi_connect.placing import Placed, Written
from kimi_connect.storing import Stored, Storing
from kimi_connect.tags import Leaves, numpy_leaves
from kimi_connect.wire import (
    Commitment,
    Gap,
    Grant,
    HintKind,
    Op,
    Outcome,
    Priority,
)

KEYS_A_CALL = 256

SERVED_KEYS, SERVED_S = 256, 0.05
"""Blocks taken from the arena that the daemon is told of together, and how late at most."""


class ArenaClient:
    """Loads and stores blocks of a node's pool.

    `group_bytes` are the sizes of a block's layer groups, one tag each; empty: one tag a block.
    `leaves` is the leaf function of the tags; None takes numpy's (ImportError without numpy). The
    runtime's `kimi_runtime.umbp.tags.leaves` is the same function in C, and tens of times faster.
    `threads` copy and tag large batches together, the caller's own included.
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
        threads: int = 1,
    ) -> None:
        self._group_bytes = tuple(group_bytes)
        self._leaves = leaves or numpy_leaves()
        self._batches = Batches(threads, self._group_bytes, self._leaves)
        self._lock = threading.Lock()
        self._daemon = Reconnecting(os.fspath(socket_path), call_key, name, connect_s)
        self._storing = Storing(self._daemon, self._batches, self._group_bytes, self._leaves)
        self._served: list[bytes] = []
        self._served_s = 0.0

    def held(self, keys: Sequence[bytes], *, deadline_s: float = 1.0) -> int:
        """Length of the leading run the pool holds; 0 without a daemon. Renews nothing."""
        ends_s, run = now_s() + deadline_s, 0
        with self._lock:
            while run < len(keys):
                part = list(keys[run : run + wire.MAX_KEYS])
                try:
                    count = self._daemon.number(Op.HELD, payloads.pack_keys(part), ends_s)
                except (Lost, TimeoutError):
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
        ends_s = now_s() + deadline_s
        outcome = Outcome.HIT
        with self._lock:
            done = self._load_local(keys, into, ends_s)
            while done < len(keys) and outcome is Outcome.HIT:
                part = slice(done, done + KEYS_A_CALL)
                count, outcome = self._load_part(keys[part], into[part], ends_s, tenant)
                done += count
            if done > KEYS_A_CALL:
                self._tell(Op.TOUCH, keys[:done])
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
        ends_s, done = now_s() + deadline_s, 0
        part = Stored(0, 0, 0)
        with self._lock:
            while done < len(keys):
                some = slice(done, done + KEYS_A_CALL)
                try:
                    part = self._storing.part(keys[some], blocks[some], ends_s, tenant, priority)
                except (Lost, TimeoutError):
                    break
                done += part.kept
                if part.kept < part.asked or not part.asked:
                    break
            if done > part.fresh:
                self._tell(Op.TOUCH, keys[:done])
        return done

    def place(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        *,
        deadline_s: float,
        tenant: str = DEFAULT_TENANT,
        priority: Priority = Priority.NORMAL,
    ) -> Placed:
        """Pages for blocks of `sizes` bytes that the caller writes where they lie, then commits.

        For who would only copy once more, such as a device that writes host memory. At most
        `KEYS_A_CALL` blocks at a time; without a daemon, or without room, there are fewer or none.
        """
        if len(keys) != len(sizes):
            raise ValueError(f"{len(keys)} keys for {len(sizes)} sizes")
        keys, sizes = keys[:KEYS_A_CALL], sizes[:KEYS_A_CALL]
        asked = payloads.pack_reserve(list(zip(keys, sizes, strict=True)), tenant, priority)
        with self._lock:
            try:
                payload = self._daemon.call(Op.RESERVE, asked, Op.RESERVED, now_s() + deadline_s)
                arena = self._daemon.live_arena()
            except (Lost, TimeoutError):
                return Placed(self._finish, (), (), (), None, self._group_bytes, self._leaves)
            grants = payloads.unpack_reserved(payload)
            self._daemon.writing |= {
                one.generation for one in grants if one.grant is Grant.RESERVED
            }
        run = slice(len(grants))
        return Placed(
            self._finish, keys[run], sizes[run], grants, arena, self._group_bytes, self._leaves
        )

    def lend(
        self, keys: Sequence[bytes], *, deadline_s: float, tenant: str = DEFAULT_TENANT
    ) -> Borrowed:
        """The leading run of `keys` where it lies in the arena, checked there, to be given back.

        At most `KEYS_A_CALL` blocks at a time: what is lent can't be evicted.
        """
        keys, ends_s = keys[:KEYS_A_CALL], now_s() + deadline_s
        with self._lock:
            try:
                asked = payloads.pack_pin(list(keys), deadline_s, tenant)
                payload = self._daemon.call(Op.PIN, asked, Op.PINNED, ends_s)
                pin, gap, blocks = payloads.unpack_pinned(payload)
                arena, lease_s = self._daemon.live_arena(), self._daemon.lease_s()
                if not blocks:
                    missed = Outcome.MISS if gap is Gap.NONE else wire.outcome_of(gap)
                    return Borrowed(None, 0, [], missed, 0.0)
                stop = self._stop(ends_s, renew=pin)
                parts, corrupt = intact_run(arena, keys, blocks, self._leaves, stop)
            except TimeoutError:
                return Borrowed(None, 0, [], Outcome.LATE, 0.0)
            except Lost:
                return Borrowed(None, 0, [], Outcome.UNAVAILABLE, 0.0)
        outcome = Outcome.CORRUPT if corrupt else wire.outcome_of(gap)
        if not corrupt and len(parts) < len(blocks):
            outcome = Outcome.LATE
        return Borrowed(self._of_pin, pin, parts, outcome, lease_s)

    def _of_pin(self, op: Op, payload: bytes, within_s: float) -> bool:
        """Renew or end a pin; False if it has lapsed or nobody can be asked."""
        with self._lock:
            try:
                return self._daemon.number(op, payload, now_s() + within_s) == 1
            except (Lost, TimeoutError):
                return False

    def _finish(
        self,
        written: "list[Written]",
        given_up: "list[int]",
        within_s: float,
    ) -> "list[Commitment]":
        """Commit and abort what was placed: nobody writes to any of it any more."""
        with self._lock:
            self._daemon.writing -= {generation for generation, _ in written}
            self._daemon.writing -= set(given_up)
            ends_s = now_s() + within_s
            try:
                states: list[Commitment] = []
                if written:
                    asked = payloads.pack_commit(written)
                    payload = self._daemon.call(Op.COMMIT, asked, Op.COMMITTED, ends_s)
                    states = payloads.unpack_committed(payload)
                if given_up:
                    self._daemon.number(Op.ABORT, payloads.pack_generations(given_up), ends_s)
            except (Lost, TimeoutError):
                return [Commitment.EXPIRED] * len(written)
        return states

    def prefault(self) -> None:
        """Map the whole arena now, so that no put or get has to; nothing without a daemon."""
        self.held([b"\0" * wire.KEY_BYTES])
        arena = self._daemon.arena
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
                self._daemon.number(Op.HINT, payload, now_s() + ANSWER_S)
            except (Lost, TimeoutError):
                return

    def close(self) -> None:
        """End the connection; pins and reservations end with it."""
        with self._lock:
            if self._daemon.connected:
                self._tell_served()
            self._daemon.finish(now_s() + ANSWER_S)
            self._daemon.close()
        self._batches.close()

    def _load_local(self, keys: Sequence[bytes], into: Sequence[memoryview], ends_s: float) -> int:
        """How many leading blocks came from the arena without the daemon."""
        if self._daemon.arena is None or not self._daemon.arena.live:
            return 0
        done = self._batches.copy_local(self._daemon.arena, keys, into, ends_s)
        if done:
            self._served_s = self._served_s if self._served else now_s()
            self._served += keys[:done]
            if len(self._served) >= SERVED_KEYS or now_s() - self._served_s >= SERVED_S:
                self._tell_served()
        return done

    def _tell_served(self) -> None:
        served, self._served = self._served, []
        self._tell(Op.SERVED, served)

    def _load_part(
        self, keys: Sequence[bytes], into: Sequence[memoryview], ends_s: float, tenant: str
    ) -> "tuple[int, Outcome]":
        try:
            asked = payloads.pack_pin(list(keys), ends_s - now_s(), tenant)
            payload = self._daemon.call(Op.PIN, asked, Op.PINNED, ends_s)
            pin, gap, blocks = payloads.unpack_pinned(payload)
            if not blocks:
                return 0, wire.outcome_of(gap) if gap is not Gap.NONE else Outcome.MISS
            stop, arena = self._stop(ends_s, renew=pin), self._daemon.live_arena()
            copied = self._batches.copy_out(arena, keys, blocks, into, stop, ends_s)
            unpin = payloads.pack_unpin(pin, copied.good, corrupt=copied.corrupt is not None)
            protected = self._daemon.number(Op.UNPIN, unpin, max(ends_s, now_s() + ANSWER_S))
        except TimeoutError:
            return 0, Outcome.LATE
        except Lost:
            return 0, Outcome.UNAVAILABLE
        except BaseException:
            self._daemon.drop()  # ends the pin
            raise
        if not protected:
            return 0, Outcome.LATE
        if copied.corrupt is not None:
            return copied.good, Outcome.CORRUPT
        if copied.good < len(blocks):
            return copied.good, Outcome.LATE
        return copied.good, wire.outcome_of(gap)

    def _tell(self, op: Op, keys: Sequence[bytes]) -> None:
        """What nobody waits for an answer to, the last keys first: the head is to be warmest."""
        try:
            for start in reversed(range(0, len(keys), wire.MAX_KEYS)):
                part = list(keys[start : start + wire.MAX_KEYS])
                self._daemon.tell(op, payloads.pack_keys(part), now_s() + ANSWER_S)
        except (Lost, TimeoutError):
            return

    def _stop(self, ends_s: float, renew: "int | None" = None) -> Stopper:
        return Stopper(self._daemon, ends_s, renew)
