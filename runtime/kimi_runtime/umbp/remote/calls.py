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
from kimi_runtime.umbp.feed import decode_line
from kimi_runtime.umbp.remote.messages import (
    give_back_message,
    lend_answer,
    lend_message,
    offer_answer,
    offer_message,
)
from kimi_runtime.umbp.rpc.client import RpcClient
from kimi_runtime.umbp.rpc.methods import GIVE_BACK, LEND, OFFER, PORT_HEADER

CONNECT_S = 2.0
FEED_SILENCE_S = 5.0
"""Owners send a heartbeat every second."""

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
    gRPC; None: it is asked nothing until its feed has said so.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        name: str,
        url: str,
        call_keys: Sequence[bytes],
        port: int | None = None,
    ) -> None:
        self.name, self.url = name, url.rstrip("/")
        self._http, self._call_keys = http, call_keys
        self._port: int | None = None
        self._rpc: RpcClient | None = None
        self._answers_at(port)

    async def feed(
        self, epoch: int | None, after: int
    ) -> AsyncGenerator[FeedHello | FeedSnapshotPage | FeedBatch, None]:
        """`GET /feed`: lines until the owner ends the stream."""
        query = f"?after={after}" + ("" if epoch is None else f"&epoch={epoch}")
        limits = aiohttp.ClientTimeout(total=None, connect=CONNECT_S, sock_read=FEED_SILENCE_S)
        async with self._call("GET", f"/feed{query}", b"", limits) as response:
            port = response.headers.get(PORT_HEADER, "")
            if port.isdecimal():
                stale = self._answers_at(int(port))
                if stale is not None:
                    await stale.aclose()
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
        """End the connection for calls."""
        if self._rpc is not None:
            await self._rpc.aclose()
            self._rpc = self._port = None

    def _answers_at(self, port: int | None) -> RpcClient | None:
        """Call at this port from now on; the client of another port before, to be closed."""
        if port is None or port == self._port:
            return None
        stale, self._port = self._rpc, port
        host = URL(self.url).host or ""
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._rpc = RpcClient(target, self._call_keys, what=f"{self.name} at {target}")
        return stale

    def _known(self) -> RpcClient:
        if self._rpc is None:
            raise OwnerBusy(f"{self.name} has not said yet where it takes calls")
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
            ) as response:
                if response.status in (429, 503):
                    raise OwnerBusy(f"{what} answers {response.status} to {path.split('?')[0]}")
                if response.status != 200:
                    raise PeerGone(f"{what} answers {response.status} to {path.split('?')[0]}")
                yield response
        except TimeoutError as exc:
            raise TransferLate(f"{what} did not answer {path.split('?')[0]} in time") from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise PeerGone(f"{what} can't be reached: {exc}") from exc
        except ValidationError as exc:
            raise ProtocolError(f"{what} sent what the wire format does not allow") from exc
        except ValueError as exc:  # a line without end, or an address that is none
            raise ProtocolError(f"{what}: {exc}") from exc
