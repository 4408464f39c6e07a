"""One worker's or pool daemon's HTTP face, as the router calls it: signed, bounded in time."""

import asyncio
import io
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
)
from typing import NoReturn, TypeVar
from urllib.parse import quote

import aiohttp
from pydantic import BaseModel, ValidationError
from yarl import URL

from kimi_runtime import clock
from kimi_runtime.auth import HEADER, NONCE_BYTES, sign
from kimi_runtime.errors import (
    DeadlineExceeded,
    KimistackError,
    Overloaded,
    ProtocolError,
    RequestError,
    Unavailable,
    WorkerFailed,
)
from kimi_runtime.router.trust import PoolTrust
from kimi_runtime.spec.request import ErrorBody, GenerateChunk, GenerateRequest
from kimi_runtime.spec.umbp import FeedBatch, FeedHello, FeedSnapshotPage, HintBatch
from kimi_runtime.spec.worker import LoadReport, WorkerInfo
from kimi_runtime.umbp.feed import decode_line, feed_path

T = TypeVar("T", bound=BaseModel)

MAX_LINE_BYTES = 64 * 2**20
"""A hand-off of a million tokens is a line of about 5 MB; beyond this the peer is broken."""
CONNECT_S = 2.0
RELEASE_S = 2.0
TRACE_HEADER = "X-Request-ID"
FEED_SILENCE_S = 10.0
"""Owners send a heartbeat every second; silence for this long means that nobody is there."""


