"""Sockets of a session that are all closed once it ended."""

import asyncio
import contextlib
import socket
import weakref
from collections.abc import AsyncIterator

from aiohttp import AddrInfoType, SocketFactoryType

_LOOKS, _LOOK_S = 1000, 0.001


@contextlib.asynccontextmanager
async def ended_sockets() -> AsyncIterator[SocketFactoryType]:
    """Makes a connector's sockets; at the exit waits until they are closed, a second at most.

    A TLS connection whose call was cancelled says goodbye to its other side before it closes, and
    the session does not wait for that: a loop that ends at once leaves it open.
    """
    made: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def make(address: AddrInfoType) -> socket.socket:
        family, kind, protocol, _, _ = address
        one = socket.socket(family, kind, protocol)
        made.add(one)
        return one

    try:
        yield make
    finally:
        for _ in range(_LOOKS):
            if all(one.fileno() == -1 for one in made):
                break
            await asyncio.sleep(_LOOK_S)
