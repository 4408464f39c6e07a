"""One node's KV pool in the simulator: production's bookkeeping, without the bytes. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kimi_connect.states import deepest, piece_count, piece_keys
from kimi_runtime.sim.links import Links
from kimi_runtime.sim.ssd import SimSsd
from kimi_runtime.umbp.feed import FeedLog
from kimi_runtime.umbp.holdings import TierHoldings
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.retention import Hint, Retention

LEASE_S = 600.0
KEPT_EVENTS = 2048
QUIET_SHARE = 0.5
"""While more of the pool than this is free, nobody is told who is warm: nothing goes anyway."""


@dataclass(slots=True)
class SimPool:
    """`blocks` of `block_bytes` in a node's memory; losing a byte costs `load_s_per_byte`.

    With `ssd_blocks`, there are as many behind it on the node's drive, reached over `links`. Of a
    model with a state of `state_bytes`, only what ends at a state checkpoint is of use: `held` and
    `pin` speak of that. A state takes as many objects as it takes blocks' space.
    """

    name: str
    node: str
    blocks: int
    block_bytes: int
    load_s_per_byte: float
    ssd_blocks: int = 0
    links: Links | None = None
    state_bytes: int = 0
    feed: FeedLog = field(init=False)
    pool: Pool = field(init=False)
    ssd: SimSsd | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """An empty pool."""
        self.feed = FeedLog(self.name, epoch=1, tier="dram", keep_events=KEPT_EVENTS)
        in_memory, on_ssd = TierHoldings.pair(self.feed)
        self.pool = Pool(
            total_pages=self.blocks,
            page_bytes=self.block_bytes,
            feed=in_memory if self.ssd_blocks else self.feed,
            reservation_ttl_s=LEASE_S,
            pin_lease_s=LEASE_S,
            retention=Retention(seconds_per_byte=lambda key: self.load_s_per_byte),
        )
        if self.ssd_blocks:
            assert self.links is not None
            self.ssd = SimSsd(
                self.node,
                self.pool,
                on_ssd,
                blocks=self.ssd_blocks,
                block_bytes=self.block_bytes,
                links=self.links,
            )

    @property
    def state_pieces(self) -> int:
        """Objects that a state is kept in."""
        return piece_count(self.state_bytes, self.block_bytes)

    def held(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks can be gone on from: the run that is held, or its part up to the
        deepest state.
        """
        run = self.pool.held(keys)
        return deepest(keys[:run], self.state_pieces, self._holds) if self.state_bytes else run

    def keep_state(self, keys: Sequence[bytes], *, tenant: str, now_s: float) -> bool:
        """Keep the state at the end of the blocks `keys`, whose bytes have arrived; False if blocks
        before it are not there, without which it is no use, or there is no room for all of it.
        """
        if not keys or self.pool.held(keys) < len(keys):
            return False
        own = piece_keys(keys[-1], self.state_pieces)
        return self.store(own, tenant=tenant, now_s=now_s) == len(own) and self._holds(keys[-1])

    def store(self, keys: Sequence[bytes], *, tenant: str, now_s: float) -> int:
        """Keep leading blocks, whose bytes have arrived; how many are held now."""
        return self.pool.put(keys, now_s=now_s, tenant=tenant)

    def pin(self, keys: Sequence[bytes], *, now_s: float) -> tuple[int, int]:
        """Keep what can be gone on from in place; the pin's number and how many blocks it is."""
        if not self.state_bytes:
            pinned = self.pool.pin(keys, reader=0, now_s=now_s)
            return pinned.number, len(pinned.blocks)
        count = self.held(keys)
        states = piece_keys(keys[count - 1], self.state_pieces) if count else []
        return self.pool.pin([*keys[:count], *states], reader=0, now_s=now_s).number, count

    def unpin(self, pin: int) -> None:
        """End a pin. It may have lapsed: what was read is checked in production."""
        self.pool.unpin(pin, (), reader=0, now_s=0.0)

    def used(self, keys: Sequence[bytes], *, now_s: float) -> None:
        """An engine found these in its own memory."""
        if self.ssd is not None:
            self.pool.use(keys, now_s)
            self.ssd.used(keys)
        elif self.pool.free_pages < QUIET_SHARE * self.blocks:
            self.pool.use(keys, now_s)

    def loaded(self, keys: Sequence[bytes], *, now_s: float) -> None:
        """An engine read these from here. Only what goes to SSD depends on how often."""
        if self.ssd is not None:
            self.used(keys, now_s=now_s)

    def bring(self, keys: Sequence[bytes], done: Callable[[], None], *, tenant: str) -> bool:
        """Read what follows the run of `keys` in memory from SSD; `done` once a piece is there.

        False: nothing comes.
        """
        return self.ssd is not None and self.ssd.bring(keys, done, tenant=tenant)

    def _holds(self, key: bytes) -> bool:
        return self.pool.held([key]) == 1

    def hint(self, hint: Hint, *, now_s: float) -> None:
        """What the router knows of a session."""
        self.pool.hint(hint, now_s)
