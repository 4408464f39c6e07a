"""A log of lines that a router's requests never wait for, and that never grows without bound.

Two files at most, the newer under the path itself, the older as `PATH.1`; together they stay below
`max_bytes`. Where the disk is slower than lines come, they are dropped and counted.
"""

import asyncio
import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from kimi_runtime.router.explain.record import older

T = TypeVar("T")

MAX_WAITING = 1024
BATCH = 64

_log = logging.getLogger(__name__)


class LineLog(Generic[T]):
    """Written while `run` runs. `line` makes one of an item, newline included, in a thread."""

    def __init__(
        self, path: Path, max_bytes: int, line: Callable[[T], bytes], *, what: str
    ) -> None:
        self._path, self._half_bytes, self._line = path, max_bytes // 2, line
        self._what = what
        self._waiting: deque[T] = deque()
        self._wake = asyncio.Event()
        self._writing = threading.Lock()
        self._said = ""
        self.written = 0
        self.dropped = 0
        """Items that were not written: too many at once, too long, or the disk failed."""

    def put(self, item: T) -> None:
        """Write it soon."""
        if len(self._waiting) >= MAX_WAITING:
            self.dropped += 1
            return
        self._waiting.append(item)
        self._wake.set()

    async def run(self) -> None:
        """Write until cancelled; then what still waits."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._waiting:
                    await asyncio.to_thread(self._write, self._taken())
        finally:
            self.flush()

    def flush(self) -> None:
        """Write what waits, now."""
        while self._waiting:
            self._write(self._taken())

    def _taken(self) -> list[T]:
        return [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]

    def _write(self, batch: list[T]) -> None:
        """In a thread: making lines may take longer than writing them."""
        with self._writing:
            done = 0
            try:
                for item in batch:
                    done += self._append(self._line(item))
                self._said = ""
            except OSError as exc:
                self._complain(f"the {self._what} {self._path} cannot be written: {exc.strerror}")
            self.written += done
            self.dropped += len(batch) - done

    def _append(self, line: bytes) -> bool:
        if len(line) > self._half_bytes:
            return False
        size = self._path.stat().st_size if self._path.exists() else 0
        if size + len(line) > self._half_bytes:
            self._path.replace(older(self._path))
            size = 0
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        file = os.open(self._path, flags, 0o600)
        try:
            if os.write(file, line) < len(line):  # a cut line would be no record
                os.ftruncate(file, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(file)
        return True

    def _complain(self, why: str) -> None:
        if why != self._said:
            self._said = why
            _log.error("line not written", extra={"fields": {"why": why}})
