"""The ASGI plumbing both apps share: request ids, bodies with limits, clients that leave or stall.

FastAPI routes requests; what is written here is what it leaves to chance: noticing at once that a
client went away, giving up on one that does not read, and one log line for every request.
"""

import asyncio
import json
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kimi_runtime import clock
from kimi_runtime.errors import BodyLate, BodyTooLarge, KimistackError, NotFound, RequestError
from kimi_runtime.server.faults import InternalError, headers_of
from kimi_runtime.units import format_bytes

T = TypeVar("T")

ABORT = "kimistack.abort"
"""ASGI extension: call it to drop the connection at once, unsent bytes included."""
BODY_S = 120.0
"""A body takes at most this long; whoever sends it slowly holds a slot that others want."""
SLICE_BYTES = 64 * 1024
"""Bodies are sent in slices of this size, so that a stalled reader is noticed."""

_TRACE_ID = re.compile(r"[A-Za-z0-9._:@/+=~-]{1,128}")
_log = logging.getLogger("kimi_runtime.request")


class ClientLeft(Exception):
    """The client closed its connection, or read nothing for too long."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@dataclass(slots=True)
class Trace:
    """What is known of one HTTP request, for its log line and its metrics."""

    id: str
    started_s: float
    status: int = 0
    outcome: str = "ok"
    quiet: bool = False
    """Logged only at debug level while it goes well."""
    fields: dict[str, Any] = field(default_factory=dict)


def trace_of(scope: Scope) -> Trace:
    """The request's trace, made by `Traced`."""
    trace: Trace = scope["kimistack.trace"]
    return trace


class Traced:
    """Outermost middleware: gives every request an id, catches everything, logs one line.

    `observe(path, trace, seconds)` feeds the metrics. `render` writes an error's body. Once
    `closing()` is true, every answer is the last one of its connection.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        render: Callable[[KimistackError], Any],
        observe: Callable[[str, Trace, float], None],
        admit: Callable[[Scope], Awaitable[None]] | None = None,
        closing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._app, self._render, self._observe, self._admit = app, render, observe, admit
        self._closing = closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        trace = Trace(_trace_id(scope), clock.now_s())
        scope["kimistack.trace"] = trace

        async def traced(message: Message) -> None:
            if message["type"] == "http.response.start":
                trace.status = message["status"]
                message["headers"] = [
                    *message.get("headers", []),
                    (b"x-request-id", trace.id.encode()),
                    *([(b"connection", b"close")] if self._closing() else []),
                ]
            await send(message)

        try:
            await self._served(scope, receive, traced, trace)
        finally:
            seconds = clock.now_s() - trace.started_s
            path = _route(scope)
            self._observe(path, trace, seconds)
            fields = {
                "request_id": trace.id,
                "method": scope["method"],
                "path": path,
                "status": trace.status,
                "outcome": trace.outcome,
                "seconds": round(seconds, 6),
                **trace.fields,
            }
            quiet = (trace.quiet or scope["method"] == "GET") and trace.status < 400
            _log.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": fields})

    async def _served(self, scope: Scope, receive: Receive, send: Send, trace: Trace) -> None:
        try:
            try:
                if self._admit is not None:
                    await self._admit(scope)
                await self._app(scope, receive, send)
            except HTTPException as exc:
                raise _of_starlette(exc, scope) from exc
        except ClientLeft as left:
            trace.outcome = left.why
            if trace.status:
                await _abort(scope)
            else:
                trace.status = 499
        except KimistackError as exc:
            trace.outcome = exc.type
            if trace.status:
                await _abort(scope)  # the answer has begun: a cut is all that can be said
            else:
                await send_json(send, exc.status, self._render(exc), headers_of(exc))
        except Exception:
            trace.outcome = "bug"
            _log.exception("request failed", extra={"fields": {"request_id": trace.id}})
            if trace.status:
                await _abort(scope)
            else:
                hidden = InternalError(f"an internal error; the log has it under {trace.id}")
                await send_json(send, 500, self._render(hidden))


def _trace_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            if _TRACE_ID.fullmatch(text):
                return str(text)
    return f"req-{secrets.token_hex(8)}"


def _route(scope: Scope) -> str:
    """The route's template: a bounded set, unlike paths."""
    endpoint = scope.get("endpoint")
    routes = scope["app"].routes if endpoint is not None else ()
    return next((r.path for r in routes if getattr(r, "endpoint", None) == endpoint), "unmatched")


