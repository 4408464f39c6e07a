"""Sockets that end with their session."""

import asyncio
import contextlib
import ssl

import aiohttp
import pytest
from aiohttp import web

from certificates import Authority, needs_openssl
from kimi_operator.sockets import ended_sockets


@pytest.fixture
async def server(tmp_path):
    """A TLS server that never answers: its address, whether it was asked, who trusts it."""
    files = Authority(tmp_path / "ca").issue(tmp_path / "server")
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(files.certificate, files.key)
    asked = asyncio.Event()

    async def silent(_):
        asked.set()
        await asyncio.Event().wait()

    application = web.Application()
    application.router.add_get("/", silent)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=own).start()
    host, port = runner.addresses[0]
    yield f"https://{host}:{port}/", asked, ssl.create_default_context(cafile=files.ca)
    await runner.cleanup()


@needs_openssl
async def test_a_cancelled_call_leaves_no_socket_open_when_its_session_has_ended(server):
    url, asked, trusted = server
    made = []

    async def call(http):
        async with http.get(url):
            pass

    async with (
        ended_sockets() as make,
        aiohttp.TCPConnector(
            ssl=trusted, socket_factory=lambda address: made.append(make(address)) or made[-1]
        ) as connector,
        aiohttp.ClientSession(connector=connector) as http,
    ):
        calling = asyncio.ensure_future(call(http))
        await asked.wait()
        calling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await calling
    assert [one.fileno() for one in made] == [-1]
