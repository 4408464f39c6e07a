"""The daemon's HTTP face: health, metrics, the feed, and what is told to the pool."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel

from kimi_connect.wire import HintKind
from kimi_runtime import auth, clock
from kimi_runtime.errors import KimistackError, RequestError, Unauthorized, Unavailable
from kimi_runtime.spec.umbp import HintBatch, HintRequest
from kimi_runtime.umbp.metrics import PoolMetrics
from kimi_runtime.umbp.remote.service import Remote
from kimi_runtime.umbp.retention import Hint
from kimi_runtime.umbp.rpc.methods import PORT_HEADER
from kimi_runtime.umbp.second_tier import SecondTier
from kimi_runtime.umbp.serve_feed import feed_lines, follow_from
from kimi_runtime.umbp.state import DaemonState, Phase

WRITE_S = 10.0
"""A follower that takes no byte for this long is cut off; it comes back with its position."""

MAX_FOLLOWERS = 4096
MAX_BODY = 8 << 20
"""A hint of a session of a million tokens has some 600 kB."""

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


_Request = TypeVar("_Request", bound=BaseModel)


@dataclass(slots=True)
class PoolHttp:
    """The routes of a daemon. `rpc_port` is where it answers gRPC, which its feed says."""

    state: DaemonState
    feed_interval_s: float
    rpc_port: int = 0
    followers: int = 0
    _guard: auth.ReplayGuard = field(default_factory=auth.ReplayGuard)

    def app(self) -> web.Application:
        """The application to run."""

        @web.middleware
        async def authenticated(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._authenticated(request, handler)

        app = web.Application(middlewares=[authenticated], client_max_size=MAX_BODY)
        app.router.add_get("/healthz", self.healthz)
        app.router.add_get("/readyz", self.readyz)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/feed", self.feed)
        app.router.add_post("/hint", self.hint)
        return app

    async def healthz(self, request: web.Request) -> web.StreamResponse:
        """The process answers."""
        return web.json_response({"status": "ok", "name": self.state.name})

    async def readyz(self, request: web.Request) -> web.StreamResponse:
        """The arena is mapped, a block went in and out of it, it is still ours; the log is read.

        An SSD that fails later is told here, and does not make the daemon unready: it costs misses.
        """
        state, clients = self.state, self.state.serving()
        if state.phase is not Phase.READY:
            raise Unavailable(state.not_ready())
        if not clients.arena.live:
            raise Unavailable("another daemon replaced the arena file; restart this one")
        pool = clients.pool
        return web.json_response(
            {
                "status": "ready",
                "name": state.name,
                "epoch": clients.arena.epoch,
                "phases": {
                    "arena": "bound",
                    "log": "recovered" if clients.second else "none",
                    "peers": _known(state),
                },
                "blocks": pool.live_blocks,
                "free_bytes": pool.free_pages * pool.page_bytes,
                "evictable_bytes": pool.evictable_pages * pool.page_bytes,
                "total_bytes": pool.total_pages * pool.page_bytes,
                **({"ssd": _ssd(clients.second)} if clients.second is not None else {}),
                **({"peers": _peers(clients.remote)} if clients.remote is not None else {}),
            }
        )

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """Prometheus text."""
        body = PoolMetrics(self.state, lambda: self.followers).exposition()
        return web.Response(
            body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def feed(self, request: web.Request) -> web.StreamResponse:
        """The feed, until the follower leaves."""
        clients = self.state.serving()
        if self.followers >= MAX_FOLLOWERS:
            raise Unavailable(f"{MAX_FOLLOWERS} followers are the limit; try again later")
        following = follow_from(request.query)
        response = web.StreamResponse(
            headers={"Content-Type": "application/x-ndjson", PORT_HEADER: str(self.rpc_port)}
        )
        response.enable_chunked_encoding()
        self.followers += 1
        try:
            await response.prepare(request)
            lines = feed_lines(
                clients.feed, self.state.pulse, following, interval_s=self.feed_interval_s
            )
            async for line in lines:
                async with asyncio.timeout(WRITE_S):
                    await response.write(line)
        except (ConnectionError, TimeoutError):
            log.info("umbp: a follower of the feed left")
        finally:
            self.followers -= 1
        return response

    async def hint(self, request: web.Request) -> web.StreamResponse:
        """Where a session stands, or several do (HintBatch)."""
        body = await request.read()
        batch = body.lstrip()[:9] == b'{"hints":'
        told = _parsed(HintBatch, body).hints if batch else (_parsed(HintRequest, body),)
        pool, now_s = self.state.serving().pool, clock.now_s()
        return web.json_response({"blocks": sum(pool.hint(_hint(one), now_s) for one in told)})

    async def _authenticated(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.path not in auth.OPEN_PATHS:
                nonce = auth.verify(
                    self.state.call_keys,
                    request.headers.get(auth.HEADER),
                    request.method,
                    request.path_qs,
                    await request.read(),
                    unix_s=clock.unix_s(),
                )
                if request.method == "POST":
                    self._guard.accept(nonce, unix_s=clock.unix_s())
            return await handler(request)
        except Unauthorized as exc:
            self.state.refused()
            log.warning("umbp: refused %s %s: %s", request.method, request.path, exc)
            return _failure(exc)
        except KimistackError as exc:
            return _failure(exc)


def _hint(told: HintRequest) -> Hint:
    return Hint(
        tenant=told.tenant,
        session=bytes.fromhex(told.session),
        kind=HintKind[told.kind.upper()],
        keys=[bytes.fromhex(key) for key in told.keys],
        expected_s=told.expected,
        child=bytes.fromhex(told.child or ""),
    )


def _parsed(kind: type[_Request], body: bytes) -> _Request:
    try:
        return kind.model_validate_json(body)
    except ValueError as exc:
        raise RequestError(f"the request does not parse: {exc}") from exc


def _ssd(second: SecondTier) -> dict[str, object]:
    stats = second.tier.stats()
    return {
        "access": stats.access,
        "reason": stats.reason,
        "blocks": stats.blocks,
        "recovered_blocks": stats.recovered,
        "live_bytes": stats.live_bytes,
        "capacity_bytes": stats.capacity_bytes,
    }


def _known(state: DaemonState) -> str:
    remote = state.serving().remote
    if remote is None or not len(remote.owners):
        return "none"
    return "known" if not state.unknown_peers else f"known but for {state.unknown_peers}"


def _peers(remote: Remote) -> dict[str, str]:
    return {owner.name: remote.owners.state(owner).value for owner in remote.owners}


def _failure(error: KimistackError) -> web.StreamResponse:
    body = {"error": {"message": str(error), "type": error.type}}
    return web.json_response(body, status=error.status)
