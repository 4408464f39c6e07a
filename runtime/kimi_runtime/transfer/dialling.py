"""Connecting to the owner of a region. Blocking; for threads."""

import errno
import os
import select
import socket
from contextlib import suppress
from typing import Any

from kimi_runtime.errors import PeerGone
from kimi_runtime.spec.request import RegionRef
from kimi_runtime.transfer.background import Stop
from kimi_runtime.transfer.handshake import dial_in
from kimi_runtime.transfer.network import NetworkSettings, split_address
from kimi_runtime.transfer.serving import tune

_LOOK_MS = 20


def dial(remote: RegionRef, settings: NetworkSettings, purpose: bytes, stop: Stop) -> socket.socket:
    """A connection to the owner of a region that has shown its key; `stop` ends the wait.

    PeerGone if it can't be had.
    """
    host, port = split_address(remote.address)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[
            0
        ]
        sock = socket.socket(family, kind, protocol)
        try:
            _connect(sock, where, stop)
            tune(sock)
            with stop.waking(lambda: abort(sock)):
                dial_in(sock, settings.call_keys, purpose)
        except BaseException:
            sock.close()
            raise
    except OSError as exc:
        raise PeerGone(f"{remote.peer} at {remote.address} can't be reached: {exc}") from exc
    except PeerGone as exc:
        raise PeerGone(f"{remote.peer} at {remote.address}: {exc}") from exc
    return sock


def abort(sock: socket.socket) -> None:
    """Wake whoever waits in a call on the socket; nothing can be sent or received from now on."""
    with suppress(OSError):  # not connected yet, or closed already
        sock.shutdown(socket.SHUT_RDWR)


def _connect(sock: socket.socket, where: Any, stop: Stop) -> None:
    """Connect, or OSError; `stop` is looked at, for a shutdown would come to nothing before."""
    sock.setblocking(False)
    failure = sock.connect_ex(where)
    if failure == errno.EINPROGRESS:
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        while not stop() and not poll.poll(_LOOK_MS):
            pass
        failure = errno.ECANCELED if stop() else sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if failure:
        raise OSError(failure, os.strerror(failure))
    sock.setblocking(True)
