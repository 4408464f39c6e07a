"""A worker's HTTP app: token ids in, token ids out, for routers of the same deployment only."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import FastAPI
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from kimi_runtime import clock
from kimi_runtime.auth import HEADER, OPEN_PATHS, ReplayGuard, verify
from kimi_runtime.engine.adapters.base import Adapter
from kimi_runtime.errors import KimistackError, RequestError, Unavailable
from kimi_runtime.server.app import raise_http_errors
from kimi_runtime.server.asgi import Trace, Traced, read_body, trace_of
from kimi_runtime.server.faults import error_body
from kimi_runtime.server.fence import Fence
from kimi_runtime.server.lease import Lease
from kimi_runtime.server.metrics import CONTENT_TYPE, WorkerMetrics
from kimi_runtime.server.stream import NDJSON, Streamed
from kimi_runtime.spec.request import GenerateChunk, GenerateRequest, HandOffProgress, Sampling
from kimi_runtime.spec.worker import LoadReport
from kimi_runtime.umbp.serve_feed import Pulse, feed_lines, follow_from

MAX_BODY_BYTES = 64 * 2**20
"""A prompt of a million ids is 7 MB; its hand-off 5 MB."""
STALL_S = 60.0
"""A router that takes nothing for this long is gone. Longer than its own limit for clients."""
FEED_INTERVAL_S = 0.02
DRAIN_FILE_INTERVAL_S = 0.25
PROBE_S = 10.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class WorkerServer:
    """The adapter behind HTTP. `ready` turns true once a generation passed.

    `leaving`: routers are asked to plan nothing more onto it; what they do send is served.
    """

    adapter: Adapter
    call_keys: Sequence[bytes]
    drain_file: Path | None = None
    lease_s: float | None = None
    pulse: Pulse = field(default_factory=Pulse)
    ready: bool = False
    leaving: bool = False
    draining: bool = False
    obstacle: str = "no generation has passed yet"
    fence: Fence = field(init=False)
    _guard: ReplayGuard = field(default_factory=ReplayGuard)

    def __post_init__(self) -> None:
        """Put up the fence: it comes down when the first router has heard a report."""
        self.fence = Fence(Lease(self.lease_s, epoch=self.adapter.info.epoch, now_s=clock.now_s()))

    async def drain(self, *, within_s: float) -> None:
        """Refuse new requests, let the running ones finish, then cancel them; end the feeds."""
        self.draining = True
        await self.adapter.drain(within_s=within_s)
        self.pulse.close()

    def load(self, heard: str | None = None) -> LoadReport:
        """The adapter's report; draining also where the drain file says so, or the lease is over.

        `heard`: what the router says of the report before. RequestError if that is no such word.
        """
        report = self.adapter.load()
        self.fence.reported(report.seq, heard)
        leaving = self.leaving or self.fence.up
        return report.model_copy(update={"draining": True}) if leaving else report

    async def watch_drain_file(self) -> None:
        """Keep `leaving` true while the drain file is not empty, until cancelled."""
        while self.drain_file is not None:
            try:
                self.leaving = bool(self.drain_file.read_bytes().strip())
            except OSError:
                self.leaving = False
            await asyncio.sleep(DRAIN_FILE_INTERVAL_S)

    async def signed_body(self, request: Request) -> bytes:
        """The body of an internal call; Unauthorized unless it is signed with the call key."""
        body = await read_body(request, limit=MAX_BODY_BYTES, stall_s=STALL_S)
        target = request.scope["raw_path"].decode("latin-1")
        if query := request.scope["query_string"].decode("latin-1"):
            target += f"?{query}"
        now_s = clock.unix_s()
        header = request.headers.get(HEADER)
        nonce = verify(self.call_keys, header, request.method, target, body, unix_s=now_s)
        self._guard.accept(nonce, unix_s=now_s)
        return body

    async def admit(self, scope: Scope) -> None:
        """Refuse an unsigned internal call before its body is read."""
        if scope["path"] not in OPEN_PATHS and not any(
            name == HEADER.lower().encode() for name, _ in scope["headers"]
        ):
            verify(self.call_keys, None, scope["method"], scope["path"], b"", unix_s=0.0)

    async def watch_feed(self) -> None:
        """Wake the feed's followers when the engine's blocks change, until cancelled."""
        seen = -1
        while True:
            seq = self.adapter.feed.seq
            if seq != seen:
                seen = seq
                self.pulse.fire()
            await asyncio.sleep(FEED_INTERVAL_S)

    async def probe(self) -> None:
        """Let one generation pass; repeated every second until one does."""
        info = self.adapter.info
        while not self.ready:
            request = GenerateRequest(
                request_id=f"readyz-{info.epoch}",
                ids=(1, 2, 3),
                sampling=Sampling(temperature=0.0, max_tokens=1, ignore_eos=True),
                deadline_ms=int(PROBE_S * 1000),
                tenant="readyz",
                router="readyz",
            )
            try:
                async with aclosing(self.adapter.generate(request)) as chunks:
                    async for chunk in chunks:
                        self.ready = self.ready or chunk.finish is not None
            except KimistackError as exc:
                if str(exc) != self.obstacle:
                    _log.warning("not ready", extra={"fields": {"why": str(exc)}})
                self.obstacle = str(exc)
                await asyncio.sleep(1.0)


def worker_app(server: WorkerServer) -> FastAPI:
    """The app of a running worker."""
    adapter = server.adapter
    metrics = WorkerMetrics(adapter)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    async def generate(request: Request) -> Streamed:
        body = await server.signed_body(request)
        trace = trace_of(request.scope)
        wanted = _parsed(body)
        trace.fields |= {
            "wire_id": wanted.request_id,
            "router": wanted.router,
            "prompt_tokens": len(wanted.ids),
            "leg": "prefill" if wanted.kv.offer else "decode" if wanted.kv.take else "whole",
        }
        return Streamed(
            _lines(server, wanted, trace, metrics),
            media_type=NDJSON,
            last_words=lambda error: _line(GenerateChunk(error=error_body(error))),
            stall_s=STALL_S,
        )

    async def info(request: Request) -> Response:
        await server.signed_body(request)
        return _json(adapter.info.model_dump_json())

    async def load(request: Request) -> Response:
        await server.signed_body(request)
        return _json(server.load(request.query_params.get("heard")).model_dump_json())

    async def feed(request: Request) -> Streamed:
        await server.signed_body(request)
        following = follow_from(request.query_params)
        lines = feed_lines(adapter.feed, server.pulse, following, interval_s=FEED_INTERVAL_S)
        return Streamed(
            _all(lines), media_type=NDJSON, last_words=lambda error: b"", stall_s=STALL_S
        )

    async def progress(request: Request) -> Streamed:
        trace_of(request.scope).quiet = True
        await server.signed_body(request)
        after = follow_from(request.query_params).after
        lines = adapter.progress(request.path_params["ticket"], after)
        return Streamed(
            _progress_lines(lines),
            media_type=NDJSON,
            last_words=lambda error: b"",
            stall_s=STALL_S,
        )

    async def release(request: Request) -> Response:
        trace_of(request.scope).quiet = True
        await server.signed_body(request)
        return JSONResponse({"released": await adapter.release(request.path_params["ticket"])})

    async def healthz(request: Request) -> Response:
        del request
        return JSONResponse({"status": "ok", "name": adapter.info.name})

    async def readyz(request: Request) -> Response:
        del request
        if server.draining:
            raise Unavailable("this worker is shutting down")
        if not server.ready:
            raise Unavailable(f"not ready: {server.obstacle}")
        return JSONResponse({"status": "ready"})

    async def show_metrics(request: Request) -> Response:
        del request
        return Response(metrics.text(), headers={"content-type": CONTENT_TYPE.decode()})

    app.add_route("/generate", generate, ["POST"])
    app.add_route("/info", info, ["GET"])
    app.add_route("/load", load, ["GET"])
    app.add_route("/feed", feed, ["GET"])
    app.add_route("/handoff/{ticket}/progress", progress, ["GET"])
    app.add_route("/handoff/{ticket}/release", release, ["POST"])
    app.add_route("/healthz", healthz, ["GET"])
    app.add_route("/readyz", readyz, ["GET"])
    app.add_route("/metrics", show_metrics, ["GET"])
    raise_http_errors(app)
    app.add_middleware(
        Traced,
        render=lambda error: error_body(error).model_dump(),
        observe=metrics.observe,
        admit=server.admit,
    )
    return app


@asynccontextmanager
async def serving(
    adapter: Adapter,
    call_keys: Sequence[bytes],
    drain_file: Path | None = None,
    lease_s: float | None = None,
) -> AsyncIterator[WorkerServer]:
    """A worker's server with its background work, until the block ends."""
    server = WorkerServer(adapter, call_keys, drain_file, lease_s)
    async with asyncio.TaskGroup() as tasks:
        background = [
            tasks.create_task(server.watch_feed(), name="watch feed"),
            tasks.create_task(server.probe(), name="probe"),
            tasks.create_task(server.watch_drain_file(), name="watch drain file"),
            tasks.create_task(server.fence.watch(), name="watch lease"),
        ]
        try:
            yield server
        finally:
            for task in background:
                task.cancel()


