"""The daemon's HTTP face: health, metrics, the feed, and what is told to the pool."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel

from kimi_connect.wire import HintKind
from kimi_runtime import auth, clock
from kimi_runtime.errors import KimistackError, RequestError, Unauthorized, Unavailable
from kimi_runtime.spec.peers import GiveBackRequest, LendRequest
from kimi_runtime.spec.umbp import ClearAnswer, ClearRequest, HintBatch, HintRequest
from kimi_runtime.umbp.clients import Clients
from kimi_runtime.umbp.metrics import PoolMetrics
from kimi_runtime.umbp.remote.lender import Lender
from kimi_runtime.umbp.remote.service import Remote
from kimi_runtime.umbp.retention import Hint
from kimi_runtime.umbp.second_tier import SecondTier
from kimi_runtime.umbp.serve_feed import Pulse, feed_lines, follow_from

WRITE_S = 10.0
"""A follower that takes no byte for this long is cut off; it comes back with its position."""

MAX_FOLLOWERS = 4096
MAX_BODY = 8 << 20
"""A hint of a session of a million tokens has some 600 kB."""

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Phase(StrEnum):
    """How far a start has come."""

    ARENA = "arena"
    """The arena's pages are being bound."""
    LOG = "log"
    """The arena is bound; the SSD log is being recovered."""
    READY = "ready"


_Request = TypeVar("_Request", bound=BaseModel)

_NOT_READY = {
    Phase.ARENA: "the arena is being prepared; try again in a moment",
    Phase.LOG: "the arena is bound and the SSD log is being recovered; try again in a moment",
    Phase.READY: "the daemon is stopping",
}


@dataclass(slots=True)
class PoolHttp:
    """The routes. `clients` is None until the daemon is ready, and again when it stops."""

    name: str
    call_keys: Sequence[bytes]
    feed_interval_s: float
    pulse: Pulse = field(default_factory=Pulse)
    phase: Phase = Phase.ARENA
    clients: Clients | None = None
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
        app.router.add_post("/clear", self.clear)
        app.router.add_post("/lend", self.lend)
        app.router.add_post("/give_back", self.give_back)
        return app

    async def healthz(self, request: web.Request) -> web.StreamResponse:
        """The process answers."""
        return web.json_response({"status": "ok", "name": self.name})

    async def readyz(self, request: web.Request) -> web.StreamResponse:
        """The arena is mapped, a block went in and out of it, it is still ours; the log is read.

        An SSD that fails later is told here, and does not make the daemon unready: it costs misses.
        """
        clients = self.clients
        if clients is None:
            raise Unavailable(_NOT_READY[self.phase])
        if not clients.arena.live:
            raise Unavailable("another daemon replaced the arena file; restart this one")
        pool = clients.pool
        return web.json_response(
            {
                "status": "ready",
                "name": self.name,
                "epoch": clients.arena.epoch,
                "phases": {"arena": "bound", "log": "recovered" if clients.second else "none"},
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
        body = PoolMetrics(lambda: self.clients, lambda: self.followers).exposition()
        return web.Response(
            body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def feed(self, request: web.Request) -> web.StreamResponse:
        """The feed, until the follower leaves."""
        clients = self._ready()
        if self.followers >= MAX_FOLLOWERS:
            raise Unavailable(f"{MAX_FOLLOWERS} followers are the limit; try again later")
        epoch, after = follow_from(request.query)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        response.enable_chunked_encoding()
        self.followers += 1
        try:
            await response.prepare(request)
            lines = feed_lines(
                clients.feed,
                self.pulse,
                epoch=epoch,
                after=after,
                interval_s=self.feed_interval_s,
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
        pool, now_s = self._ready().pool, clock.now_s()
        return web.json_response({"blocks": sum(pool.hint(_hint(one), now_s) for one in told)})

    async def clear(self, request: web.Request) -> web.StreamResponse:
        """Forget blocks, from memory and SSD; 400 in another epoch."""
        asked = _parsed(ClearRequest, await request.read())
        clients = self._ready()
        epoch, pool = clients.arena.epoch, clients.pool
        if asked.epoch != epoch:
            raise RequestError(
                f"this daemon's epoch is {epoch}, not {asked.epoch}: ask again for that",
                param="epoch",
            )
        up_to = pool.number if asked.up_to is None else min(asked.up_to, pool.number)
        blocks = pool.clear(up_to)
        if clients.second is not None:
            blocks += clients.second.clear()
        clients.changed()
        answer = ClearAnswer(epoch=epoch, up_to=up_to, blocks=blocks)
        return web.json_response(answer.model_dump(mode="json"))

    async def lend(self, request: web.Request) -> web.StreamResponse:
        """Pin blocks for a peer that copies them."""
        asked = _parsed(LendRequest, await request.read())
        answer = await self._lender().lend(asked)
        return web.Response(text=answer.model_dump_json(), content_type="application/json")

    async def give_back(self, request: web.Request) -> web.StreamResponse:
        """End such a pin."""
        asked = _parsed(GiveBackRequest, await request.read())
        answer = await self._lender().give_back(asked)
        return web.json_response(answer.model_dump(mode="json"))

    def _lender(self) -> Lender:
        remote = self._ready().remote
        if remote is None:
            raise Unavailable("this daemon lends nothing: it has no peers (peers, peers_file)")
        return remote.lender

    def _ready(self) -> Clients:
        if self.clients is None:
            raise Unavailable(_NOT_READY[self.phase])
        return self.clients

    async def _authenticated(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.path not in auth.OPEN_PATHS:
                nonce = auth.verify(
                    self.call_keys,
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


def _peers(remote: Remote) -> dict[str, str]:
    return {owner.name: remote.owners.state(owner).value for owner in remote.owners}


def _failure(error: KimistackError) -> web.StreamResponse:
    body = {"error": {"message": str(error), "type": error.type}}
    return web.json_response(body, status=error.status)
