"""Which KV block holds what: reference counts, a prefix cache by block key, and an LRU.

Pure integers: no tensor, no I/O, no clock. A block is *free* (content worthless), *cached* (full,
keyed, referenced by nobody) or *used* (referenced). Once full and keyed a block never changes, so
any number of requests can share it and nothing is ever copied. An unreferenced cached block is as
good as free: taking it forgets the least recently used key first.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import takewhile

from kimi_runtime.umbp.feed import FeedLog


class KvBlocks:
    """The bookkeeping of `total` blocks. What is keyed is told to `feed`."""

    def __init__(self, total: int, feed: FeedLog) -> None:
        self.total = total
        self._feed = feed
        self._free = list(range(total - 1, -1, -1))
        self._references = [0] * total
        self._key_of: list[bytes | None] = [None] * total
        self._block_of: dict[bytes, int] = {}
        self._unreferenced = 0
        """Cached blocks nobody references."""
        self._order: deque[int] = deque()
        """Those, least recently used first: of a block that is in it several times only the last
        counts, so that taking one out of the middle costs nothing."""
        self._entries = [0] * total
        """How often each block is in `_order`."""

    @property
    def available(self) -> int:
        """Blocks `allocate` can give: free ones and unreferenced cached ones."""
        return len(self._free) + self._unreferenced

    @property
    def cached(self) -> int:
        """Blocks with a key, referenced or not."""
        return len(self._block_of)

    def held(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run of `keys` cached here. Changes nothing."""
        return len(list(takewhile(self._block_of.__contains__, keys)))

    def acquire(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the leading run of `keys` cached here, each referenced once more."""
        blocks = self._run(keys)
        self.reference(blocks)
        return blocks

    def needed(self, keys: Sequence[bytes], total: int) -> int:
        """How many of the `available` it takes to hold `total` blocks that begin with the leading
        run of `keys` cached here. Changes nothing.
        """
        run = self._run(keys)
        idle = [self._references[block] for block in run].count(0)
        return idle + max(total - len(run), 0)

    def is_run(self, blocks: Sequence[int], keys: Sequence[bytes]) -> bool:
        """Whether `blocks` are what `acquire` would give for `keys`."""
        count, key_of = len(blocks), self._key_of
        if count < len(keys) and keys[count] in self._block_of:
            return False
        return [key_of[block] for block in blocks] == list(keys[:count])

    def reference(self, blocks: Iterable[int]) -> None:
        """Reference cached or used blocks once more, so that they stay."""
        references = self._references
        for block in blocks:
            count = references[block]
            if not count:
                assert self._key_of[block] is not None, f"block {block} is free"
                self._unreferenced -= 1
            references[block] = count + 1

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks of worthless content, referenced once; None if there are fewer.

        All or nothing. Free blocks go first, then the least recently used cached ones, whose keys
        are forgotten.
        """
        if count > self.available:
            return None
        free, references = self._free, self._references
        blocks, forgotten = [], list[bytes]()
        for _ in range(count):
            block = free.pop() if free else self._evict(forgotten)
            references[block] = 1
            blocks.append(block)
        if forgotten:
            self._feed.remove(forgotten)
        return blocks

    def seal(self, block: int, key: bytes) -> int:
        """`block`, referenced, is full and holds the content that `key` names.

        Returns the block to use from now on: `block` itself, or the one that already held the
        same content, in which case the reference moves there and `block` is freed.
        """
        return self.seal_run((block,), (key,))[0]

    def seal_run(self, blocks: Sequence[int], keys: Sequence[bytes]) -> list[int]:
        """`seal` of several, one after the other."""
        block_of, key_of, references = self._block_of, self._key_of, self._references
        sealed, fresh = [], []
        for block, key in zip(blocks, keys, strict=True):
            assert references[block] > 0, f"block {block} is sealed without a reference"
            assert key_of[block] is None, f"block {block} is sealed twice"
            known = block_of.get(key)
            if known is None:
                known = block_of[key] = block
                key_of[block] = key
                fresh.append(key)
            else:
                self.reference([known])
                self.release([block])
            sealed.append(known)
        self._feed.add(fresh)
        return sealed

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each block; keyed blocks stay cached.

        Released in reverse, so that of one chain the end is forgotten before what it builds on.
        """
        references, key_of = self._references, self._key_of
        order, entries = self._order, self._entries
        idle = 0
        for block in reversed(blocks):
            left = references[block] = references[block] - 1
            if left > 0:
                continue
            assert not left, f"block {block} is released twice"
            if key_of[block] is None:
                self._free.append(block)
            else:
                idle += 1
                entries[block] += 1
                order.append(block)
        self._unreferenced += idle
        if len(order) > 2 * self.total:
            self._tidy()

    def forget(self, keys: Iterable[bytes]) -> None:
        """These keys' content is not to be trusted any more; users of the blocks keep them."""
        for key in keys:
            block = self._block_of.pop(key, None)
            if block is not None:
                self._key_of[block] = None
                self._feed.remove([key])
                if not self._references[block]:
                    self._unreferenced -= 1
                    self._free.append(block)

    def forget_all(self) -> None:
        """The worker stops: nothing is held for others any more."""
        self.forget(list(self._block_of))
        self._feed.clear()

    def key(self, block: int) -> bytes | None:
        """The key of a cached block; None while it is not full."""
        return self._key_of[block]

    def check_integrity(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """AssertionError unless free + cached + used = total and every link is mutual.

        With `holders`, everybody's block lists, reference counts must equal their sum.
        """
        keyed = {block for block, key in enumerate(self._key_of) if key is not None}
        free, idle = set(self._free), {block for block in keyed if not self._references[block]}
        used = {block for block, count in enumerate(self._references) if count}
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & idle, f"blocks {free & idle} are free and cached"
        assert not used & (free | idle), f"blocks {used & (free | idle)} are used and not"
        assert len(free) + len(idle) + len(used) == self.total, "free + cached + used != total"
        assert len(idle) == self._unreferenced, "idle blocks are miscounted"
        assert idle <= set(self._order), "a cached block can't be evicted"
        assert Counter(self._order) == Counter(dict(enumerate(self._entries)))
        assert {self._key_of[block]: block for block in keyed} == self._block_of
        assert len(self._feed) == len(self._block_of), "the feed tells other keys than are held"
        assert all(key in self._feed for key in self._block_of)
        if holders is not None:
            counted = Counter(block for blocks in holders for block in blocks)
            wrong = {b for b in range(self.total) if counted[b] != self._references[b]}
            assert not wrong, f"blocks {wrong} have other counts than holders"

    def _run(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the leading run of `keys` cached here."""
        run: list[int] = []
        with suppress(KeyError):  # what is before the first that is not here stays in the list
            run.extend(map(self._block_of.__getitem__, keys))
        return run

    def _evict(self, forgotten: list[bytes]) -> int:
        """Forget the least recently used block that nobody references; there must be one. Its key
        is the next of the `forgotten`.
        """
        order, entries, references = self._order, self._entries, self._references
        while True:
            block = order.popleft()
            left = entries[block] = entries[block] - 1
            if not left and not references[block]:
                key = self._key_of[block]
                if key is not None:
                    break
        self._key_of[block] = None
        del self._block_of[key]
        self._unreferenced -= 1
        forgotten.append(key)
        return block

    def _tidy(self) -> None:
        """Leave out of `_order` what no longer counts."""
        last = dict.fromkeys(reversed(self._order))
        kept = [
            block
            for block in last
            if not self._references[block] and self._key_of[block] is not None
        ]
        self._order = deque(reversed(kept))
        self._entries = [0] * self.total
        for block in kept:
            self._entries[block] = 1
