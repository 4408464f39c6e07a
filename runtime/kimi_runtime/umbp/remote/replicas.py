"""How many copies of others' hot blocks a node takes, and which not again. Pure."""

from collections.abc import Iterable, Sequence

from kimi_runtime.spec.peers import OfferedBlock
from kimi_runtime.umbp.pool import Pool

REPLICA_SHARE = 8
"""At most this part of the memory is copies that nobody here has used yet."""


class Replicas:
    """The copies that one node took."""

    def __init__(self, total_pages: int) -> None:
        self._most_pages = total_pages // REPLICA_SHARE
        self._taken: dict[bytes, None] = {}

    def pages(self, pool: Pool) -> int:
        """Pages of copies that no engine of this node has used since."""
        total = 0
        for key in list(self._taken):
            block = pool.block(key)
            if block is None or block.uses > 1:
                del self._taken[key]
            else:
                total += block.pages
        return total

    def admit(self, blocks: Sequence[OfferedBlock], pool: Pool) -> list[OfferedBlock]:
        """Those there is room for in the share, in their order.

        What was evicted here lately did not pay then: taking it again would go on for ever.
        """
        left = self._most_pages - self.pages(pool)
        admitted = []
        for block in blocks:
            if bytes.fromhex(block.key) in pool.ghosts:
                continue
            left -= -(-block.size // pool.page_bytes)
            if left < 0:
                break
            admitted.append(block)
        return admitted

    def took(self, keys: Iterable[bytes]) -> None:
        """These are copies now."""
        self._taken |= dict.fromkeys(keys)
