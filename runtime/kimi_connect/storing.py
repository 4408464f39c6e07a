"""Putting a part of what a client stores: into its stock, or by asking the daemon.

What lies in the stock is told the daemon without waiting for its answer, which brings the pages of
a later put: it reads what was told before it says of any block that it is not there. Where there is
no stock, small blocks travel inside their PUT; others have pages reserved, are written there, and
committed.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kimi_connect import payloads, small_puts
from kimi_connect.batches import Batches
from kimi_connect.blocks import Place, flat
from kimi_connect.connection import ANSWER_S, Connection, Lost, Reconnecting, now_s
from kimi_connect.keeping import Filled, Keep, pack_keep, unpack_kept
from kimi_connect.stock import Kind
from kimi_connect.tags import Leaves
from kimi_connect.wire import Commitment, Grant, Granted, Op, Priority

PART_BYTES = 16 << 20
"""Of a large put that are copied before the daemon is told of them."""


class Stored(NamedTuple):
    """What became of a part: keys asked for, leading ones the pool holds now, and of those put now.

    `fresh` ones were made visible together, and so are in order already.
    """

    asked: int
    kept: int
    fresh: int


def stored(grants: Sequence[Granted], states: Sequence[Commitment]) -> Stored:
    """Of what RESERVE granted and COMMIT said of the leading reserved ones, which were written."""
    left = iter(states)
    run = fresh = 0
    whole = True
    for granted in grants:
        held = granted.grant is Grant.HELD
        if granted.grant is Grant.RESERVED:
            held = next(left, Commitment.EXPIRED) is not Commitment.EXPIRED
            fresh += held
        whole &= held
        run += whole
    return Stored(len(grants), run, fresh)


class _IntoStock:
    """One put into a connection's stock."""

    def __init__(
        self,
        connection: Connection,
        batches: Batches,
        tenant: str,
        priority: Priority,
        blocks: int,
    ) -> None:
        self.told = 0
        """How often the daemon was told of blocks."""
        self._connection, self._batches = connection, batches
        self._tenant, self._priority, self._blocks = tenant, priority, blocks

    def put(self, keys: Sequence[bytes], views: Sequence[memoryview], ends_s: float) -> int:
        """How many leading blocks lie in the stock, or were there before, when this ends."""
        done = 0
        while done < len(keys):
            kind = (self._tenant, views[done].nbytes)
            if not self._connection.stock.has(kind, len(keys) - done):
                self._connection.hear_what_came()
            part = self._part(keys, views, done, ends_s)
            if not part:
                break
            self._tell(part, kind)
            done += len(part)
        return done

    def ask(self, connection: Connection, size: int) -> None:
        """Have a stock for a later put like this one."""
        self._connection = connection
        self._tell([], (self._tenant, size))

    def _part(
        self, keys: Sequence[bytes], views: Sequence[memoryview], start: int, ends_s: float
    ) -> "list[Filled]":
        """The next blocks of one size: copied, or found to be there. None without a stock."""
        size, arena = views[start].nbytes, self._connection.arena
        most, end, held = min(len(keys), start + max(1, PART_BYTES // size)), start, start
        while end < most and views[end].nbytes == size:
            end += 1
        # a chain is there from its head on: who lacks one block lacks those behind it
        while held < end and arena.directory.lists(keys[held]):
            held += 1
        places = self._connection.stock.take((self._tenant, size), end - held)
        copying = slice(held, held + len(places))
        written = self._batches.fill(keys[copying], places, views[copying], ends_s)
        self._connection.stock.put_back(places[len(written) :])
        there = [Filled(key, 0) for key in keys[start:held]]
        return there + [Filled(key, *one) for key, one in zip(keys[copying], written, strict=False)]

    def _tell(self, part: "list[Filled]", kind: Kind) -> None:
        stock, ends_s = self._connection.stock, now_s() + ANSWER_S
        wish = stock.wish(kind, self._blocks, now_s())
        keep = Keep(part, self._tenant, self._priority, wish, stock.returned())
        if not (part or wish.blocks or keep.returned):
            return
        self._connection.tell(
            Op.KEEP,
            pack_keep(keep),
            Op.KEPT,
            lambda payload: stock.answered(kind, wish, unpack_kept(payload), now_s()),
            ends_s,
        )
        self.told += bool(part)


class Storing:
    """Stores by a connection, whose owner sees to it that one thread at a time does."""

    def __init__(
        self,
        daemon: Reconnecting,
        batches: Batches,
        group_bytes: Sequence[int],
        leaves: Leaves,
    ) -> None:
        self._daemon, self._batches = daemon, batches
        self._group_bytes, self._leaves = group_bytes, leaves

    def part(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[memoryview],
        ends_s: float,
        tenant: str,
        priority: Priority,
    ) -> Stored:
        """Put blocks until one does not fit. Lost, TimeoutError."""
        views = [flat(block) for block in blocks]
        small = sum(view.nbytes for view in views) <= small_puts.SMALL_PUT_BYTES
        with self._daemon.using(ends_s) as connection:
            into = _IntoStock(connection, self._batches, tenant, priority, len(keys))
            done = into.put(keys, views, ends_s)
        if done == len(keys):
            return Stored(done, done, done if into.told < 2 else 0)
        rest = slice(done, len(keys))
        by_asking = self._in_one_call if small else self._in_two_steps
        try:
            asked = by_asking(keys[rest], views[rest], ends_s, tenant, priority)
            with self._daemon.using(ends_s) as connection:
                into.ask(connection, views[-1].nbytes)
        except (Lost, TimeoutError):
            if not done:
                raise
            return Stored(len(keys), done, 0)
        return Stored(len(keys), done + asked.kept, 0 if done else asked.fresh)

    def _in_one_call(
        self,
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        ends_s: float,
        tenant: str,
        priority: Priority,
    ) -> Stored:
        """Have the daemon write them."""
        small = small_puts.tagged(keys, views, self._group_bytes, self._leaves)
        put = small_puts.pack_put(small, tenant, priority)
        kept = self._daemon.number(Op.PUT, put, ends_s)
        return Stored(len(keys), kept, kept)

    def _in_two_steps(
        self,
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        ends_s: float,
        tenant: str,
        priority: Priority,
    ) -> Stored:
        """Have pages reserved, write to them, commit."""
        items = [(key, view.nbytes) for key, view in zip(keys, views, strict=True)]
        asked = payloads.pack_reserve(items, tenant, priority)
        payload = self._daemon.call(Op.RESERVE, asked, Op.RESERVED, ends_s)
        grants = payloads.unpack_reserved(payload)
        mine = [n for n, granted in enumerate(grants) if granted.grant is Grant.RESERVED]
        try:
            arena = self._daemon.live_arena()
            places = [Place.of(grants[n], views[n].nbytes, arena) for n in mine]
            blocks = [views[n] for n in mine]
            written = self._batches.fill([keys[n] for n in mine], places, blocks, ends_s)
        except BaseException:
            self._daemon.drop()  # the daemon frees what was reserved when we are back
            raise
        answer_s = max(ends_s, now_s() + ANSWER_S)
        payload = self._daemon.call(
            Op.COMMIT, payloads.pack_commit(written), Op.COMMITTED, answer_s
        )
        states = payloads.unpack_committed(payload)
        unwritten = [grants[n].generation for n in mine[len(written) :]]
        if unwritten:
            self._daemon.number(Op.ABORT, payloads.pack_generations(unwritten), answer_s)
        return stored(grants, states)
