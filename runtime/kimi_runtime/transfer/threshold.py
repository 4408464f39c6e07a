"""How many bytes must have come before who waits for them is woken."""

import socket

MOST_BYTES, LEAST_BYTES = 512 << 10, 64 << 10
"""Each wake costs some 50 µs, in which 200 KiB could pass; and what waits for long grows cold."""


class Threshold:
    """That of one socket, whose buffer the system makes large enough for it."""

    __slots__ = ("_bytes", "_sock")

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._bytes = sock, 1

    def expect(self, left: int) -> None:
        """`left` more bytes come for sure, or the connection ends. OSError.

        Half of them are waited for, so that little is still to be done once the last has come.
        """
        wanted = min(left, max(LEAST_BYTES, min(left // 2, MOST_BYTES)))
        if wanted != self._bytes:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
            self._bytes = wanted
