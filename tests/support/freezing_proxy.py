"""A proxy in front of a server that can fall silent: connections stay open, nothing comes back.

What a host leaves that lost its power: no answer, and no reset either.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class FreezingProxy:
    """Forwards bytes both ways until `freeze`. `url` is what to call instead of the server's."""

    def __init__(self, url: str) -> None:
        self._target = urlsplit(url)
        self._thawed, self._stop = asyncio.Event(), asyncio.Event()
        self._thawed.set()
        self._busy: set[asyncio.Task[None] | None] = set()
        self.url = ""

    def freeze(self) -> None:
        """From now on nothing is forwarded, in either direction."""
        self._thawed.clear()

    def thaw(self) -> None:
        """Forward again, also what came meanwhile."""
        self._thawed.set()

    async def served(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        task = asyncio.current_task()
        self._busy.add(task)
        try:
            await self._thawed.wait()
            host, port = self._target.hostname, self._target.port
            there, back = await asyncio.open_connection(host, port)
            async with asyncio.TaskGroup() as tasks:
                pumps = [
                    tasks.create_task(self._pump(reader, back)),
                    tasks.create_task(self._pump(there, writer)),
                    tasks.create_task(self._stop.wait()),
                ]
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                for pump in pumps:
                    pump.cancel()
            back.close()
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            self._busy.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(2**16):
                await self._thawed.wait()
                writer.write(data)
                await writer.drain()

    async def aclose(self) -> None:
        """End every connection."""
        self.thaw()
        self._stop.set()
        while self._busy:
            await asyncio.sleep(0.005)


@asynccontextmanager
async def freezing(url: str) -> AsyncIterator[FreezingProxy]:
    """A proxy of that server."""
    proxy = FreezingProxy(url)
    server = await asyncio.start_server(proxy.served, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    proxy.url = f"http://{host}:{port}"
    try:
        yield proxy
    finally:
        server.close()
        await proxy.aclose()
