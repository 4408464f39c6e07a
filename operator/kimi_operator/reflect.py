"""One kind kept as the API server has it: listed, then watched, then listed anew where that broke.

kopf is left the deployments themselves. It would keep a task, a queue and several copies of every
object of every kind, and end the process over an error that a watch tells of.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from kimi_operator.cache import Cache, Change, Key
from kimi_operator.kinds import Kind
from kimi_operator.observed import Manifest
from kimi_runtime.errors import ClusterError, ClusterRefused

FIRST_BACKOFF_S = 1.0
MOST_BACKOFF_S = 30.0
GONE = 410
logger = logging.getLogger(__name__)


class Source(Protocol):
    """Where listings and watches come from. Both raise ClusterError; code 410: list anew."""

    async def listing(
        self, kind: str, namespace: str | None, labels: str = ""
    ) -> tuple[Sequence[Manifest], str]:
        """The objects, and the version from which on a watch tells what happens to them."""

    def watch(
        self, kind: str, namespace: str | None, labels: str, version: str
    ) -> AsyncGenerator[tuple[Change | None, Manifest]]:
        """What happens after a version; None for a bookmark. It ends within minutes."""


@dataclass
class Reflector:
    """Keeps the objects of one kind in a cache, and calls `told` for every owner of a change."""

    source: Source
    cache: Cache
    kind: Kind
    namespace: str | None
    labels: str
    told: Callable[[Key], object]
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    listed: asyncio.Event = field(default_factory=asyncio.Event)

    async def keep(self) -> None:
        """For ever. `listed` is set once the cache has all there is."""
        failures = 0
        while True:
            try:
                version = await self._list()
                failures = 0
                while True:
                    version = await self._watch(version)
            except ClusterError as exc:
                if exc.code != GONE:
                    logger.warning("watching %s: %s", self.kind.plural, exc)
                if isinstance(exc, ClusterRefused):
                    self.listed.set()  # what may not be read is no reason to do nothing at all
                wait_s = min(FIRST_BACKOFF_S * 2**failures, MOST_BACKOFF_S)
                failures += 1
                await self.sleep(max(wait_s, exc.retry_after_s or 0.0))

    async def _list(self) -> str:
        known = self.cache.known(self.kind.id, self.namespace)
        found, version = await self.source.listing(self.kind.id, self.namespace, self.labels)
        for key in self.cache.replace(self.kind.id, found, known):
            self.told(key)
        self.listed.set()
        return version

    async def _watch(self, version: str) -> str:
        events = self.source.watch(self.kind.id, self.namespace, self.labels, version)
        async with aclosing(events):
            async for change, manifest in events:
                version = manifest["metadata"]["resourceVersion"]
                key = self.cache.saw(change, manifest) if change is not None else None
                if key is not None:
                    self.told(key)
        return version
