"""Another daemon, as a daemon calls it: its feed over HTTP, the rest over gRPC.

All is signed and bounded in time and size.
"""

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import aiohttp
from pydantic import ValidationError
from yarl import URL

from kimi_runtime import clock
from kimi_runtime.auth import HEADER, NONCE_BYTES, sign
from kimi_runtime.errors import (
    DeadlineExceeded,
    Overloaded,
    PeerGone,
    ProtocolError,
    RequestError,
    TransferError,
    TransferLate,
    Unauthorized,
    Unavailable,
)
from kimi_runtime.spec.peers import (
    GiveBackRequest,
    LendAnswer,
    LendRequest,
    OfferAnswer,
    OfferRequest,
)
from kimi_runtime.spec.umbp import FeedBatch, FeedHello, FeedSnapshotPage
from kimi_runtime.umbp.feed import decode_line, feed_path
from kimi_runtime.umbp.remote.messages import (
    give_back_message,
    lend_answer,
    lend_message,
    offer_answer,
    offer_message,
)
from kimi_runtime.umbp.rpc.client import RpcClient
from kimi_runtime.umbp.rpc.methods import GIVE_BACK, LEND, OFFER, PORT_HEADER
from kimi_runtime.umbp.rpc.tls import Tls

CONNECT_S = 2.0
FEED_SILENCE_S = 5.0
"""Owners send a heartbeat every second."""

_CERTIFICATE_HAS_EXPIRED = 10
"""X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL."""

LINE_BYTES = 4 << 20
"""A page of a snapshot has 150 kB."""


class OwnerBusy(PeerGone):
    """The owner is there and lends nothing now: it starts, stops, or has lent enough."""


def open_http() -> aiohttp.ClientSession:
    """The connections that all `OwnerCalls` of a daemon share."""
    return aiohttp.ClientSession(read_bufsize=LINE_BYTES)


class OwnerCalls:
    """Calls to one owner. Raises PeerGone, TransferLate, and ProtocolError for what it can't mean.

    The first of `call_keys` signs; they may change in place. `port` is where the owner answers
    gRPC; None: it is asked nothing until its feed has said so. An owner whose `url` begins with
    https is called by TLS, over gRPC too.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        name: str,
        url: str,
        call_keys: Sequence[bytes],
        port: int | None = None,
        *,
        tls: Tls | None = None,
    ) -> None:
        self.name, self.url = name, url.rstrip("/")
        self._http, self._call_keys = http, call_keys
        self._tls = tls if self.url.startswith("https:") else None
        self._certificate_name = None if self._tls is None else self._tls.files.name
        self._made_for: tuple[int, int] | None = None
        self._rpc: RpcClient | None = None
        self._port = port
        self._stale: list[RpcClient] = []

    async def feed(
        self, epoch: int | None, after: int
    ) -> AsyncGenerator[FeedHello | FeedSnapshotPage | FeedBatch, None]:
        """`GET /feed`: lines until the owner ends the stream."""
        limits = aiohttp.ClientTimeout(total=None, connect=CONNECT_S, sock_read=FEED_SILENCE_S)
        async with self._call("GET", feed_path(epoch, after), b"", limits) as response:
            port = response.headers.get(PORT_HEADER, "")
            if port.isdecimal():
                self._port = int(port)
            await self._close_stale()
            async for line in response.content:
                if line.endswith(b"\n"):  # else it was cut off
                    yield decode_line(line)

    async def lend(self, asked: LendRequest, *, within_s: float) -> LendAnswer:
        """Borrow the leading run of some blocks."""
        with self._mapped():
            return lend_answer(
                await self._known().call(LEND, lend_message(asked), within_s=within_s)
            )

    async def give_back(self, asked: GiveBackRequest, *, within_s: float) -> bool:
        """End a loan; whether the pin held all the time."""
        with self._mapped():
            back = give_back_message(asked)
            return (await self._known().call(GIVE_BACK, back, within_s=within_s)).held

    async def offer(self, asked: OfferRequest, *, within_s: float) -> OfferAnswer:
        """Ask it to take blocks."""
        with self._mapped():
            message = offer_message(asked)
            return offer_answer(await self._known().call(OFFER, message, within_s=within_s))

    async def aclose(self) -> None:
        """End the connections for calls."""
        if self._rpc is not None:
            self._stale.append(self._rpc)
            self._rpc = self._made_for = None
        await self._close_stale()

    async def _close_stale(self) -> None:
        while self._stale:
            await self._stale.pop().aclose()

    def _known(self) -> RpcClient:
        """A client for the owner's port and the newest certificate."""
        if self._port is None:
            raise OwnerBusy(f"{self.name} has not said yet where it takes calls")
        wanted = self._port, self._tls.renewals if self._tls else 0
        if self._rpc is None or self._made_for != wanted:
            if self._rpc is not None:
                self._stale.append(self._rpc)
            host = URL(self.url).host or ""
            target = f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"
            self._rpc = RpcClient(
                target,
                self._call_keys,
                what=f"{self.name} at {target}",
                credentials=self._tls and self._tls.channel_credentials(),
                server_name=self._certificate_name,
            )
            self._made_for = wanted
        return self._rpc

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        """What gRPC's errors say of an owner."""
        try:
            yield
        except TransferError:
            raise
        except DeadlineExceeded as exc:
            raise TransferLate(str(exc)) from exc
        except (Overloaded, Unavailable) as exc:
            raise OwnerBusy(str(exc)) from exc
        except (Unauthorized, RequestError) as exc:
            raise PeerGone(str(exc)) from exc
        except ValidationError as exc:
            raise ProtocolError(f"{self.name} sent what the wire format does not allow") from exc

    @asynccontextmanager
    async def _call(
        self, method: str, path: str, body: bytes, limits: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        nonce = secrets.token_bytes(NONCE_BYTES)
        signed = sign(self._call_keys[0], method, path, body, unix_s=clock.unix_s(), nonce=nonce)
        what = f"{self.name} at {self.url}"
        try:
            async with self._http.request(
                method,
                URL(f"{self.url}{path}", encoded=True),  # as it was signed
                data=body or None,
                headers={HEADER: signed},
                timeout=limits,
                allow_redirects=False,
                ssl=True if self._tls is None else self._tls.client_context,
                server_hostname=self._certificate_name,
            ) as response:
                if response.status in (429, 503):
                    raise OwnerBusy(f"{what} answers {response.status} to {path.split('?')[0]}")
                if response.status != 200:
                    raise PeerGone(f"{what} answers {response.status} to {path.split('?')[0]}")
                yield response
        except TimeoutError as exc:
            raise TransferLate(f"{what} did not answer {path.split('?')[0]} in time") from exc
        except aiohttp.ClientConnectorCertificateError as exc:
            raise PeerGone(f"{what} {_distrust(exc.certificate_error)}") from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise PeerGone(f"{what} can't be reached: {exc}") from exc
        except ValidationError as exc:
            raise ProtocolError(f"{what} sent what the wire format does not allow") from exc
        except ValueError as exc:  # a line without end, or an address that is none
            raise ProtocolError(f"{what}: {exc}") from exc


def _distrust(why: Exception) -> str:
    if getattr(why, "verify_code", None) == _CERTIFICATE_HAS_EXPIRED:
        return "shows a certificate that has expired: renew it there, or correct the clock here"
    return f"shows a certificate that is not trusted: {why}"
