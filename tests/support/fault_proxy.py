"""A reverse proxy between an operator and its API server that fails as networks and servers do.

What happens to a request is decided by `fault`, a function of the request: a script, or a schedule
drawn from a seed. Everything that passes is written down, so that tests count requests, name the
writers and say when.
"""

import asyncio
import json
import random
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
import yaml
from aiohttp import web

from http_kube import status
from kimi_operator.clock import now_s
from kimi_operator.sockets import ended_sockets
from served import served

HOP_BY_HOP = {"connection", "content-encoding", "content-length", "host", "transfer-encoding"}
READS = ("GET", "HEAD")


@dataclass(frozen=True)
class Answer:
    """Answered by the proxy; the server never hears of it."""

    code: int
    retry_after_s: int | None = None


@dataclass(frozen=True)
class Drop:
    """The connection breaks, before the server hears of it or `after` it has done it."""

    after: bool = False


@dataclass(frozen=True)
class Stall:
    """Accepted, and never answered."""


@dataclass(frozen=True)
class Watch:
    """A watch that ends with 410, says nothing at all, or tells events twice and out of order.

    `broken`: it is cut off in the middle of a line after so many events.
    """

    how: Literal["gone", "silent", "jumbled", "broken"]


Fault = Answer | Drop | Stall | Watch


@dataclass(frozen=True)
class Passed:
    """One request as it came; `number` counts from 1, `write` counts those that write."""

    number: int
    write: int
    method: str
    path: str
    query: dict[str, str]
    at_s: float

    @property
    def writes(self) -> bool:
        """Whether it changes anything but a Lease."""
        return self.method not in READS and not self.of_lease

    @property
    def of_lease(self) -> bool:
        """Whether it is about leadership."""
        return "/leases" in self.path

    @property
    def watches(self) -> bool:
        """Whether it asks for a watch."""
        return "watch" in self.query


Decides = Callable[[Passed], Fault | None]


def sound(_: Passed) -> Fault | None:
    """No fault."""
    return None


@dataclass
class Schedule:
    """Faults drawn from a seed for the first `count` requests that may have one, at a rate."""

    seed: int
    rate: float = 0.12
    count: int = 120
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def __call__(self, passed: Passed) -> Fault | None:
        """As `FaultProxy.fault`."""
        if passed.of_lease or self.count <= 0:
            return None
        self.count -= 1
        if self._random.random() >= self.rate:
            return None
        return self._random.choice(_WATCHING if passed.watches else _OTHER)


_WATCHING: tuple[Fault, ...] = (
    Answer(410),
    Answer(503),
    Drop(),
    Watch("gone"),
    Watch("jumbled"),
    Watch("jumbled"),
    Watch("broken"),
)
_OTHER: tuple[Fault, ...] = (
    Answer(409),
    Answer(429, retry_after_s=1),
    Answer(500),
    Answer(503),
    Drop(),
    Drop(after=True),
)


