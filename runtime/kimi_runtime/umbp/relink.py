"""The link a pool client has, made again, with backoff, by the next call that needs it."""

import asyncio
import secrets
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kimi_connect import payloads
from kimi_connect.arena import Arena
from kimi_connect.wire import MAX_KEYS, Op, Outcome, WireError
from kimi_runtime import clock
from kimi_runtime.umbp.link import Link, LinkLost, open_link

BACKOFF_S = (0.05, 2.0)


class Relink:
    """`writing` are generations of reserved pages that a copy still writes to: the daemon hears of
    them on every new connection. `arena` is the latest link's: it can be read while there is none.
    """

    def __init__(self, socket: Path, call_key: bytes, name: str, connect_s: float) -> None:
        self.arena: Arena | None = None
        self.writing: set[int] = set()
        self.connects = 0
        self._socket, self._call_key, self._name = socket, call_key, name
        self._connect_s = connect_s
        self._instance = secrets.token_bytes(16)
        self._link: Link | None = None
        self._connecting = asyncio.Lock()
        self._retry_s, self._backoff_s = 0.0, BACKOFF_S[0]
        self._unreported: Counter[Outcome] = Counter()
        self._closed = False

    @property
    def available(self) -> bool:
        """Whether there is a connection now."""
        return self._link is not None and not self._link.lost

    async def connected(self, ends_s: float) -> Link:
        """The connection, made again if it must and may be. LinkLost."""
        if self._link is not None and not self._link.lost:
            return self._link
        async with self._connecting:
            if self._link is not None and not self._link.lost:
                return self._link
            if self._closed or clock.now_s() < self._retry_s:
                raise LinkLost("the pool daemon could not be reached a moment ago")
            sent = frozenset(self.writing)
            try:
                self._link = await open_link(
                    self._socket,
                    self._call_key,
                    instance=self._instance,
                    name=self._name,
                    writing=sent,
                    within_s=min(self._connect_s, max(0.0, ends_s - clock.now_s())),
                )
            except LinkLost:
                self._retry_s = clock.now_s() + self._backoff_s
                self._backoff_s = min(2 * self._backoff_s, BACKOFF_S[1])
                raise
            self._backoff_s = BACKOFF_S[0]
            self.connects += 1
            self.arena = self._link.arena
            _give_back(self._link, sent - self.writing)
            self._report(self._link)
            return self._link

    def tell(self, op: Op, payload: bytes) -> None:
        """A request whose answer nobody needs; nothing happens without a connection."""
        if self._link is not None:
            self._link.tell(op, payload)

    def tell_of(self, op: Op, keys: Sequence[bytes]) -> None:
        """`tell` of a chain, its last keys first: its head is to be the warmest."""
        for start in reversed(range(0, len(keys), MAX_KEYS)):
            self.tell(op, payloads.pack_keys(list(keys[start : start + MAX_KEYS])))

    def wrote(self, link: Link, generations: set[int], whole: set[int]) -> None:
        """A copy by way of `link` has ended, and wrote `whole` of them: the rest is given back, and
        all of them if the link was lost meanwhile.
        """
        self.writing -= generations
        _give_back(link, generations - whole)
        if link.lost and self._link is not None:
            _give_back(self._link, generations)

    def unseen(self, outcome: Outcome, blocks: int) -> None:
        """Count what the daemon could not see; it is told when there is a connection."""
        self._unreported[outcome] += blocks
        if self._link is not None and not self._link.lost:
            self._report(self._link)

    async def finish(self, *, within_s: float) -> None:
        """Give the stock back, and wait until the daemon has read that and all before."""
        link = self._link
        if link is None or link.lost or link.stock is None:
            return
        with suppress(LinkLost, TimeoutError, WireError):
            given_up = payloads.pack_generations(link.stock.everything())
            await link.call(Op.ABORT, given_up, within_s=within_s)

    def close(self) -> None:
        """End the connection for good."""
        self._closed, self.arena = True, None
        if self._link is not None:
            self._link.close()

    def _report(self, link: Link) -> None:
        if self._unreported.total():
            counts = (self._unreported[Outcome.UNAVAILABLE], self._unreported[Outcome.LATE])
            link.tell(Op.REPORT, payloads.pack_report(*counts))
            self._unreported.clear()


def _give_back(link: Link, generations: "set[int] | frozenset[int]") -> None:
    if generations:
        link.tell(Op.ABORT, payloads.pack_generations(sorted(generations)))
