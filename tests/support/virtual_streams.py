"""Unix sockets between simulated processes: frames in order, late, or cut off."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

from mishaps import Mishap
from virtual_time import Process, VirtualLoop, current

SOCKET_S = 2e-5
DELAY_S = 0.2
STALL_S = 12.0


class Stream(asyncio.Transport):
    """One end of a connection of `process`."""

    def __init__(
        self, loop: VirtualLoop, process: Process, frame: Callable[[bytes], Mishap | None]
    ) -> None:
        super().__init__()
        self.process = process
        self.protocol: Any = None
        self.other: Stream = self
        self._loop, self._frame = loop, frame
        self._closed = False
        self._due_s = 0.0
        process.streams.append(self)

    @classmethod
    def pair(cls, loop: VirtualLoop, frame: Any, factory: Any, server: Any) -> tuple[Any, Any]:
        """Connect the process that runs to a server; its end and its protocol."""
        here, there = cls(loop, current(), frame), cls(loop, server.process, frame)
        here.other, there.other = there, here
        here.protocol, there.protocol = factory(), server.factory()
        here.protocol.connection_made(here)
        loop.call_soon(there.protocol.connection_made, there, context=server.process.context)
        return here, here.protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """The stream is its own socket."""
        return self if name == "socket" else default

    def is_closing(self) -> bool:
        """Whether nothing more can be written."""
        return self._closed

    def get_write_buffer_size(self) -> int:
        """What the kernel did not take: it takes all."""
        return 0

    def write(self, data: bytes) -> None:
        """Have it arrive behind what was written before."""
        if self._closed or not self.process.alive:
            return
        mishap = self._frame(bytes(data))
        if mishap is Mishap.CUT:
            self.abort()
            return
        late_s = {Mishap.DELAY: DELAY_S, Mishap.STALL: STALL_S}.get(mishap, 0.0) if mishap else 0.0
        self._due_s = max(self._due_s, self._loop.time() + SOCKET_S + late_s)
        self._later(self._due_s, self.other._received, bytes(data))

    def close(self) -> None:
        """End it once all has arrived."""
        if not self._closed:
            self._closed = True
            self._later(max(self._due_s, self._loop.time()), self.other._ended)
            self._loop.call_soon(self._lost, context=self.process.context)

    def abort(self) -> None:
        """End it now."""
        if not self._closed:
            self._closed = True
            self._later(self._loop.time() + SOCKET_S, self.other._ended)
            self._loop.call_soon(self._lost, context=self.process.context)

    def _later(self, when_s: float, call: Callable[..., None], *args: Any) -> None:
        self._loop.call_at(when_s, call, *args, context=self.other.process.context)

    def _received(self, data: bytes) -> None:
        if not self._closed and self.process.alive:
            while data and not self._closed:
                room = self.protocol.get_buffer(len(data))
                count = min(len(data), room.nbytes)
                room[:count] = data[:count]
                data = data[count:]
                self.protocol.buffer_updated(count)

    def _ended(self) -> None:
        if not self._closed:
            self._closed = True
            self._lost()

    def _lost(self) -> None:
        if self.process.alive:
            self.protocol.connection_lost(None)


def open_process(stream: Stream) -> int:
    """Stands in for a pidfd of the process at the other end."""
    if not stream.other.process.alive:
        raise ProcessLookupError
    fd = os.eventfd(0)
    asyncio.get_running_loop().ends[fd] = stream.other.process
    return fd


def process_ended(loop: VirtualLoop, process: Process) -> None:
    """Its connections are closed, and whoever watches it hears of its end."""
    for stream in process.streams:
        stream.abort()
    process.streams.clear()
    for fd, watched in list(loop.ends.items()):
        if watched is process:
            loop.call_later(2 * SOCKET_S, loop.ended, fd)
