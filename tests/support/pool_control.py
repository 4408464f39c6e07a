"""Calling a daemon's control service from a test."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kimi_runtime.umbp.rpc.client import RpcClient
from pool_daemon import CALL_KEY

SOON_S = 30.0


class Control:
    """Calls over a daemon's own socket, each within `SOON_S`."""

    def __init__(self, rpc: RpcClient) -> None:
        self.rpc = rpc

    async def __call__(self, method, **fields):
        """One call; for a method that streams, every answer as it was when it came."""
        asked = method.asked(**fields)
        if not method.streams:
            return await self.rpc.call(method, asked, within_s=SOON_S)
        return [answer async for answer in self.rpc.stream(method, asked, within_s=SOON_S)]


@asynccontextmanager
async def control_of(spec, *keys: bytes) -> AsyncIterator[Control]:
    """Calls to the daemon that `spec` describes, signed by the first of `keys`."""
    rpc = RpcClient(f"unix:{spec.control_socket}", keys or (CALL_KEY,), what="the daemon")
    try:
        yield Control(rpc)
    finally:
        await rpc.aclose()
