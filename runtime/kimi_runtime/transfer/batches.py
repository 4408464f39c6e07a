"""What every session does around a batch: bounds, deadline, counters, an end; and copies."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from kimi_connect.copying import PIECE_BYTES, copy_bytes
from kimi_runtime import clock
from kimi_runtime.errors import TransferCancelled, TransferLate
from kimi_runtime.transfer.background import INLINE_BYTES, Stop, in_thread
from kimi_runtime.transfer.base import LinkCounters, Span
from kimi_runtime.transfer.plan import check_bounds, spread, total_bytes

WAKING_S = 0.4e-3
"""How long the event loop copies too, rather than rest while a sleeping thread wakes up."""

_Piece = tuple[memoryview, memoryview]


class Batches:
    """The batches of one session to `peer`, whose bytes this host's cores copy."""

    def __init__(self, peer: str, *, streams: int = 1) -> None:
        self.counters = LinkCounters()
        self.closed = False
        self._peer, self._streams = peer, streams
        self._running: dict[Stop, None] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    async def copy(
        self,
        spans: Sequence[Span],
        *,
        remote: memoryview,
        local: memoryview,
        writes: bool,
        deadline_s: float,
        check: Callable[[], None],
    ) -> None:
        """One batch between `remote` and `local`.

        `check` raises when the region is no longer what it was; it is asked before, and again after
        the copy, because only then are the bytes known to be the region's. Raises what
        `Session.read` promises.
        """
        self._require_open()  # the memory of a closed session can't even be measured
        ends_s = clock.now_s() + deadline_s
        with self.batch(
            spans, remote_bytes=remote.nbytes, local_bytes=local.nbytes, writes=writes
        ) as stop:
            check()
            target, source = (remote, local) if writes else (local, remote)
            late = await self._move(spans, target, source, writes, stop, ends_s)
            self.require(not late, spans, deadline_s)
            check()

    @contextmanager
    def batch(
        self, spans: Sequence[Span], *, remote_bytes: int, local_bytes: int, writes: bool
    ) -> Iterator[Stop]:
        """Around one batch: its bounds, its place among the running ones, its counters.

        What moves the bytes looks at the flag, which closing the session sets.
        """
        self._require_open()
        check_bounds(spans, remote_bytes=remote_bytes, local_bytes=local_bytes)
        start_s = clock.now_s()
        stop, done = Stop(), False
        self._running[stop] = None
        self._idle.clear()
        try:
            yield stop
            done = True
        finally:
            del self._running[stop]
            if not self._running:
                self._idle.set()
            self._count(done, total_bytes(spans), writes, clock.now_s() - start_s)

    def require(self, in_time: bool, spans: Sequence[Span], deadline_s: float) -> None:
        """TransferCancelled if the session was closed meanwhile, TransferLate if time ran out."""
        if self.closed:
            raise TransferCancelled(f"the session to {self._peer} was closed")
        if not in_time:
            size = total_bytes(spans)
            raise TransferLate(f"{size} bytes did not pass within {deadline_s:.3f} s")

    async def aclose(self) -> None:
        """End the running batches and wait until none touches memory any more."""
        self.closed = True
        for stop in self._running:
            stop.set()
        await self._idle.wait()

    def _require_open(self) -> None:
        if self.closed:
            raise TransferCancelled(f"the session to {self._peer} is closed; open another")

    async def _move(
        self,
        spans: Sequence[Span],
        target: memoryview,
        source: memoryview,
        writes: bool,
        stop: Stop,
        ends_s: float,
    ) -> bool:
        """Whether the deadline came first."""
        if clock.now_s() >= ends_s:
            return True
        plans = spread(spans, self._streams)
        pieces = [deque(_pieces(plan, target, source, writes)) for plan in plans]
        if total_bytes(spans) <= INLINE_BYTES:
            for some in pieces:
                _copy(some, stop)
            return False
        first, *others = [partial(_copy, some) for some in pieces]
        ahead = partial(_copy, pieces[0], stop, for_s=WAKING_S)
        async with asyncio.TaskGroup() as streams:
            running = [
                streams.create_task(in_thread(copy, ends_s=ends_s, stop=stop)) for copy in others
            ]
            _, late = await in_thread(first, ends_s=ends_s, stop=stop, meanwhile=ahead)
        return late or any(late for _, late in (task.result() for task in running))

    def _count(self, done: bool, size: int, writes: bool, seconds: float) -> None:
        c = self.counters
        self.counters = replace(
            c,
            read_bytes=c.read_bytes + (size if done and not writes else 0),
            written_bytes=c.written_bytes + (size if done and writes else 0),
            batches=c.batches + 1,
            failed_batches=c.failed_batches + (not done),
            busy_s=c.busy_s + seconds,
        )


def _pieces(
    spans: Sequence[Span], target: memoryview, source: memoryview, writes: bool
) -> Iterator[_Piece]:
    """Where to and where from, in pieces after each of which a copy may be told to stop."""
    for remote, local, size in spans:
        to, of = (remote, local) if writes else (local, remote)
        for at in range(0, size, PIECE_BYTES):
            piece = min(PIECE_BYTES, size - at)
            yield target[to + at : to + at + piece], source[of + at : of + at + piece]


def _copy(pieces: deque[_Piece], stop: Stop, *, for_s: float = math.inf) -> None:
    """Copy what nobody has taken yet, or what there is time for. Several threads may."""
    ends_s = clock.now_s() + for_s
    while not stop():
        try:
            to, of = pieces.popleft()
        except IndexError:
            return
        copy_bytes(to, of)
        if clock.now_s() >= ends_s:
            return
