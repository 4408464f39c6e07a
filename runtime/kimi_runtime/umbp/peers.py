"""The process behind a client's connection: when it has ended, nothing of it can write any more."""

import asyncio
import os
import socket
import struct
from collections.abc import Callable

_SO_PEERPIDFD = 77
"""Linux 6.5: a descriptor of the peer's process, right also across pid namespaces."""


def open_peer_process(connection: socket.socket) -> int | None:
    """A pidfd of the process at the other end; None where this can't be known.

    ProcessLookupError if that process has ended.
    """
    try:
        value = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
        return int(struct.unpack("i", value)[0])
    except ProcessLookupError:
        raise
    except OSError:
        pass  # an older kernel: by number, which a container's pid namespace may hide (0)
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid = struct.unpack("3i", credentials)[0]
    if pid <= 0:
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return None


class ProcessWatch:
    """Calls `ended` once when the process ends, unless closed before."""

    def __init__(self, pidfd: int, ended: Callable[[], None]) -> None:
        self._pidfd: int | None = pidfd
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pidfd, self._fire)

    def close(self) -> None:
        """Stop watching."""
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _fire(self) -> None:
        self.close()
        self._ended()
