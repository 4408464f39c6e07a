"""Whether a real generation passes through the whole path: planner, workers, hand-off, and back."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kimi_runtime.errors import KimistackError

AGAIN_S = 1.0
"""Pause after a failed probe; a change among the workers starts one at once."""

_log = logging.getLogger(__name__)


class Readiness:
    """Probes once there is a worker until one passes, and again whenever the workers change."""

    def __init__(
        self, probe: Callable[[], Awaitable[None]], changed: Callable[[], None] = lambda: None
    ) -> None:
        """`changed` is called after every probe, whatever came of it."""
        self._probe, self._changed = probe, changed
        self._wanted = asyncio.Event()
        self.obstacle: str | None = "no generation has passed yet"
        """None: ready. Otherwise why not."""
        self.passed = 0

    def wake(self) -> None:
        """The workers changed: what passed before says nothing about them."""
        self._wanted.set()

    async def watch(self) -> None:
        """Keep `obstacle` true until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                await self._probe()
            except KimistackError as exc:
                self._failed(str(exc))
                self._changed()
                await self._pause()
                self._wanted.set()
                continue
            if self.obstacle is not None:
                _log.info("ready: a generation passed through the whole path")
            self.obstacle = None
            self.passed += 1
            self._changed()

    def _failed(self, why: str) -> None:
        if self.obstacle != why:
            _log.warning("not ready", extra={"fields": {"why": why}})
        self.obstacle = why

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(AGAIN_S):
                await self._wanted.wait()
        except TimeoutError:
            return
