"""Putting a part of what a client stores: into its stock, or by asking the daemon.

Where there is no stock, small blocks travel inside their PUT; others have pages reserved, are
written there, and committed.
"""

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from kimi_connect import payloads, small_puts
from kimi_connect.batches import Batches
from kimi_connect.blocks import Place, flat
from kimi_connect.connection import ANSWER_S, Connection, Lost, Reconnecting, now_s
from kimi_connect.stocking import StockPut, Told
from kimi_connect.tags import Leaves
from kimi_connect.wire import Commitment, Grant, Granted, Op, Priority


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
        with self._daemon.using(ends_s) as connection:
            into = StockPut(connection.stock, keys, views, tenant, priority, now_s)
            self._into_stock(connection, into, ends_s)
        done = into.done
        if done == len(keys):
            return Stored(done, done, done if into.told < 2 else 0)
        small = sum(view.nbytes for view in views) <= small_puts.SMALL_PUT_BYTES
        by_asking = self._in_one_call if small else self._in_two_steps
        try:
            # of all, so that nothing of this very put makes room for its rest
            asked = by_asking(keys, views, ends_s, tenant, priority)
        except (Lost, TimeoutError):
            if not done:
                raise
            return Stored(len(keys), done, 0)
        # that is for a later put; this one is done
        with contextlib.suppress(Lost, TimeoutError), self._daemon.using(ends_s) as connection:
            _tell(connection, into.ask(connection.stock))
        return asked._replace(fresh=0) if done else asked

    def _into_stock(self, connection: Connection, into: StockPut, ends_s: float) -> None:
        while True:
            if not into.covered:
                connection.hear_what_came()
            part = into.part()
            if part is None:
                return
            written = self._batches.fill(part.keys, part.places, part.views, ends_s)
            if len(written) < len(part.places):
                connection.stock.put_back(part.places[len(written) :])
            told = into.keep(part, written)
            if told is None:
                return
            _tell(connection, told)

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


def _tell(connection: Connection, told: "Told | None") -> None:
    if told is not None:
        connection.tell(Op.KEEP, told.payload, Op.KEPT, told.heard, now_s() + ANSWER_S)