def _of_starlette(exc: HTTPException, scope: Scope) -> KimistackError:
    if exc.status_code == 404:
        return NotFound(
            f"there is no {scope['method']} {scope['path'][:100]!r} here", code="unknown_url"
        )
    if exc.status_code == 405:
        return MethodNotAllowed(f"{scope['path']} does not take {scope['method']}")
    return RequestError(str(exc.detail))


class MethodNotAllowed(RequestError):
    """The route exists, with other methods (HTTP 405)."""

    status = 405


async def _abort(scope: Scope) -> None:
    abort = scope.get("extensions", {}).get(ABORT)
    if abort is not None:
        abort()
        await asyncio.sleep(0)  # the server notes the end before this request ends


async def read_body(request: Request, *, limit: int, stall_s: float) -> bytes:
    """The request's body. BodyTooLarge as soon as it passes `limit`.

    BodyLate when nothing comes for `stall_s`, or when it takes longer than `BODY_S` in all.
    """
    too_large = BodyTooLarge(
        f"the request body passes the limit of {format_bytes(limit)}; send less"
    )
    stated = request.headers.get("content-length", "0")
    if not stated.isdecimal() or int(stated) > limit:
        raise too_large
    parts: list[bytes] = []
    size = 0
    end_s = clock.now_s() + BODY_S
    while True:
        try:
            async with asyncio.timeout(min(stall_s, end_s - clock.now_s())):
                message = await request.receive()
        except TimeoutError as exc:
            raise BodyLate(f"the request body did not come within {stall_s:g} s") from exc
        if message["type"] == "http.disconnect":
            raise ClientLeft("left")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise too_large
        if not message.get("more_body", False):
            return b"".join(parts)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled at once if the client leaves (ClientLeft)."""
    async with asyncio.TaskGroup() as tasks:
        worker = tasks.create_task(_caught(work))
        watcher = tasks.create_task(_until_gone(receive))
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        watcher.cancel()
        if not worker.done():
            worker.cancel()
    if worker.cancelled():
        raise ClientLeft("left")
    result, error = worker.result()
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # None only with an error


async def _caught(work: Coroutine[Any, Any, T]) -> tuple[T | None, Exception | None]:
    try:
        return await work, None
    except Exception as exc:  # handed on, not swallowed: a TaskGroup would wrap it in a group
        return None, exc


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_within(send: Send, message: MutableMapping[str, Any], *, stall_s: float) -> None:
    """Send one message; ClientLeft if the client takes nothing for `stall_s` seconds."""
    try:
        async with asyncio.timeout(stall_s):
            await send(message)
    except TimeoutError as exc:
        raise ClientLeft("stalled") from exc


async def send_json(
    send: Send,
    status: int,
    content: Any,
    headers: list[tuple[bytes, bytes]] | None = None,
    *,
    stall_s: float = 30.0,
) -> None:
    """A whole JSON answer, in slices."""
    body = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    await send_bytes(send, status, body, b"application/json", headers, stall_s=stall_s)


async def send_bytes(
    send: Send,
    status: int,
    body: bytes,
    media_type: bytes,
    headers: list[tuple[bytes, bytes]] | None = None,
    *,
    stall_s: float = 30.0,
) -> None:
    """A whole answer, in slices."""
    start = {
        "type": "http.response.start",
        "status": status,
        "headers": [
            (b"content-type", media_type),
            (b"content-length", str(len(body)).encode()),
            *(headers or []),
        ],
    }
    await send_within(send, start, stall_s=stall_s)
    for place in range(0, max(len(body), 1), SLICE_BYTES):
        message = {
            "type": "http.response.body",
            "body": body[place : place + SLICE_BYTES],
            "more_body": place + SLICE_BYTES < len(body),
        }
        await send_within(send, message, stall_s=stall_s)
