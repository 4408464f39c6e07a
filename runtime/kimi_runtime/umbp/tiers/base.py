"""A place KV blocks can live."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

BlockKey = bytes
"""16 bytes; see `kimi_runtime.umbp.keys`."""


@dataclass(frozen=True, slots=True)
class TierCost:
    """What reading from a tier costs: `latency_s` once a batch, then bytes at `bytes_per_s`."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, size_bytes: int) -> float:
        """Expected seconds to load `size_bytes`."""
        return self.latency_s + size_bytes / self.bytes_per_s


class Tier(Protocol):
    """A level of the pool. Calls are batched; a miss is a number, not an exception."""

    @property
    def cost(self) -> TierCost:
        """Data the planner and the simulator price with."""

    def held(self, keys: Sequence[BlockKey]) -> int:
        """Length of the leading run of `keys` held here. Never blocks, renews nothing."""

    async def load(self, keys: Sequence[BlockKey], into: memoryview) -> int:
        """Copy the leading run into `into`, one block after another, verified; return its length.

        A block whose bytes do not match their tag ends the run there, is dropped and counted.
        """

    async def store(self, keys: Sequence[BlockKey], data: memoryview) -> int:
        """Keep as many leading blocks as fit without evicting; return how many.

        `data` holds the blocks one after another, all of one size. A key held already counts as
        kept and its bytes are not written again.
        """

    def evict(self, blocks: int) -> list[BlockKey]:
        """Forget up to `blocks` unpinned blocks, coldest first; return what was forgotten."""