async def _lines(
    server: WorkerServer, wanted: GenerateRequest, trace: Trace, metrics: WorkerMetrics
) -> AsyncGenerator[bytes, None]:
    last_s, first, ids = clock.now_s(), True, 0
    async with aclosing(server.fence.within(server.adapter.generate(wanted))) as chunks:
        async for chunk in chunks:
            now_s = clock.now_s()
            metrics.chunk(now_s - last_s, first=first)
            last_s, first, ids = now_s, False, ids + len(chunk.ids)
            trace.fields["output_ids"] = ids
            if chunk.finish is not None:
                trace.fields["finish"] = chunk.finish
            yield _line(chunk)


async def _progress_lines(
    lines: AsyncGenerator[HandOffProgress, None],
) -> AsyncGenerator[bytes, None]:
    async with aclosing(lines):
        async for line in lines:
            yield line.model_dump_json(exclude_defaults=True).encode() + b"\n"


async def _all(lines: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    async for line in lines:
        yield line


def _parsed(body: bytes) -> GenerateRequest:
    try:
        return GenerateRequest.model_validate_json(body)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise RequestError(f"{place or 'body'}: {first['msg']}", param=place or None) from exc


def _line(chunk: GenerateChunk) -> bytes:
    return chunk.model_dump_json(exclude_defaults=True).encode() + b"\n"


def _json(text: str) -> Response:
    return Response(text, media_type="application/json")
