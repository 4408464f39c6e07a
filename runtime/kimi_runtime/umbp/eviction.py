"""Which unpinned block goes when memory is short. Pure.

Blocks wait in queues by tenant, standing and priority, coldest first. A victim is the least worth
of the blocks at the heads of the queues that may lose one: a queue's order is by recency and its
head is a good guess, so a choice costs a few evaluations however many blocks there are. Ties go to
the colder block, and a prefix's end is colder than its head.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from kimi_runtime.umbp.records import Block
from kimi_runtime.umbp.retention import Retention, Standing
from kimi_runtime.umbp.tenants import Account, Accounts

_LOOK_AT = {
    Standing.FORSAKEN: 1,
    Standing.ONCE: 1,
    Standing.AGAIN: 4,
    Standing.IN_SESSION: 8,
}
"""Blocks considered at a queue's head: more where equal recency says less about worth."""

Queue = OrderedDict[bytes, Block]


class Idle:
    """Visible unpinned blocks."""

    def __init__(self, accounts: Accounts, retention: Retention) -> None:
        self.pages = 0
        self._accounts, self._retention = accounts, retention
        self._queues: dict[Account, dict[tuple[Standing, int], Queue]] = {}
        self._blocks: dict[bytes, Queue] = {}

    def __len__(self) -> int:
        """How many."""
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        """Whether a block waits here."""
        return key in self._blocks

    def __iter__(self) -> Iterator[Block]:
        """Every block, the coldest first."""
        for key, queue in self._blocks.items():
            yield queue[key]

    def add(self, blocks: Iterable[Block]) -> None:
        """These are unpinned now, each the warmest of its queue."""
        waiting, standing = self._blocks, self._retention.standing
        account: Account | None = None
        kind: tuple[Standing, int] | None = None
        for block in blocks:
            key, own = block.key, (standing(block.key, block.uses), block.priority)
            if own != kind or block.account is not account:  # of one prompt all wait together
                account, kind = block.account, own
                queue = self._queue(account, kind)
            queue[key] = block
            waiting[key] = queue
            self.pages += block.pages
            account.idle_pages += block.pages

    def remove(self, blocks: Iterable[Block]) -> None:
        """These are pinned or gone now, if they were here."""
        waiting = self._blocks
        for block in blocks:
            queue = waiting.pop(block.key, None)
            if queue is None:
                continue
            del queue[block.key]
            account = block.account
            self.pages -= block.pages
            account.idle_pages -= block.pages
            if not account.idle_pages:
                del self._queues[account]

    def warm(self, keys: Iterable[bytes]) -> None:
        """Queue these anew, each warmer than the one before; those that are pinned are left."""
        for key in keys:
            queue = self._blocks.get(key)
            if queue is not None:
                block = (queue[key],)
                self.remove(block)
                self.add(block)

    def room(self, now_s: float, asking: Account) -> int:
        """Pages that `victim` would give for a put of `asking`, at least."""
        if self._accounts.only(asking):
            return asking.idle_pages
        shares = self._accounts.shares(now_s, asking)
        others = sum(
            min(account.idle_pages, max(0, int(account.used_pages - share)))
            for account, share in shares.items()
            if account is not asking
        )
        return asking.idle_pages + others

    def victim(
        self,
        now_s: float,
        asking: Account | None = None,
        *,
        own: bool = False,
        below: float = math.inf,
    ) -> Block | None:
        """The block to lose, for a put of `asking` (None: for room at large; `own`: its own only).

        None if there is none to be lost for that, none worth less than `below` above all.
        """
        blocks = [
            block
            for account in self._losers(now_s, asking, own=own)
            for (standing, _), queue in self._queues[account].items()
            for block in _heads(queue, _LOOK_AT[standing])
        ]
        worths = (self._worth(block, now_s) for block in blocks)
        chosen = min(zip(worths, range(len(blocks)), strict=True), default=None)
        return None if chosen is None or chosen[0][0] >= below else blocks[chosen[1]]

    def _queue(self, account: Account, kind: tuple[Standing, int]) -> Queue:
        """Where a block of an account waits that is not pinned, by its standing and priority."""
        queues = self._queues.get(account)
        if queues is None:
            queues = self._queues[account] = {}
        queue = queues.get(kind)
        if queue is None:
            queue = queues[kind] = OrderedDict()
        return queue

    def _losers(self, now_s: float, asking: Account | None, *, own: bool) -> list[Account]:
        if own or (asking is not None and self._accounts.only(asking)):
            return [a for a in (asking,) if a is not None and a.idle_pages]
        shares = self._accounts.shares(now_s, asking)
        above = [a for a, share in shares.items() if a.idle_pages and a.used_pages > share]
        if asking is None:
            return above or [a for a in shares if a.idle_pages]
        return above + [a for a in (asking,) if a.idle_pages and a not in above]

    def _worth(self, block: Block, now_s: float) -> tuple[float, float]:
        worth = self._retention.worth(
            block.key,
            uses=block.uses,
            used_s=block.used_s,
            priority=block.priority,
            now_s=now_s,
        )
        return worth, block.used_s


def _heads(queue: Queue, count: int) -> Iterator[Block]:
    for block, _ in zip(queue.values(), range(count), strict=False):
        yield block
