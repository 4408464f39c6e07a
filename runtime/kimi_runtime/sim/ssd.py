"""A node's SSD behind its pool's memory: production's second tier without the bytes. Pure.

A block that engines had a use for often enough is written, off everybody's way and as fast as the
drive writes. What a prompt needs and memory lacks is read back a piece at a time, through memory;
whoever wants a block that is being read waits for it. The coldest go when the drive is full.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

from kimi_connect.wire import Commitment, Grant
from kimi_runtime.sim.links import Links
from kimi_runtime.umbp.holdings import TierHoldings
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.worth import worth_writing

AFTER_USES = 2
PIECE_BYTES, ARENA_SHARE = 64 << 20, 4
BATCH_BLOCKS, BATCH_BYTES, MAX_QUEUED = 32, 32 << 20, 65_536
"""As in `umbp.promotion` and `umbp.write_through`."""

OWN = b"ssd"
READ, WRITE = "ssd-read", "ssd-write"
"""Links of a node, each after its name and a stroke."""


@dataclass(slots=True, eq=False)
class _Flight:
    keys: list[bytes]
    generations: list[int]
    waiting: list[Callable[[], None]] = field(default_factory=list)


class SimSsd:
    """`blocks` of `block_bytes` on the drive of `node`."""

    def __init__(
        self,
        node: str,
        pool: Pool,
        holdings: TierHoldings,
        *,
        blocks: int,
        block_bytes: int,
        links: Links,
    ) -> None:
        self.blocks, self._block_bytes = blocks, block_bytes
        self.written = self.brought = self.dropped = 0
        """Blocks."""
        self._pool, self._holdings, self._links = pool, holdings, links
        self._read_link, self._write_link = f"{node}/{READ}", f"{node}/{WRITE}"
        self._live: OrderedDict[bytes, None] = OrderedDict()
        self._queue: dict[bytes, None] = {}
        self._writing = False
        self._flights: dict[bytes, _Flight] = {}
        arena_bytes = pool.total_pages * pool.page_bytes
        piece_bytes = min(PIECE_BYTES, arena_bytes // ARENA_SHARE)
        self._piece_blocks = max(piece_bytes // block_bytes, 1)

    def __len__(self) -> int:
        """Blocks on the drive."""
        return len(self._live)

    def used(self, keys: Sequence[bytes]) -> None:
        """Engines had a use for a run of blocks, which the pool has counted."""
        for key in reversed(keys):
            if key in self._live:
                self._live.move_to_end(key)
        worthy = worth_writing(keys, self._pool.block, self._holdings, after_uses=AFTER_USES)
        for block in worthy:
            if block.key in self._queue:
                continue
            if len(self._queue) >= MAX_QUEUED:
                self.dropped += 1
                continue
            self._queue[block.key] = None
        self._write()

    def bring(self, keys: Sequence[bytes], done: Callable[[], None], *, tenant: str) -> bool:
        """Read the first piece of what follows the run of `keys` in memory.

        `done` is called when it is there; False: nothing comes, since the next block is not on the
        drive or memory has no room.
        """
        piece = self._lacking(keys)
        new = [key for key in piece if key not in self._flights]
        if new:
            self._fly(new, tenant)
        flight = self._flights.get(piece[0]) if piece else None
        if flight is None:
            return False
        flight.waiting.append(done)
        return True

    def _lacking(self, keys: Sequence[bytes]) -> list[bytes]:
        behind = keys[self._pool.held(keys) :]
        there = takewhile(
            lambda key: key in self._live or self._pool.block(key) is not None, behind
        )
        lacking = (key for key in there if self._pool.block(key) is None)
        return list(islice(lacking, self._piece_blocks))

    def _fly(self, keys: Sequence[bytes], tenant: str) -> None:
        items = [(key, self._block_bytes) for key in keys]
        now_s = self._links.timeline.now_s
        grants = self._pool.reserve(items, writer=OWN, now_s=now_s, ttl_s=math.inf, tenant=tenant)
        granted = [one.generation for one in grants if one.grant is Grant.RESERVED]
        if not granted:
            return
        flight = _Flight(list(keys[: len(granted)]), granted)
        self._flights |= dict.fromkeys(flight.keys, flight)
        size = len(granted) * self._block_bytes
        self._links.start((self._read_link,), size, lambda: self._landed(flight))

    def _landed(self, flight: _Flight) -> None:
        now_s = self._links.timeline.now_s
        fresh = [(generation, ()) for generation in flight.generations]
        states = self._pool.commit(fresh, writer=OWN, now_s=now_s)
        self.brought += sum(state is Commitment.COMMITTED for state in states)
        for key in flight.keys:
            del self._flights[key]
        for done in flight.waiting:
            done()

    def _write(self) -> None:
        """The next batch, unless one is on its way."""
        if self._writing:
            return
        most = max(min(BATCH_BLOCKS, BATCH_BYTES // self._block_bytes), 1)
        batch: list[bytes] = []
        while self._queue and len(batch) < most:
            key = next(iter(self._queue))
            del self._queue[key]
            if self._pool.block(key) is None:
                self.dropped += 1
            else:
                batch.append(key)
        if not batch:
            return
        self._writing = True
        # one by one: a batch is of several runs, and a pin holds the leading part of one
        pins = [self._pool.pin([key], reader=0, now_s=math.inf).number for key in batch]
        size = len(batch) * self._block_bytes
        self._links.start((self._write_link,), size, lambda: self._written(batch, pins))

    def _written(self, batch: Sequence[bytes], pins: Sequence[int]) -> None:
        for pin in pins:
            self._pool.unpin(pin, (), reader=0, now_s=self._links.timeline.now_s)
        for key in reversed(batch):  # a prefix goes from its end
            self._live[key] = None
        self._holdings.add(batch)
        self.written += len(batch)
        while len(self._live) > self.blocks:
            key, _ = self._live.popitem(last=False)
            self._holdings.remove([key])
        self._writing = False
        self._write()
