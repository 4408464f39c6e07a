"""Another daemon's HTTP face, as a daemon calls it: signed, bounded in time and size."""

import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError
from yarl import URL

from kimi_runtime import clock
from kimi_runtime.auth import HEADER, NONCE_BYTES, sign
from kimi_runtime.errors import PeerGone, ProtocolError, TransferLate
from kimi_runtime.spec.peers import GiveBackAnswer, GiveBackRequest, LendAnswer, LendRequest
from kimi_runtime.spec.umbp import FeedBatch, FeedHello, FeedSnapshotPage
from kimi_runtime.umbp.feed import decode_line

CONNECT_S = 2.0
FEED_SILENCE_S = 5.0
"""Owners send a heartbeat every second."""

LINE_BYTES = 4 << 20
"""A page of a snapshot has 150 kB."""

MAX_ANSWER_BYTES = 32 << 20

_Answer = TypeVar("_Answer", bound=BaseModel)


class OwnerBusy(PeerGone):
    """The owner is there and lends nothing now: it starts, stops, or has lent enough."""


def open_http() -> aiohttp.ClientSession:
    """The connections that all `OwnerCalls` of a daemon share."""
    return aiohttp.ClientSession(read_bufsize=LINE_BYTES)


class OwnerCalls:
    """Calls to one owner. Raises PeerGone, TransferLate, and ProtocolError for what it can't mean.

    `call_key` is the one to sign with.
    """

    def __init__(self, http: aiohttp.ClientSession, name: str, url: str, call_key: bytes) -> None:
        self.name, self.url = name, url.rstrip("/")
        self._http, self._call_key = http, call_key

    async def feed(
        self, epoch: int | None, after: int
    ) -> AsyncGenerator[FeedHello | FeedSnapshotPage | FeedBatch, None]:
        """`GET /feed`: lines until the owner ends the stream."""
        query = f"?after={after}" + ("" if epoch is None else f"&epoch={epoch}")
        limits = aiohttp.ClientTimeout(total=None, connect=CONNECT_S, sock_read=FEED_SILENCE_S)
        async with self._call("GET", f"/feed{query}", b"", limits) as response:
            async for line in response.content:
                if line.endswith(b"\n"):  # else it was cut off
                    yield decode_line(line)

    async def lend(self, asked: LendRequest, *, within_s: float) -> LendAnswer:
        """`POST /lend`."""
        return await self._post("/lend", asked, LendAnswer, within_s)

    async def give_back(self, asked: GiveBackRequest, *, within_s: float) -> bool:
        """`POST /give_back`: whether the pin held all the time."""
        return (await self._post("/give_back", asked, GiveBackAnswer, within_s)).held

    async def _post(
        self, path: str, asked: BaseModel, answer: type[_Answer], within_s: float
    ) -> _Answer:
        if within_s <= 0:
            raise TransferLate(f"no time is left to ask {self.name}")
        limits = aiohttp.ClientTimeout(total=within_s, connect=min(CONNECT_S, within_s))
        async with self._call("POST", path, asked.model_dump_json().encode(), limits) as response:
            body = bytearray()
            async for part in response.content.iter_any():
                body += part
                if len(body) > MAX_ANSWER_BYTES:
                    raise ProtocolError(f"{self.name} answers {path} with too much")
            return answer.model_validate_json(bytes(body))

    @asynccontextmanager
    async def _call(
        self, method: str, path: str, body: bytes, limits: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        nonce = secrets.token_bytes(NONCE_BYTES)
        signed = sign(self._call_key, method, path, body, unix_s=clock.unix_s(), nonce=nonce)
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
