"""Blocking copies beside the event loop, which end when they are told to.

A thread can't be cancelled. What runs here looks at `stop` between pieces of at most a megabyte and
returns what it has done; its caller always waits for that, also when cancelled, because memory that
a forgotten thread still writes to is worse than a wait of a tenth of a millisecond.
"""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import TypeVar

from kimi_runtime import clock
from kimi_runtime.transfer.workers import Workers

Result = TypeVar("Result")

INLINE_BYTES = 64 << 10
"""Copies up to this size cost less than handing them to a thread."""


_WORKERS = Workers(32, "copies")


def cores_for_copies() -> int:
    """Threads for one batch: half the cores, since its other end may be on this host; at most 4."""
    return min(4, max(1, (os.cpu_count() or 1) // 2))


class Stop:
    """A flag a thread looks at, or is woken by where it waits for something else."""

    __slots__ = ("_lock", "_set", "_wakes")

    def __init__(self) -> None:
        self._set = False
        self._wakes: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def __call__(self) -> bool:
        """Whether to stop."""
        return self._set

    def set(self) -> None:
        """Ask to stop."""
        with self._lock:
            self._set = True
            for wake in self._wakes:
                wake()

    @contextmanager
    def waking(self, wake: Callable[[], object]) -> Iterator[None]:
        """Have `set` call `wake`, from its own thread, while the body waits where no flag is seen.

        It is called at once if the flag is set already, and never after the body. It must not wait.
        """
        with self._lock:
            self._wakes.append(wake)
            if self._set:
                wake()
        try:
            yield
        finally:
            with self._lock:
                self._wakes.remove(wake)


async def in_thread(
    work: Callable[[Stop], Result],
    *,
    ends_s: float,
    stop: Stop | None = None,
    poke: Callable[[], Awaitable[object]] | None = None,
    every_s: float = 1.0,
    executor: Executor | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> tuple[Result, bool]:
    """Run `work(stop)` in a thread until `ends_s` (of `clock.now_s`), then ask it to stop.

    Returns its result and whether it was stopped by the deadline (its result then says how far it
    came). `meanwhile` is called once, while the thread wakes up, and `poke` is awaited every
    `every_s`. The thread, one of `executor` or of those that all share, has ended when this returns
    or raises.
    """
    stop = stop or Stop()
    future = asyncio.get_running_loop().run_in_executor(executor or _WORKERS, work, stop)
    late = False
    try:
        if meanwhile is not None:
            meanwhile()
        while not future.done():
            left_s = ends_s - clock.now_s()
            await asyncio.wait({future}, timeout=max(0.0, min(left_s, every_s)))
            if future.done():
                break
            if clock.now_s() >= ends_s:
                late = True
                break
            if poke is not None:
                await poke()
    finally:
        if not future.done():
            stop.set()
            await _ended(future)
    return future.result(), late


async def _ended(future: asyncio.Future[Result]) -> None:
    """Wait for a future whatever happens to us, then let a cancellation pass."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        future.exception()  # seen: nobody else will look
        raise cancelled
