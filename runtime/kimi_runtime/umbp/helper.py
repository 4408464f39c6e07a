"""What brings blocks into a daemon's memory for requests that wait: the SSD, and other daemons."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from kimi_connect.wire import Gap
from kimi_runtime import clock
from kimi_runtime.umbp.pool import DEFAULT_TENANT

WAIT_SHARE = 0.75
"""Of the time a client waits, for what is brought: it has to copy and check that, too."""

MAX_WAIT_S = 3.0
"""A client takes a daemon that owes an answer for longer than 5 s for hung."""

MAX_WAITING = 256
"""Requests that wait for one source at a time; more are answered from memory alone."""


class Source(Protocol):
    """Where blocks come from."""

    def lacks(self, keys: Sequence[bytes]) -> bool:
        """Whether the block that ends the run of `keys` in memory can be had from here."""

    async def bring(
        self, keys: Sequence[bytes], *, ends_s: float, tenant: str = DEFAULT_TENANT
    ) -> Gap:
        """Bring the next piece of the run into memory, until `ends_s`; why no more came."""


class Errands:
    """Tasks of a group that end, at the latest, with what they are for."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group, self._over = group, False
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run this; nothing happens once all is over."""
        if self._over:
            work.close()
            return
        task = self._group.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def end(self) -> None:
        """Cancel what runs, begin nothing more."""
        self._over = True
        for task in list(self._running):
            task.cancel()


class Helper:
    """Answers requests once a source has brought some of what they lack."""

    def __init__(
        self,
        source: Source,
        spawn: Callable[[Coroutine[Any, Any, None], str], None],
        changed: Callable[[], None],
    ) -> None:
        self.busy = 0
        """Requests not helped because `MAX_WAITING` others waited."""
        self._source, self._spawn, self._changed, self._waiting = source, spawn, changed, 0

    def help(
        self,
        keys: Sequence[bytes],
        answer: Callable[[Gap], None],
        *,
        within_s: float,
        tenant: str = DEFAULT_TENANT,
    ) -> bool:
        """Bring some of the run of `keys` into memory, then call `answer` with why no more came.

        See `Source.bring`. False, and nothing happens, if the source has not the block that ends
        the run in memory, or if enough others wait.
        """
        if not self._source.lacks(keys):
            return False
        if self._waiting >= MAX_WAITING:
            self.busy += 1
            return False
        self._waiting += 1
        self._spawn(self._help(keys, answer, within_s, tenant), "umbp-pin")
        return True

    async def _help(
        self, keys: Sequence[bytes], answer: Callable[[Gap], None], within_s: float, tenant: str
    ) -> None:
        try:
            ends_s = clock.now_s() + min(WAIT_SHARE * within_s, MAX_WAIT_S)
            gap = await self._source.bring(keys, ends_s=ends_s, tenant=tenant)
        finally:
            self._waiting -= 1
        answer(gap)
        self._changed()
