"""Calling a daemon's gRPC: signed, with a deadline, every failure one of our errors."""

import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kimi_runtime import auth, clock
from kimi_runtime.errors import (
    DeadlineExceeded,
    KimistackError,
    NotFound,
    Overloaded,
    PeerGone,
    ProtocolError,
    RequestError,
    Unauthorized,
    Unavailable,
)
from kimi_runtime.umbp.rpc.methods import (
    AUTH_KEY,
    MAX_ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    SIGNED_AS,
    Answer,
    Asked,
    Method,
)

RETRY_AFTER_S = 0.1
CLOSE_S = 0.1

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
    ("grpc.enable_http_proxy", 0),  # daemons reach each other, or nobody does
    ("grpc.enable_retries", 0),  # a request is signed for one use
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),  # which is also how long a connection may take
    ("grpc.max_reconnect_backoff_ms", 2000),
]


class RpcClient:
    """Calls to one daemon at `target` (`host:port` or `unix:PATH`), which errors call `what`.

    The first of `call_keys` signs; they may change in place. `credentials` None: no TLS;
    `server_name` is what the daemon's certificate must name, if not the target's host.
    """

    def __init__(
        self,
        target: str,
        call_keys: Sequence[bytes],
        *,
        what: str,
        credentials: "grpc.ChannelCredentials | None" = None,
        server_name: str | None = None,
    ) -> None:
        self._keys, self._what = call_keys, what
        options: list[tuple[str, object]] = list(_OPTIONS)
        if server_name is not None:
            options.append(("grpc.ssl_target_name_override", server_name))
        self._channel = (
            grpc.aio.insecure_channel(target, options)
            if credentials is None
            else grpc.aio.secure_channel(target, credentials, options)
        )

    async def call(self, method: Method[Asked, Answer], asked: Asked, *, within_s: float) -> Answer:
        """One answer. DeadlineExceeded, PeerGone (not reached), and what the daemon refuses with:
        Unauthorized, Overloaded, Unavailable, RequestError; ProtocolError for anything else.
        """
        body = _bytes_of(asked)
        with self._mapped(method):
            call = self._channel.unary_unary(method.path)
            return _parsed(method, await call(body, **self._given(method, body, within_s)))

    async def stream(
        self, method: Method[Asked, Answer], asked: Asked, *, within_s: float
    ) -> AsyncGenerator[Answer, None]:
        """Answers as they come; errors as of `call`."""
        body = _bytes_of(asked)
        with self._mapped(method):
            stub = self._channel.unary_stream(method.path)
            call = stub(body, **self._given(method, body, within_s))
            try:
                async for answer in call:
                    yield _parsed(method, answer)
            finally:
                call.cancel()  # who stops reading wants no more of it

    async def aclose(self) -> None:
        """End the connection and what is under way on it."""
        await self._channel.close(CLOSE_S)

    def _given(self, method: Method[Any, Any], body: bytes, within_s: float) -> dict[str, Any]:
        if within_s <= 0:
            raise DeadlineExceeded(f"no time is left to ask {self._what}")
        nonce = secrets.token_bytes(auth.NONCE_BYTES)
        signed = auth.sign(
            self._keys[0], SIGNED_AS, method.path, body, unix_s=clock.unix_s(), nonce=nonce
        )
        return {"timeout": within_s, "metadata": ((AUTH_KEY, signed),)}

    @contextmanager
    def _mapped(self, method: Method[Any, Any]) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as exc:
            name = method.path.rpartition("/")[2]
            raise _error(exc.code(), f"{self._what}, {name}: {exc.details()}") from exc
        except DecodeError as exc:
            raise ProtocolError(f"{self._what} answers what can't be understood") from exc


def _error(code: grpc.StatusCode, text: str) -> KimistackError:
    match code:
        case grpc.StatusCode.UNAVAILABLE:
            return PeerGone(text)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(text)
        case grpc.StatusCode.UNAUTHENTICATED:
            return Unauthorized(text)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Overloaded(text, retry_after_s=RETRY_AFTER_S)
        case grpc.StatusCode.FAILED_PRECONDITION:
            return Unavailable(text)
        case grpc.StatusCode.NOT_FOUND:
            return NotFound(text)
        case grpc.StatusCode.INVALID_ARGUMENT:
            return RequestError(text)
        case _:
            return ProtocolError(text)


def _bytes_of(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def _parsed(method: Method[Asked, Answer], body: bytes) -> Answer:
    message: Any = method.answer
    parsed: Answer = message.FromString(body)
    return parsed
