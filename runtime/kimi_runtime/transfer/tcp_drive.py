"""One thread that runs several streams of a tcp session, each as its bytes come."""

import select
import threading
from collections.abc import Iterable, Sequence

from kimi_runtime.errors import TransferError
from kimi_runtime.transfer.background import Stop
from kimi_runtime.transfer.serving import READ, WRITE
from kimi_runtime.transfer.tcp_stream import BLOCKS, Moving, Stream

Part = tuple[Stream, Moving]
_POLLED = {READ: select.POLLIN, WRITE: select.POLLOUT}


class Drive:
    """Runs `parts` until all have ended. The first that fails ends the others by `stop`."""

    def __init__(self, parts: Sequence[Part], stop: Stop) -> None:
        self._parts, self._stop = parts, stop
        self._waits = _Waits()
        self._ready: list[Part] = list(parts)
        self._left, self._whole = len(parts), True
        self._failure: TransferError | None = None
        self._started = threading.Event()

    def start(self) -> None:
        """Do what takes no time, such as asking for what is to be read: in an event loop, while
        the thread that is to `run` wakes up.
        """
        try:
            self._ready = self._resume(self._ready)
        finally:
            self._started.set()

    def run(self) -> bool:
        """Do the rest; whether all was moved. Raises what the first that failed has raised."""
        self._started.wait()
        try:
            while self._left:
                self._ready = self._resume(self._ready or self._waits.ready())
        finally:
            for _, steps in self._parts:
                steps.close()
        if self._failure is not None:
            raise self._failure
        return self._whole

    def _resume(self, ready: Iterable[Part]) -> list[Part]:
        """Take each one's next step; those that wait for nothing but a thread."""
        blocking = []
        for part in ready:
            stream, steps = part
            try:
                want = next(steps)
            except StopIteration as ended:
                self._whole &= ended.value
            except TransferError as exc:
                self._failure = self._failure or exc
                self._stop.set()
            else:
                if want == BLOCKS:
                    blocking.append(part)
                else:
                    self._waits.keep(part, want)
                continue
            self._waits.end(stream)
            self._left -= 1
        return blocking


class _Waits:
    """What the streams of one thread wait for. Who waits again for the same stays registered."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._parts: dict[int, Part] = {}
        self._wanted: dict[Stream, tuple[int, int]] = {}

    def keep(self, part: Part, want: int) -> None:
        """It waits for its socket, which may be a new one."""
        stream = part[0]
        now, before = (stream.fileno(), _POLLED[want]), self._wanted.get(stream)
        if now == before:
            return
        if before is not None and before[0] != now[0]:
            self.end(stream)
        self._poll.register(*now)
        self._parts[now[0]], self._wanted[stream] = part, now

    def end(self, stream: Stream) -> None:
        """It waits no more. Its descriptor may be another stream's by now."""
        descriptor, _ = self._wanted.pop(stream, (-1, 0))
        if descriptor in self._parts and self._parts[descriptor][0] is stream:
            del self._parts[descriptor]
            self._poll.unregister(descriptor)

    def ready(self) -> list[Part]:
        """Wait for the first of them."""
        return [self._parts[descriptor] for descriptor, _ in self._poll.poll()]
