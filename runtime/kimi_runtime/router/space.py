"""What KV space costs on each worker: a ghost cache behind each feed. Pure."""

from collections.abc import Sequence

from kimi_runtime.router.estimate.price import SpacePrice

GHOST_BLOCKS = 8192
"""Remembered evictions of one worker, about 1 MB: a few hundred thousand tokens."""
MAX_WORKERS = 1024


class Space:
    """A `SpacePrice` per worker, made when its first block is evicted."""

    def __init__(self) -> None:
        self._prices: dict[str, SpacePrice] = {}
        self.costly: set[str] = set()
        """Workers of whom `per_block_s` may be more than 0."""

    def evicted(self, worker: str, keys: Sequence[bytes], *, now_s: float) -> None:
        """The worker's feed told that it holds these no more."""
        price = self._prices.get(worker)
        if price is None:
            if len(self._prices) >= MAX_WORKERS:
                return
            price = self._prices[worker] = SpacePrice(ghosts=GHOST_BLOCKS)
        price.evicted(keys, now_s=now_s)

    def computed(self, worker: str, keys: Sequence[bytes], *, seconds: float, now_s: float) -> None:
        """The worker computed these blocks of a prompt in `seconds` together."""
        price = self._prices.get(worker)
        if price is not None and keys:
            price.missed(keys, seconds_per_block=seconds / len(keys), now_s=now_s)
            if not price.costless:
                self.costly.add(worker)

    def per_block_s(self, worker: str, *, now_s: float) -> float:
        """Seconds that taking a block which holds something will cost others."""
        price = self._prices.get(worker)
        return 0.0 if price is None else price.per_block_s(now_s=now_s)

    def per_block_second_s(self, worker: str, *, blocks: int, now_s: float) -> float:
        """Seconds that holding one of the worker's `blocks` for a second costs others."""
        price = self._prices.get(worker)
        return 0.0 if price is None else price.per_block_second_s(blocks, now_s=now_s)

    def forget(self, worker: str) -> None:
        """The worker restarted or is gone."""
        self._prices.pop(worker, None)
        self.costly.discard(worker)
