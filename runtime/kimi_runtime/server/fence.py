"""Ending a worker's work when its lease is over: nothing new is taken, what runs is cancelled."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from kimi_runtime import clock
from kimi_runtime.errors import RequestError, Unavailable
from kimi_runtime.server.lease import Lease

LOOK_S = 0.25

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Fence:
    """A worker's lease, applied to its requests."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._waits: set[asyncio.Timeout] = set()
        self._was_up = False

    @property
    def up(self) -> bool:
        """Whether the worker must not work now."""
        return self._lease.fenced(clock.now_s())

    def reported(self, seq: int, heard: str | None) -> None:
        """A load report is about to be sent; `heard` is what its caller says of an earlier one.

        `EPOCH.SEQ` of the newest report that arrived, `none`, or None from a router that knows no
        such word. RequestError for anything else.
        """
        now_s = clock.now_s()
        if heard is None:
            self._lease.called(now_s=now_s)
        elif heard != "none":
            epoch, dot, number = heard.partition(".")
            if not (dot and _is_number(epoch) and _is_number(number)):
                raise RequestError("heard is EPOCH.SEQ of a load report, or none", param="heard")
            self._lease.heard(int(epoch), int(number), now_s=now_s)
        self._lease.reported(seq, now_s=now_s)

    def check(self) -> None:
        """Unavailable while the fence is up."""
        if self.up:
            raise Unavailable("this worker's lease is over: no router has heard of it lately")

    async def within(self, chunks: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """The chunks, until the fence comes up: then Unavailable, and `chunks` is closed."""
        async with aclosing(chunks):
            while True:
                self.check()
                wait = asyncio.timeout(None)
                try:
                    async with wait:
                        self._waits.add(wait)
                        try:
                            chunk = await anext(chunks)
                        except StopAsyncIteration:
                            return
                except TimeoutError:
                    if not wait.expired():
                        raise
                    self.check()
                    raise Unavailable("this worker's lease was over for a moment") from None
                finally:
                    self._waits.discard(wait)
                yield chunk

    async def watch(self) -> None:
        """Cut what runs when the lease ends, until cancelled."""
        while True:
            up = self.up
            if up and not self._was_up:
                _log.warning("lease over", extra={"fields": {"cancelled": len(self._waits)}})
            if self._was_up and not up:
                _log.info("lease renewed")
            self._was_up = up
            while up and self._waits:
                self._waits.pop().reschedule(0.0)
            left_s = self._lease.ends_in_s(clock.now_s())
            await asyncio.sleep(LOOK_S if left_s is None else min(left_s + 0.001, LOOK_S))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20
