"""Visible blocks and the pages they lie in: what is known of each, and how it goes. Pure.

What goes is told to the feed, and to the journal before its pages are anybody else's. A block that
goes while it is pinned keeps its pages until its last pin has ended.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from kimi_connect.states import attached, takers
from kimi_connect.wire import Extent
from kimi_runtime.umbp.eviction import Idle
from kimi_runtime.umbp.ghosts import Ghosts
from kimi_runtime.umbp.holdings import Holdings
from kimi_runtime.umbp.journal import Journal, KeptBlock
from kimi_runtime.umbp.pages import Pages
from kimi_runtime.umbp.records import Block, PoolCounters
from kimi_runtime.umbp.retention import Hint, Retention
from kimi_runtime.umbp.tenants import Accounts


@dataclass(slots=True)
class Shelf:
    """By key. `idle` are the blocks that are not pinned."""

    pages: Pages
    feed: Holdings
    journal: Journal
    accounts: Accounts
    retention: Retention
    ghosts: Ghosts
    counters: PoolCounters
    blocks: dict[bytes, Block] = field(default_factory=dict)
    idle: Idle = field(init=False)

    def __post_init__(self) -> None:
        self.idle = Idle(self.accounts, self.retention)

    @property
    def live_bytes(self) -> int:
        """Bytes of what was put or adopted and is neither evicted nor dropped."""
        c = self.counters
        return c.put_bytes + c.adopted_bytes - c.evicted_bytes - c.dropped_bytes

    def some_free(self, pages: int) -> tuple[Extent, ...]:
        """Pages that are free as of now, nobody's; ValueError if there are fewer."""
        extents = self.pages.take(pages)
        if extents is None:
            raise ValueError(f"{pages} pages of {self.pages.free} that are free")
        self.pages.give_back(extents)
        return extents

    def run(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run of `keys` that is here."""
        return len(list(takewhile(self.blocks.__contains__, keys)))

    def within(self, keys: Sequence[bytes], pages: int) -> int:
        """Length of the leading run that takes at most `pages`, but at least one."""
        for position, key in enumerate(keys):
            block = self.blocks.get(key)
            if block is None:
                return position
            pages -= block.pages
            if pages < 0 and position:
                return position
        return len(keys)

    def warmest(self) -> list[Block]:
        """Every block, the warmest first, a run's head before what hangs on it."""
        pinned = [block for block in self.blocks.values() if block.pins]
        return pinned + list(self.idle)[::-1]

    def use(self, keys: Iterable[bytes], now_s: float) -> None:
        """Count a use of each of `keys` that is here."""
        used = [key for key in keys if key in self.blocks]
        for key in used:
            block = self.blocks[key]
            block.uses += 1
            block.used_s = used_at(now_s, block.used_s)
            block.account.heard(now_s)
            self.retention.used(key)
        self.idle.warm(used[::-1])

    def touch(self, keys: Sequence[bytes], now_s: float) -> int:
        """Make the leading run of `keys` the warmest, its head most of all; the run's length."""
        run = keys[: self.run(keys)]
        for key in run:
            self.blocks[key].used_s = used_at(now_s, self.blocks[key].used_s)
        self.idle.warm(run[::-1])
        return len(run)

    def hint(self, hint: Hint, now_s: float) -> int:
        """Learn of a session; how many of its blocks here that concerns."""
        changed = self.retention.hint(hint, now_s)
        for key in changed:
            if key not in self.blocks:
                self.retention.gone(key)
        here = [key for key in changed if key in self.blocks]
        self.idle.warm(here[::-1])
        return len(here)

    def spare(self, keys: Iterable[bytes]) -> list[Block]:
        """Blocks of `keys`, and what those are worth nothing without, that could be evicted, and
        now can't be until `spared` has them back.
        """
        named: dict[bytes, None] = {}
        for key in keys:
            if key not in named:  # else all of its state is
                named |= dict.fromkeys((*takers(key, self.blocks.__contains__), key))
        here = [self.blocks[key] for key in named if key in self.blocks]
        spared = [block for block in here if not block.pins]
        self.idle.remove(spared)
        return spared

    def spared(self, blocks: Sequence[Block]) -> None:
        """They may go again; the first is the warmest."""
        self.idle.add(reversed(blocks))

    def add(self, blocks: Mapping[bytes, Block]) -> None:
        """Blocks that were put: they are visible, and their reservations have ended. The last of
        them is the warmest.
        """
        self.blocks.update(blocks)
        self.idle.add(blocks.values())
        if len(self.ghosts):
            for key in blocks:
                self.ghosts.forget(key)
        self.feed.add(blocks)
        self.counters.put += len(blocks)
        self.counters.put_bytes += sum([block.size for block in blocks.values()])

    def adopt(self, kept: Sequence[KeptBlock], now_s: float) -> None:
        """Blocks of an earlier daemon, whose pages are taken already."""
        for one in sorted(kept, key=lambda block: block.generation):
            account, pages = self.accounts.of(one.tenant), sum(e.pages for e in one.extents)
            where = (one.key, one.generation, one.size, pages, one.extents, one.tags)
            block = Block(*where, account, one.priority, now_s)
            account.heard(now_s)
            self.accounts.use(account, pages)
            self.blocks[one.key] = block
            self.idle.add((block,))
            self.counters.adopted += 1
            self.counters.adopted_bytes += one.size
        self.feed.add([one.key for one in kept])

    def evict(self, block: Block) -> list[bytes]:
        """Evict a block and what is worth nothing without it: that first, so that no follower ever
        sees a state without its boundary. The keys that went.
        """
        keys = [*self._attached(block), block.key]
        for one in [self.blocks[key] for key in keys]:
            self._evict(one)
        return keys

    def forget(self, keys: Iterable[bytes]) -> tuple[int, int, int]:
        """Evict those of `keys` that nobody reads: how many, their bytes, and how many are read."""
        gone = size = pinned = 0
        for key in keys:
            block = self.blocks.get(key)
            if block is not None and block.pins:
                pinned += 1
            elif block is not None:
                self.evict(block)
                gone, size = gone + 1, size + block.size
        return gone, size, pinned

    def clear(self, up_to: int) -> int:
        """Forget what was put up to a generation; how many blocks."""
        blocks = [block for block in self.blocks.values() if block.generation <= up_to]
        newer = dict.fromkeys(key for block in blocks for key in self._attached(block))
        for state in [self.blocks[key] for key in newer]:
            if state.generation > up_to:
                self._evict(state)
        rest = len(blocks) < len(self.blocks)
        for block in blocks:
            self._remove(block)
            self.counters.dropped_bytes += block.size
        self.counters.cleared += len(blocks)
        if rest:
            self.feed.remove([block.key for block in blocks])
        else:
            self.ghosts.clear()
            self.feed.clear()
        return len(blocks)

    def drop(self, block: Block) -> None:
        """A block does not match its tags; nothing, if it is gone."""
        if block.gone:
            return
        for key in self._attached(block):
            self._evict(self.blocks[key])
        self._remove(block)
        self.feed.remove([block.key])
        self.counters.corrupt += 1
        self.counters.dropped_bytes += block.size

    def free(self, block: Block) -> None:
        """The pages of a block that is gone and not pinned are nobody's."""
        self.accounts.use(block.account, -block.pages)
        self.pages.give_back(block.extents)

    def _attached(self, block: Block) -> list[bytes]:
        return attached(block.key, self.blocks.__contains__)

    def _evict(self, block: Block) -> None:
        self._remove(block)
        self.feed.remove([block.key])
        self.counters.evicted += 1
        self.counters.evicted_bytes += block.size
        self.ghosts.evicted(block.key, block.size)

    def _remove(self, block: Block) -> None:
        self.journal.removed(block)
        del self.blocks[block.key]
        self.retention.gone(block.key)
        block.gone = True
        self.idle.remove((block,))
        if not block.pins:
            self.free(block)


def used_at(now_s: float, before_s: float) -> float:
    """When a block was used: what the daemon does without an end (`inf`) is no use."""
    return max(now_s, before_s) if math.isfinite(now_s) else before_s
