"""Telling a hand-off's owner that its blocks are no longer needed, off the critical path.

A release that fails is not tried again: the lease ends the pin.
"""

import asyncio

import aiohttp

from kimi_runtime.engine.counters import EngineCounters
from kimi_runtime.engine.signed import signed_headers

_MAX_QUEUED = 1024
_AT_ONCE = 8


class Releaser:
    """Posts to release URLs, signed with the deployment's call key."""

    def __init__(self, call_key: bytes, counters: EngineCounters, *, deadline_s: float) -> None:
        self._call_key, self._counters = call_key, counters
        self._timeout = aiohttp.ClientTimeout(total=deadline_s)
        self._queue: asyncio.Queue[str] = asyncio.Queue(_MAX_QUEUED)

    def release(self, url: str) -> None:
        """Post to `url` soon; dropped and counted if far too many wait."""
        try:
            self._queue.put_nowait(url)
        except asyncio.QueueFull:
            self._counters.release_failures += 1

    async def run(self) -> None:
        """Send until cancelled."""
        async with aiohttp.ClientSession(timeout=self._timeout) as http, asyncio.TaskGroup() as own:
            for _ in range(_AT_ONCE):
                own.create_task(self._send(http))

    async def _send(self, http: aiohttp.ClientSession) -> None:
        while True:
            url = await self._queue.get()
            try:
                async with http.post(
                    url, headers=signed_headers(self._call_key, "POST", url), data=b""
                ) as answer:
                    # 404: the lease was over first, which is what we want as well
                    ended = answer.ok or answer.status == 404
            except (aiohttp.ClientError, TimeoutError, ValueError):
                ended = False
            self._counters.release_failures += not ended