def open_http() -> aiohttp.ClientSession:
    """The connections that all `PeerClient`s of a router share."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


class PeerAbsent(WorkerFailed):
    """No connection to the peer came about: it has not seen the call."""


class PeerClient:
    """Calls one peer over a shared `aiohttp.ClientSession`.

    `trust` says what certificate a peer whose `url` begins with https must show; None: one that the
    system trusts, made out to the host that is called. Raises WorkerFailed where the peer can't be
    reached (PeerAbsent) or breaks off, and the error the peer sent where it answers with one.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        name: str,
        url: str,
        call_key: bytes,
        *,
        trust: PoolTrust | None = None,
    ) -> None:
        self.name, self.url = name, url.rstrip("/")
        self._http, self._call_key = http, call_key
        self._trust = (trust or PoolTrust()) if self.url.startswith("https:") else None
        self._streams: set[aiohttp.ClientResponse] = set()
        self._unanswered: set[asyncio.Timeout] = set()

    async def info(self, *, within_s: float) -> WorkerInfo:
        """`GET /info`."""
        return await self._get("/info", WorkerInfo, within_s)

    async def load(self, *, within_s: float, heard: tuple[int, int] | None = None) -> LoadReport:
        """`GET /load`. `heard` is epoch and number of the newest report that arrived here.

        It renews the worker's lease, which must not rest on answers that nobody receives.
        """
        newest = "none" if heard is None else f"{heard[0]}.{heard[1]}"
        return await self._get(f"/load?heard={newest}", LoadReport, within_s)

    async def release(self, ticket: str, *, trace_id: str) -> None:
        """`POST /handoff/{ticket}/release`: the hand-off's blocks are free again."""
        limits = aiohttp.ClientTimeout(total=RELEASE_S, connect=CONNECT_S)
        path = f"/handoff/{quote(ticket, safe='')}/release"
        async with self._call("POST", path, b"", limits, {TRACE_HEADER: trace_id}) as response:
            await response.read()

    async def hint(self, batch: HintBatch, *, within_s: float) -> None:
        """`POST /hint`: tell a pool where sessions stand."""
        limits = aiohttp.ClientTimeout(total=within_s, connect=min(CONNECT_S, within_s))
        body = batch.model_dump_json(exclude_defaults=True).encode()
        async with self._call("POST", "/hint", body, limits) as response:
            await response.read()

    async def generate(
        self, request: GenerateRequest, *, trace_id: str
    ) -> AsyncGenerator[GenerateChunk, None]:
        """`POST /generate`: the chunks up to the one with `finish`, within the request's deadline.

        Closing the iterator closes the connection, which cancels the request at the worker.
        """
        # a worker of an earlier version refuses what it does not know, even if it asks for nothing
        body = request.model_dump_json(exclude_defaults=True).encode()
        limits = aiohttp.ClientTimeout(total=None, connect=CONNECT_S)
        headers = {TRACE_HEADER: trace_id, "Content-Type": "application/json"}
        async with AsyncExitStack() as held:
            call = self._call("POST", "/generate", body, limits, headers)
            response = await self._answered(held, call)
            self._streams.add(response)
            finished = False
            try:
                async with aclosing(_lines(response.content)) as lines:
                    async for line in lines:
                        chunk = self._chunk(line)
                        yield chunk
                        if chunk.finish is not None:
                            finished = True
                            return
            finally:
                self._streams.discard(response)
                if not finished:
                    response.close()
            raise WorkerFailed(f"{self.name} broke off its answer before the end")

    async def feed(
        self, epoch: int | None, after: int
    ) -> AsyncGenerator[FeedHello | FeedSnapshotPage | FeedBatch, None]:
        """`GET /feed`: parsed lines until the owner ends the stream."""
        limits = aiohttp.ClientTimeout(total=None, connect=CONNECT_S, sock_read=FEED_SILENCE_S)
        async with (
            self._call("GET", feed_path(epoch, after), b"", limits) as response,
            aclosing(_lines(response.content)) as lines,
        ):
            async for line in lines:
                yield decode_line(line)

    def abort_streams(self) -> None:
        """The peer is lost: end every generation that waits for it with WorkerFailed."""
        while self._unanswered:
            self._unanswered.pop().reschedule(0.0)
        for response in list(self._streams):
            response.close()

    async def _answered(
        self, held: AsyncExitStack, call: AbstractAsyncContextManager[aiohttp.ClientResponse]
    ) -> aiohttp.ClientResponse:
        """Enter `call` in `held`; WorkerFailed once the peer is lost.

        Headers come with the first ids, so this wait takes as long as queue and prefill do.
        """
        wait = asyncio.timeout(None)
        try:
            async with wait:
                self._unanswered.add(wait)
                return await held.enter_async_context(call)
        except TimeoutError as exc:
            raise WorkerFailed(f"{self.name} was lost before it answered") from exc
        finally:
            self._unanswered.discard(wait)

    async def _get(self, path: str, answer: type[T], within_s: float) -> T:
        limits = aiohttp.ClientTimeout(total=within_s, connect=min(CONNECT_S, within_s))
        async with self._call("GET", path, b"", limits) as response:
            return answer.model_validate_json(await response.read())

    @asynccontextmanager
    async def _call(
        self,
        method: str,
        path: str,
        body: bytes,
        limits: aiohttp.ClientTimeout,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        nonce = secrets.token_bytes(NONCE_BYTES)
        signed = sign(self._call_key, method, path, body, unix_s=clock.unix_s(), nonce=nonce)
        try:
            async with self._http.request(
                method,
                URL(f"{self.url}{path}", encoded=True),  # as it was signed
                data=io.BytesIO(body) if body else None,  # sent in pieces, not in one write
                headers={HEADER: signed, **(headers or {})},
                timeout=limits,
                ssl=True if self._trust is None else self._trust.context(),
                server_hostname=None if self._trust is None else self._trust.name,
            ) as response:
                if response.status != 200:
                    self._refuse(response.status, await response.read())
                yield response
        except aiohttp.ClientConnectorCertificateError as exc:
            raise PeerAbsent(
                f"{self.name} shows a certificate that is not trusted: {exc.certificate_error}"
            ) from exc
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            absent = isinstance(exc, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
            # clients may read this: no addresses
            raise (PeerAbsent if absent else WorkerFailed)(
                f"{self.name} did not answer {path.split('?')[0]} ({type(exc).__name__})"
            ) from exc
        except ValidationError as exc:
            raise WorkerFailed(f"{self.name} sent what its wire format does not allow") from exc

    def _chunk(self, line: bytes) -> GenerateChunk:
        chunk = GenerateChunk.model_validate_json(line)
        if chunk.error is not None:
            raise error_of(chunk.error)
        return chunk

    def _refuse(self, status: int, body: bytes) -> NoReturn:
        try:
            raise error_of(ErrorBody.model_validate_json(body))
        except ValidationError as exc:
            raise WorkerFailed(f"{self.name} answered {status} without an error body") from exc


def error_of(body: ErrorBody) -> KimistackError:
    """The exception that an error body from a worker stands for."""
    match body.status:
        case 429:
            return Overloaded(body.message, retry_after_s=body.retry_after_s or 1.0)
        case 503:
            return Unavailable(body.message)
        case 504:
            return DeadlineExceeded(body.message)
        case 400 | 404 | 413:
            return RequestError(body.message, param=body.param, code=body.code)
        case _:
            return WorkerFailed(body.message)


async def _lines(stream: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """Lines of any length up to `MAX_LINE_BYTES`; a last line without newline is dropped: cut."""
    held: list[bytes] = []
    held_bytes = 0
    async for data in stream.iter_any():
        *ends, rest = data.split(b"\n")
        for end in ends:
            held.append(end)
            line = b"".join(held)
            held, held_bytes = [], 0
            if line:
                yield line
        held.append(rest)
        held_bytes += len(rest)
        if held_bytes > MAX_LINE_BYTES:
            raise ProtocolError(f"a line of more than {MAX_LINE_BYTES} bytes")
