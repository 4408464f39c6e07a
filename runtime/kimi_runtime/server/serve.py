"""Running an app on a socket: bound early, drained on SIGTERM, stalled readers dropped."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kimi_runtime.errors import ConfigError
from kimi_runtime.server.asgi import ABORT

BACKLOG = 2048
KEEP_ALIVE_S = 75
"""Longer than clients pool idle connections, so that they do not race our close."""
LAST_ANSWERS_S = 5
"""After draining: for answers that are on their way out."""


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address; ConfigError if it can't be had.

    It listens only once the app runs: until then callers are refused, not kept waiting.
    """
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, number)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as exc:
        raise _taken(f"{host}:{port}", exc) from exc
    listener.setblocking(False)
    return listener


def _taken(address: str, exc: OSError) -> ConfigError:
    return ConfigError(
        f"{address} can't be listened on ({exc.strerror or exc}); "
        "stop who uses it or choose another port"
    )


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol, which also lets an app drop its connection with what is still unsent."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions: dict[str, Any] = {ABORT: self.transport.abort}
        self.scope["extensions"] = extensions


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process decides when to drain and when to stop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as exc:  # another process began to listen since we bound the address
            raise _taken(str(sockets[0].getsockname()) if sockets else "?", exc) from exc
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def listening(app: ASGIApp, listener: socket.socket) -> AsyncIterator[str]:
    """Serve `app` until the block ends; yields its URL."""
    config = uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_ANSWERS_S,
    )
    server = _Server(config)
    host, port = listener.getsockname()[:2]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve(sockets=[listener]), name="http server")
        try:
            await server.up.wait()
            yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        finally:
            server.should_exit = True


async def until_signalled(drain: Callable[[], Awaitable[Any]]) -> None:
    """Wait for SIGTERM or SIGINT, then drain. A second signal ends the draining."""
    loop = asyncio.get_running_loop()
    first, second = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    await first.wait()
    async with asyncio.TaskGroup() as tasks:
        drained = tasks.create_task(_awaited(drain))
        stopper = tasks.create_task(second.wait())
        await asyncio.wait({drained, stopper}, return_when=asyncio.FIRST_COMPLETED)
        drained.cancel()
        stopper.cancel()


async def _awaited(work: Callable[[], Awaitable[Any]]) -> None:
    await work()
