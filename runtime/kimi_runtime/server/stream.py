"""Streamed answers: server-sent events to clients, JSON lines between processes.

Nothing is buffered here: the next piece is made when the last one was taken, so a slow reader
slows its own generation through the connection's flow control, and one that reads nothing for
`stall_s` is dropped.
"""

import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import ExitStack, aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kimi_runtime.errors import KimistackError
from kimi_runtime.server.asgi import send_json, send_within, trace_of, while_connected

SSE = b"text/event-stream; charset=utf-8"
NDJSON = b"application/x-ndjson"


def sse_event(data: Any, *, event: str | None = None) -> bytes:
    """One server-sent event with JSON data."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {text}\n\n".encode()


SSE_DONE = b"data: [DONE]\n\n"


class Streamed(Response):
    """An ASGI response that sends `pieces` as they come.

    The status is sent with the first piece, so an error before it is an answer of its own; a later
    one becomes `last_words(error)` and the end of the stream. `pieces` is closed in any case, at
    once when the client leaves; then what the answer `owned` is given back.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        *,
        media_type: bytes,
        last_words: Callable[[KimistackError], bytes],
        stall_s: float,
        owned: ExitStack | None = None,
    ) -> None:
        super().__init__()
        self._owned = owned or ExitStack()
        self._pieces, self._media_type = pieces, media_type
        self._last_words, self._stall_s = last_words, stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; raises ClientLeft when the client left or stalled."""
        with self._owned:
            await while_connected(receive, self._send(scope, send))

    async def _send(self, scope: Scope, send: Send) -> None:
        started = False
        async with aclosing(self._pieces) as pieces:
            try:
                async for piece in pieces:
                    if not started:
                        await self._start(send)
                        started = True
                    await self._body(send, piece)
            except KimistackError as exc:
                if not started:
                    raise
                trace_of(scope).outcome = exc.type
                await self._body(send, self._last_words(exc))
        if not started:
            await self._start(send)
        await self._body(send, b"", more=False)

    async def _start(self, send: Send) -> None:
        headers = [
            (b"content-type", self._media_type),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        message = {"type": "http.response.start", "status": 200, "headers": headers}
        await send_within(send, message, stall_s=self._stall_s)

    async def _body(self, send: Send, piece: bytes, *, more: bool = True) -> None:
        message = {"type": "http.response.body", "body": piece, "more_body": more}
        await send_within(send, message, stall_s=self._stall_s)


class Whole(Response):
    """An ASGI response whose JSON body `work` makes; cancelled at once if the client leaves."""

    def __init__(
        self,
        work: Callable[[], Coroutine[Any, Any, Any]],
        *,
        stall_s: float,
        owned: ExitStack | None = None,
    ) -> None:
        super().__init__()
        self._owned = owned or ExitStack()
        self._work, self._stall_s = work, stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; raises what `work` raises, and ClientLeft."""
        with self._owned:
            content = await while_connected(receive, self._work())
            await send_json(send, 200, content, stall_s=self._stall_s)
