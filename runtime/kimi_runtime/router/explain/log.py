"""The explain log of a router: lines written by a thread, never waited for, never without bound.

Two files at most, the newer under the path itself, the older as `PATH.1`; together they stay below
`max_bytes`. Where the disk is slower than decisions come, decisions go unexplained and are counted.
"""

import asyncio
import errno
import logging
import os
import threading
from collections import deque

from kimi_runtime import clock
from kimi_runtime.router.course import Outcome
from kimi_runtime.router.decisions import Decision
from kimi_runtime.router.explain.record import line_of, older, record_of
from kimi_runtime.spec.router import ExplainSpec, PolicySpec

MAX_WAITING = 1024
BATCH = 64

_log = logging.getLogger(__name__)


class ExplainLog:
    """Written while `run` runs."""

    def __init__(self, spec: ExplainSpec, *, router: str, policy: PolicySpec) -> None:
        self._path, self._half_bytes = spec.path, spec.max_bytes // 2
        self._router, self._policy = router, policy
        self._waiting: deque[tuple[Decision, Outcome, float]] = deque()
        self._wake = asyncio.Event()
        self._writing = threading.Lock()
        self._said = ""
        self.written = 0
        self.dropped = 0
        """Decisions that were not written: too many at once, too long, or the disk failed."""

    def put(self, decision: Decision, outcome: Outcome) -> None:
        """Write the decision soon."""
        if len(self._waiting) >= MAX_WAITING:
            self.dropped += 1
            return
        self._waiting.append((decision, outcome, clock.unix_s()))
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
            while self._waiting:
                self._write(self._taken())

    def _taken(self) -> list[tuple[Decision, Outcome, float]]:
        return [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]

    def _write(self, batch: list[tuple[Decision, Outcome, float]]) -> None:
        """In a thread: making lines of decisions takes longer than writing them."""
        with self._writing:
            done = 0
            try:
                for decision, outcome, unix_s in batch:
                    record = record_of(
                        decision, outcome, router=self._router, policy=self._policy, unix_s=unix_s
                    )
                    done += self._append(line_of(record))
                self._said = ""
            except OSError as exc:
                self._complain(f"the explain log {self._path} cannot be written: {exc.strerror}")
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
            _log.error("decision not explained", extra={"fields": {"why": why}})
