"""Frames that arrive on a socket of the event loop, received where they are decoded."""

import asyncio
from abc import abstractmethod

from kimi_connect.frames import Frame, FrameDecoder, pack_frame
from kimi_connect.wire import Op, WireError


class Framed(asyncio.BufferedProtocol):
    """One end of a connection. What a frame means, and what an error does, is its subclass's."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._decoder = FrameDecoder()

    @abstractmethod
    def arrived(self, frame: Frame) -> None:
        """Handle a frame. A WireError goes to `failed`."""

    @abstractmethod
    def failed(self, error: WireError) -> None:
        """What came is no frame, or one that has no place here."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is connected."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self._decoder.room()

    def buffer_updated(self, nbytes: int) -> None:
        """Handle every frame that is whole."""
        self._decoder.received(nbytes)
        try:
            while (frame := self._decoder.next()) is not None:
                self.arrived(frame)
        except WireError as exc:
            self.failed(exc)

    def send(self, op: Op, request: int, payload: bytes = b"") -> None:
        """Send a frame, unless the connection has ended."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(pack_frame(op, request, payload))

    def abort(self) -> None:
        """Close without flushing."""
        if self.transport is not None:
            self.transport.abort()
