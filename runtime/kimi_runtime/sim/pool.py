"""One node's KV pool in the simulator: production's bookkeeping, without the bytes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kimi_connect.wire import Grant
from kimi_runtime.umbp.feed import FeedLog
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.retention import Hint, Retention

WRITER = b"sim"
LEASE_S = 600.0
KEPT_EVENTS = 2048
QUIET_SHARE = 0.5
"""While more of the pool than this is free, nobody is told who is warm: nothing goes anyway."""


@dataclass(slots=True)
class SimPool:
    """`blocks` of `block_bytes` in a node's memory; losing a byte costs `load_s_per_byte`."""

    name: str
    node: str
    blocks: int
    block_bytes: int
    load_s_per_byte: float
    feed: FeedLog = field(init=False)
    pool: Pool = field(init=False)

    def __post_init__(self) -> None:
        """An empty pool."""
        self.feed = FeedLog(self.name, epoch=1, tier="dram", keep_events=KEPT_EVENTS)
        self.pool = Pool(
            total_pages=self.blocks,
            page_bytes=self.block_bytes,
            feed=self.feed,
            reservation_ttl_s=LEASE_S,
            pin_lease_s=LEASE_S,
            retention=Retention(seconds_per_byte=lambda key: self.load_s_per_byte),
        )

    def held(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run of `keys` held."""
        return self.pool.held(keys)

    def store(self, keys: Sequence[bytes], *, tenant: str, now_s: float) -> int:
        """Keep leading blocks, whose bytes have arrived; how many are held now."""
        size = self.block_bytes
        granted = self.pool.reserve(
            [(key, size) for key in keys], writer=WRITER, now_s=now_s, tenant=tenant
        )
        fresh = [one.generation for one in granted if one.grant is Grant.RESERVED]
        self.pool.commit([(generation, ()) for generation in fresh], writer=WRITER, now_s=now_s)
        return next((n for n, one in enumerate(granted) if one.grant is Grant.FULL), len(keys))

    def pin(self, keys: Sequence[bytes], *, now_s: float) -> tuple[int, int]:
        """Keep the leading run in place; the pin's number and the run's length."""
        pinned = self.pool.pin(keys, reader=0, now_s=now_s)
        return pinned.number, len(pinned.blocks)

    def unpin(self, pin: int) -> None:
        """End a pin. It may have lapsed: what was read is checked in production."""
        self.pool.unpin(pin, (), reader=0, now_s=0.0)

    def used(self, keys: Sequence[bytes], *, now_s: float) -> None:
        """An engine found these in its own memory."""
        if self.pool.free_pages < QUIET_SHARE * self.blocks:
            self.pool.use(keys, now_s)

    def hint(self, hint: Hint, *, now_s: float) -> None:
        """What the router knows of a session."""
        self.pool.hint(hint, now_s)
