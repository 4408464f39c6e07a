"""Which KV block holds what: reference counts, a prefix cache by block key, and an LRU.

Pure integers: no tensor, no I/O, no clock. A block is *free* (content worthless), *cached* (full,
keyed, referenced by nobody) or *used* (referenced). Once full and keyed a block never changes, so
any number of requests can share it and nothing is ever copied. An unreferenced cached block is as
good as free: taking it forgets the least recently used key first.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

from kimi_runtime.umbp.feed import FeedLog


class KvBlocks:
    """The bookkeeping of `total` blocks. What is keyed is told to `feed`."""

    def __init__(self, total: int, feed: FeedLog) -> None:
        self.total = total
        self._feed = feed
        self._free = list(range(total - 1, -1, -1))
        self._references = [0] * total
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._unreferenced: OrderedDict[int, None] = OrderedDict()
        """Cached blocks nobody references, least recently used first."""

    @property
    def available(self) -> int:
        """Blocks `allocate` can give: free ones and unreferenced cached ones."""
        return len(self._free) + len(self._unreferenced)

    @property
    def cached(self) -> int:
        """Blocks with a key, referenced or not."""
        return len(self._key_of)

    def held(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run of `keys` cached here. Changes nothing."""
        return sum(1 for _ in takewhile(self._block_of.__contains__, keys))

    def acquire(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the leading run of `keys` cached here, each referenced once more."""
        run = takewhile(self._block_of.__contains__, keys)
        blocks = [self._block_of[key] for key in run]
        self.reference(blocks)
        return blocks

    def needed(self, keys: Sequence[bytes], total: int) -> int:
        """How many of the `available` it takes to hold `total` blocks that begin with the leading
        run of `keys` cached here. Changes nothing.
        """
        run = [self._block_of[key] for key in takewhile(self._block_of.__contains__, keys)]
        idle = sum(1 for block in run if not self._references[block])
        return idle + max(total - len(run), 0)

    def reference(self, blocks: Iterable[int]) -> None:
        """Reference cached or used blocks once more, so that they stay."""
        references, unreferenced = self._references, self._unreferenced
        for block in blocks:
            if references[block]:
                references[block] += 1
                continue
            assert block in unreferenced, f"block {block} is free"
            references[block] = 1
            del unreferenced[block]

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks of worthless content, referenced once; None if there are fewer.

        All or nothing. Free blocks go first, then the least recently used cached ones, whose keys
        are forgotten.
        """
        if count > self.available:
            return None
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def seal(self, block: int, key: bytes) -> int:
        """`block`, referenced, is full and holds the content that `key` names.

        Returns the block to use from now on: `block` itself, or the one that already held the
        same content, in which case the reference moves there and `block` is freed.
        """
        assert self._references[block] > 0, f"block {block} is sealed without a reference"
        assert block not in self._key_of, f"block {block} is sealed twice"
        known = self._block_of.get(key)
        if known is not None:
            self.reference([known])
            self.release([block])
            return known
        self._key_of[block], self._block_of[key] = key, block
        self._feed.add([key])
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each block; keyed blocks stay cached.

        Released in reverse, so that of one chain the end is forgotten before what it builds on.
        """
        references = self._references
        for block in reversed(blocks):
            left = references[block] - 1
            assert left >= 0, f"block {block} is released twice"
            references[block] = left
            if not left:
                if block in self._key_of:
                    self._unreferenced[block] = None
                else:
                    self._free.append(block)

    def forget(self, keys: Iterable[bytes]) -> None:
        """These keys' content is not to be trusted any more; users of the blocks keep them."""
        for key in keys:
            block = self._block_of.pop(key, None)
            if block is not None:
                del self._key_of[block]
                self._feed.remove([key])
                if block in self._unreferenced:
                    del self._unreferenced[block]
                    self._free.append(block)

    def forget_all(self) -> None:
        """The worker stops: nothing is held for others any more."""
        self.forget(list(self._block_of))
        self._feed.clear()

    def key(self, block: int) -> bytes | None:
        """The key of a cached block; None while it is not full."""
        return self._key_of.get(block)

    def check_integrity(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """AssertionError unless free + cached + used = total and every link is mutual.

        With `holders`, everybody's block lists, reference counts must equal their sum.
        """
        free, idle = set(self._free), set(self._unreferenced)
        used = {block for block, count in enumerate(self._references) if count}
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & idle, f"blocks {free & idle} are free and cached"
        assert not used & (free | idle), f"blocks {used & (free | idle)} are used and not"
        assert len(free) + len(idle) + len(used) == self.total, "free + cached + used != total"
        assert idle <= self._key_of.keys(), "a block without a key is cached"
        assert not free & self._key_of.keys(), "a free block has a key"
        assert {key: block for block, key in self._key_of.items()} == self._block_of
        assert len(self._feed) == len(self._block_of), "the feed tells other keys than are held"
        assert all(key in self._feed for key in self._block_of)
        if holders is not None:
            counted = Counter(block for blocks in holders for block in blocks)
            wrong = {b for b in range(self.total) if counted[b] != self._references[b]}
            assert not wrong, f"blocks {wrong} have other counts than holders"

    def _evict(self) -> int:
        block, _ = self._unreferenced.popitem(last=False)
        key = self._key_of.pop(block)
        del self._block_of[key]
        self._feed.remove([key])
        return block
