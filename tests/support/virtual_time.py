"""An event loop whose time is virtual: it jumps to the next timer when there is nothing to do.

What runs on it is deterministic, since nothing of the machine decides what comes first: no sockets,
no threads, no waiting. A program in which everybody waits and nobody has a deadline ends at once,
with an error. Several *processes* may share a loop; each has its own idea of the time and can be
killed.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from contextvars import ContextVar, copy_context
from typing import Any

from kimi_runtime.transfer.background import Stop

WALL_S = 1.8e9
"""What the wall clock shows at the start."""

MAX_TURNS = 300_000
"""A loop that turned so often without getting anywhere never will."""


class NobodyMoves(Exception):
    """Everybody waits for somebody else, and no timer is set."""


class VirtualLoop(asyncio.base_events.BaseEventLoop):
    """`thread` decides how long a piece of work in a thread takes."""

    def __init__(self) -> None:
        super().__init__()
        self.thread: Callable[[str], float] = lambda what: 1e-4
        self.servers: dict[str, Any] = {}
        self.connect: Callable[[Any, str], Any] | None = None
        self._now_s = 1000.0
        self._turns = 0
        self._clock_resolution = 1e-9
        self._selector = self  # what the base class waits with
        self.ends: dict[int, Process] = {}
        """What stands in for pidfds, and whose."""
        self._watched: dict[int, asyncio.Handle] = {}

    def time(self) -> float:
        """Seconds, as the timers see them."""
        return self._now_s

    def select(self, timeout: float | None) -> list[Any]:
        """Wait, as a selector does; it takes no time."""
        self._turns += 1
        if timeout is None:
            raise NobodyMoves("everybody waits, and no timer is set")
        if self._turns > MAX_TURNS:
            raise NobodyMoves(f"{MAX_TURNS} turns, and the time is {self._now_s:.3f}")
        self._now_s += timeout
        return []

    def add_reader(self, fd: int, callback: Callable[..., Any], *args: Any) -> None:
        """Call this when the test says that there is something to read."""
        self._watched[fd] = asyncio.Handle(callback, args, self)

    def remove_reader(self, fd: int) -> bool:
        """Not any more."""
        self.ends.pop(fd, None)
        return self._watched.pop(fd, None) is not None

    def ended(self, fd: int) -> None:
        """The process of this descriptor has ended, if it is still watched."""
        if fd in self.ends:
            self._watched[fd]._run()

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> "asyncio.Future[Any]":
        """Run `func` once the time has passed that it takes, or at once when it is to stop.

        All of it is done in the end: a slow copy stores, or reads, as late as it can. A process
        that is killed meanwhile never does it.
        """
        process, future = current(), self.create_future()
        if not process.alive:
            future.cancel()
            return future
        stopping = contextlib.ExitStack()
        context = copy_context()

        def run() -> None:
            process.threads.discard(future)
            stopping.close()
            if future.done():
                return
            try:
                future.set_result(func(*args))
            except Exception as exc:
                future.set_exception(exc)

        process.threads.add(future)
        what = getattr(func, "__qualname__", "to_thread").replace(".<locals>", "")
        self.call_later(self.thread(what), run, context=context)
        for stop in args:
            if isinstance(stop, Stop):
                wake = stop.waking(lambda: self.call_soon(run, context=context))
                stopping.enter_context(wake)
        return future

    async def create_unix_server(self, factory: Any, *, sock: Any, **_: Any) -> "_Server":
        """Accept connections at the path that `sock` is bound to."""
        server = _Server(self, sock.getsockname(), factory)
        self.servers[server.path] = server
        return server

    async def create_unix_connection(self, factory: Any, path: str, **_: Any) -> Any:
        """Connect to whoever serves at `path`. ConnectionRefusedError."""
        server = self.servers.get(path)
        if server is None or not server.process.alive or self.connect is None:
            raise ConnectionRefusedError(f"nobody listens on {path}")
        return self.connect(factory, server)

    def _process_events(self, events: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


class _Server:
    def __init__(self, loop: VirtualLoop, path: str, factory: Any) -> None:
        self.loop, self.path, self.factory, self.process = loop, path, factory, current()

    def close(self) -> None:
        """Accept no more."""
        if self.loop.servers.get(self.path) is self:
            del self.loop.servers[self.path]


class Process:
    """Whose code runs: what is started in `context` belongs to it."""

    def __init__(self, name: str) -> None:
        self.name, self.alive = name, True
        self.leap_s = 0.0
        """How far its monotonic clock is ahead of the timers."""
        self.wall_leap_s = 0.0
        self.threads: set[asyncio.Future[Any]] = set()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.streams: list[Any] = []
        self.context = copy_context()
        self.context.run(PROCESS.set, self)

    def start(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run this as a part of the process."""
        task = asyncio.get_running_loop().create_task(work, context=self.context)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def kill(self) -> None:
        """It does nothing more: its tasks unwind without anybody seeing it."""
        self.alive = False
        for future in list(self.threads):
            future.cancel()
        for task in list(self.tasks):
            task.cancel()


class Clock:
    """Stands in for the module `time` where the clock is read."""

    @staticmethod
    def monotonic() -> float:
        """Of the process that asks."""
        return asyncio.get_running_loop().time() + current().leap_s

    @staticmethod
    def time() -> float:
        """Of the process that asks."""
        return WALL_S + asyncio.get_running_loop().time() + current().wall_leap_s


PROCESS: ContextVar[Process] = ContextVar("process")
_OUTSIDE = Process("outside")


def current() -> Process:
    """Whose code runs; a process called `outside` if it is nobody's."""
    return PROCESS.get(_OUTSIDE)