@dataclass
class FaultProxy:
    """In front of `upstream`. `after_write` hears of every write once the server has done it."""

    upstream: str
    fault: Decides = sound
    after_write: Callable[[Passed], Awaitable[None]] | None = None
    passed: list[Passed] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    seed: int = 1
    _stalled: asyncio.Event = field(default_factory=asyncio.Event)
    _came: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Its address while it runs."""
        self._random = random.Random(self.seed)
        context = ssl._create_unverified_context()
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            ended_sockets() as socket_factory,
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=context, socket_factory=socket_factory),
                timeout=timeout,
                auto_decompress=True,
            ) as self._session,
            served(self._handled, self._stalled.set) as address,
        ):
            yield address

    def writes(self, since_s: float = float("-inf")) -> list[Passed]:
        """What wrote from then on, Leases apart."""
        return [passed for passed in self.passed if passed.writes and passed.at_s >= since_s]

    def count(self, since_s: float, until_s: float) -> int:
        """Requests in a span of time, renewals of the Lease apart."""
        return sum(1 for p in self.passed if since_s <= p.at_s < until_s and not p.of_lease)

    async def wrote(self, count: int, *, within_s: float) -> None:
        """Until there have been so many writes."""
        async with asyncio.timeout(within_s):
            while len(self.writes()) < count:
                await self._came.wait()

    async def quiet(self, for_s: float, *, within_s: float) -> None:
        """Until nothing has been written for so long."""
        async with asyncio.timeout(within_s):
            while True:
                count = len(self.writes())
                try:
                    async with asyncio.timeout(for_s):
                        while len(self.writes()) == count:
                            await self._came.wait()
                except TimeoutError:
                    return

    async def _handled(self, request: web.Request) -> web.StreamResponse:
        writes = request.method not in READS and "/leases" not in request.path
        passed = Passed(
            len(self.passed) + 1,
            len(self.writes()) + int(writes),
            request.method,
            request.path,
            dict(request.query),
            now_s(),
        )
        self.passed.append(passed)
        self._came.set()
        self._came = asyncio.Event()
        fault = self.fault(passed)
        if fault is not None:
            self.faults[str(fault)] += 1
        match fault:
            case Answer(code, retry_after_s):
                wait = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
                return status(code, f"the proxy answers {code}", **wait)
            case Drop(after=False):
                return _cut(request)
            case Stall():
                await self._stalled.wait()
                return _cut(request)
        return await self._forwarded(request, passed, fault)

    async def _forwarded(
        self, request: web.Request, passed: Passed, fault: Fault | None
    ) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP_BY_HOP}
        body = await request.read()
        url = self.upstream + request.path_qs
        async with self._session.request(
            request.method, url, headers=headers, data=body or None, allow_redirects=False
        ) as answer:
            if passed.watches and answer.status == 200:
                response = web.StreamResponse(headers={"Content-Type": "application/json"})
                with suppress(ConnectionError):  # whoever watched may go at any time
                    await response.prepare(request)
                    await self._watched(request, response, answer, fault)
                return response
            text = await answer.read()
            if passed.writes and self.after_write is not None:
                await self.after_write(passed)
            if fault == Drop(after=True):
                return _cut(request)
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in HOP_BY_HOP}
            return web.Response(status=answer.status, headers=kept, body=text)

    async def _watched(
        self,
        request: web.Request,
        response: web.StreamResponse,
        answer: aiohttp.ClientResponse,
        fault: Fault | None,
    ) -> None:
        how = fault.how if isinstance(fault, Watch) else None
        if how == "gone":
            gone = {"kind": "Status", "code": 410, "message": "too old resource version"}
            await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return
        if how == "silent":
            await self._stalled.wait()
            return
        held: list[bytes] = []
        told = 0
        async for line in _lines(answer):
            if how == "jumbled":
                line = self._jumbled(held, line)
            if how == "broken" and told >= 2 and b'"BOOKMARK"' not in line:
                await response.write(line[: len(line) // 2])
                _cut(request)
                return
            told += 1
            if line:
                await response.write(line)

    def _jumbled(self, held: list[bytes], line: bytes) -> bytes:
        """Events of earlier and this one again, in an order of chance; the last one comes last.

        A watch may repeat what it told before it broke, but a server never ends with old news.
        """
        if b'"BOOKMARK"' in line:
            return line
        held.append(line)
        again = self._random.sample(held, k=min(len(held), 3))
        return b"".join([*again, line])


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    rest = b""
    async for piece in answer.content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line + b"\n"


def _cut(request: web.Request) -> web.Response:
    """Break the connection, whatever was to be said."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=500)


def kubeconfig(path: Path, url: str, token: str = "admin-token") -> Path:
    """A kubeconfig file of a server without TLS."""
    config: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "proxied",
        "contexts": [{"name": "proxied", "context": {"cluster": "proxied", "user": "proxied"}}],
        "clusters": [{"name": "proxied", "cluster": {"server": url}}],
        "users": [{"name": "proxied", "user": {"token": token}}],
    }
    path.write_text(yaml.safe_dump(config))
    return path
