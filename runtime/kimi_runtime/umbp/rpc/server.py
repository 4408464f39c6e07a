"""Answering gRPC: every call is signed, states a deadline, and has a bounded size.

Handlers get the bytes as they came, since those are what is signed. A foreseen error becomes a
status with the error's text; anything else is logged here and told as INTERNAL, without its text.
"""

import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kimi_runtime import auth, clock
from kimi_runtime.errors import (
    ConfigError,
    DeadlineExceeded,
    KimistackError,
    NotFound,
    Overloaded,
    ProtocolError,
    RequestError,
    Unauthorized,
    Unavailable,
)
from kimi_runtime.umbp.rpc.methods import (
    AUTH_KEY,
    MAX_METADATA_BYTES,
    MAX_REQUEST_BYTES,
    SIGNED_AS,
    Answer,
    Asked,
    Method,
)

MAX_CALLS = 512
"""Under way at a time; more are refused with RESOURCE_EXHAUSTED."""

STOP_S = 0.5
"""Calls under way may take this long to end when the daemon stops."""

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.so_reuseport", 0),  # a port that is taken is an error, not shared
]

_STATUS: tuple[tuple[type[KimistackError], grpc.StatusCode], ...] = (
    (Unauthorized, grpc.StatusCode.UNAUTHENTICATED),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Unavailable, grpc.StatusCode.FAILED_PRECONDITION),  # UNAVAILABLE is what gRPC itself says
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (RequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (ProtocolError, grpc.StatusCode.INVALID_ARGUMENT),
    (ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
)

log = logging.getLogger(__name__)


class RpcServer:
    """The methods a daemon answers. Add them all before `serving`."""

    def __init__(
        self, call_keys: Sequence[bytes], refused: Callable[[], None] = lambda: None
    ) -> None:
        """`call_keys` may change in place: any of them is accepted as of now.

        `refused` hears of every call without a valid signature.
        """
        self._refused, self._keys, self._guard = refused, call_keys, auth.ReplayGuard()
        self._services: dict[str, dict[str, grpc.RpcMethodHandler]] = {}

    def unary(
        self, method: Method[Asked, Answer], work: Callable[[Asked], Awaitable[Answer]]
    ) -> None:
        """Answer `method` by `work`."""

        async def answered(body: bytes, context: Any) -> bytes:
            try:
                answer: Any = await work(self._accepted(method, body, context))
            except Exception as exc:
                code, text = self._told(method, exc)
                await context.abort(code, text)
            return bytes(answer.SerializeToString())

        self._add(method.path, grpc.unary_unary_rpc_method_handler(answered))

    def stream(
        self, method: Method[Asked, Answer], work: Callable[[Asked], AsyncGenerator[Answer, None]]
    ) -> None:
        """Answer `method` by what `work` yields; it is closed if its caller leaves."""

        async def answered(body: bytes, context: Any) -> AsyncIterator[bytes]:
            try:
                answer: Any
                async with aclosing(work(self._accepted(method, body, context))) as answers:
                    async for answer in answers:
                        yield answer.SerializeToString()
            except Exception as exc:
                code, text = self._told(method, exc)
                await context.abort(code, text)

        self._add(method.path, grpc.unary_stream_rpc_method_handler(answered))

    @asynccontextmanager
    async def serving(
        self, host: str, port: int, socket: Path, credentials: "grpc.ServerCredentials | None"
    ) -> AsyncIterator[int]:
        """Listen on `host:port` (0: any free), with TLS if given, and on the Unix socket.

        Yields the port. ConfigError if either can't be had. The socket has mode 0600.
        """
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
        server.add_generic_rpc_handlers(
            tuple(
                grpc.method_handlers_generic_handler(service, handlers)
                for service, handlers in self._services.items()
            )
        )
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound = (
                server.add_insecure_port(where)
                if credentials is None
                else server.add_secure_port(where, credentials)
            )
        except RuntimeError as exc:
            raise ConfigError(
                f"grpc_port: {where} can't be listened on; stop who uses it or choose another port"
            ) from exc
        with _bound(server, socket):
            await server.start()
            try:
                yield bound
            finally:
                await server.stop(STOP_S)

    def _accepted(self, method: Method[Asked, Answer], body: bytes, context: Any) -> Asked:
        """The request, if it may be answered."""
        unix_s = clock.unix_s()
        sent = dict(context.invocation_metadata() or ())
        try:
            nonce = auth.verify(
                *(self._keys, sent.get(AUTH_KEY), SIGNED_AS, method.path, body), unix_s=unix_s
            )
            self._guard.accept(nonce, unix_s=unix_s)
        except Unauthorized:
            self._refused()
            raise
        if context.time_remaining() is None:
            raise RequestError(f"{method.path} was called without a deadline: state one")
        try:
            message: Any = method.asked
            asked: Asked = message.FromString(body)
        except DecodeError as exc:
            raise ProtocolError(f"the request of {method.path} does not parse") from exc
        return asked

    def _told(self, method: Method[Any, Any], exc: Exception) -> tuple[grpc.StatusCode, str]:
        for kind, code in _STATUS:
            if isinstance(exc, kind):
                if kind is Unauthorized:
                    log.warning("umbp: refused %s: %s", method.path, exc)
                return code, str(exc)
        log.exception("umbp: %s failed", method.path)
        return grpc.StatusCode.INTERNAL, f"{method.path} failed; the daemon's log says why"

    def _add(self, path: str, handler: grpc.RpcMethodHandler) -> None:
        _, service, name = path.split("/")
        self._services.setdefault(service, {})[name] = handler


@contextmanager
def _bound(server: Any, socket: Path) -> Iterator[None]:
    """The Unix socket, in place of one that a daemon before left: this one owns its arena."""
    socket.unlink(missing_ok=True)
    before = os.umask(0o177)  # there must be no moment at which others could connect
    try:
        server.add_insecure_port(f"unix:{socket}")
    except RuntimeError as exc:
        raise ConfigError(f"the socket {socket} can't be created") from exc
    finally:
        os.umask(before)
    try:
        yield
    finally:
        socket.unlink(missing_ok=True)
