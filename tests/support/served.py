"""An aiohttp handler of every path, on a free port of the loopback."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def served(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    closing: Callable[[], None] = lambda: None,
) -> AsyncIterator[str]:
    """Its address; `closing` is called before running requests are waited for."""
    app = web.Application(client_max_size=2**24)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        closing()
        await runner.cleanup()
