"""The pool's daemon: one per node, the only truth about its pages.

It owns the arena file, answers engines on a Unix socket, publishes what it holds on HTTP and takes
peers' and operators' calls over gRPC. A start takes over the arena of a daemon that ended without
removing it, with a new epoch.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from kimi_runtime import clock
from kimi_runtime.auth import read_call_keys
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.umbp.assembly import Memory, check, closing, open_pool_of
from kimi_runtime.umbp.clients import Clients
from kimi_runtime.umbp.connection import Connection
from kimi_runtime.umbp.control.service import ControlService
from kimi_runtime.umbp.feed import FeedLog
from kimi_runtime.umbp.holdings import TierHoldings
from kimi_runtime.umbp.http import PoolHttp
from kimi_runtime.umbp.memory import open_arena
from kimi_runtime.umbp.remote.service import open_remote, share_arena
from kimi_runtime.umbp.retention import ReuseProbability, tool_gap_reuse
from kimi_runtime.umbp.rpc.peers import PeerService
from kimi_runtime.umbp.rpc.server import RpcServer
from kimi_runtime.umbp.rpc.tls import Tls
from kimi_runtime.umbp.second_tier import SecondTier
from kimi_runtime.umbp.sockets import alone, bound, listen
from kimi_runtime.umbp.state import DaemonState, Phase
from kimi_runtime.umbp.tiers.dram import OWN_WRITER, DramTier
from kimi_runtime.umbp.tiers.ssd import SsdTier, open_ssd_tier
from kimi_runtime.umbp.tuning import Source, Tuner
from kimi_runtime.units import format_bytes

CLOSE_S = 2.0
LOOK_S = 0.05
TRIM_BLOCKS = 8
"""Evicted at a time beside requests, which wait a quarter of a millisecond for it."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Daemon:
    """A running daemon."""

    spec: UmbpSpec
    state: DaemonState
    clients: Clients
    tier: DramTier
    port: int
    grpc_port: int
    tuner: Tuner

    @property
    def url(self) -> str:
        """Where its HTTP face answers."""
        host = f"[{self.spec.host}]" if ":" in self.spec.host else self.spec.host
        scheme = "https" if self.spec.tls else "http"
        return f"{scheme}://{host}:{self.port}"


async def serve(
    spec: UmbpSpec, source: Source | None = None, *, reuse: ReuseProbability = tool_gap_reuse
) -> None:
    """Run a daemon until cancelled. ConfigError or CapacityError if it can't start.

    It reads `source` again when that changes, on SIGHUP and when it is called to (`Reload`).
    """
    if source is not None:  # from the start on: unheard, the signal ends a process
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, source.asked.set)
    async with running(spec, source, reuse=reuse) as daemon:
        log.info("umbp: %s serves at %s and %s", spec.name, daemon.url, spec.socket)
        await asyncio.Event().wait()


@asynccontextmanager
async def running(
    spec: UmbpSpec, source: Source | None = None, *, reuse: ReuseProbability = tool_gap_reuse
) -> AsyncIterator[Daemon]:
    """A daemon that serves, and is ready once it knows its peers.

    On the way out it retires or leaves its arena, as its spec says.
    """
    check(spec)
    state = DaemonState(spec.name, list(read_call_keys(spec.call_key)))
    http = PoolHttp(state, spec.feed_interval)
    tls = state.tls = None if spec.tls is None else Tls(spec.tls)
    tuner = Tuner(spec, source, state, http, tls)
    for folder in {spec.socket.parent, spec.arena.parent}:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with alone(spec.arena):
        runner = web.AppRunner(http.app(), access_log=None, shutdown_timeout=CLOSE_S)
        await runner.setup()
        try:
            port = await listen(runner, spec, None if tls is None else tls.server_context)
            async with _rpc(state, tuner).serving(
                *(spec.host, spec.grpc_port, spec.control_socket),
                tls and tls.server_credentials(),
            ) as http.rpc_port:
                memory = Memory(*await asyncio.to_thread(open_arena, spec, own_writer=OWN_WRITER))
                with closing(spec, memory):
                    async with _engines(spec, state, memory, tls, reuse) as clients:
                        tier = DramTier(clients.pool, memory.arena)
                        async with _watching(tuner):
                            yield Daemon(*(spec, state, clients, tier, port, http.rpc_port, tuner))
        finally:
            state.pulse.close()
            await runner.cleanup()


def _rpc(state: DaemonState, tuner: Tuner) -> RpcServer:
    """What the daemon answers over gRPC."""
    server = RpcServer(state.call_keys, state.refused)
    PeerService(state.remote).add_to(server)
    ControlService(state, tuner.reload).add_to(server)
    return server


@asynccontextmanager
async def _watching(tuner: Tuner) -> AsyncIterator[None]:
    """Reload as its file changes."""
    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(tuner.watch(), name="umbp-tuning")
        try:
            yield
        finally:
            watch.cancel()


@asynccontextmanager
async def _engines(
    spec: UmbpSpec, state: DaemonState, memory: Memory, tls: Tls | None, reuse: ReuseProbability
) -> AsyncIterator[Clients]:
    """The pool, what is behind it, its Unix socket and its clock."""
    arena = memory.arena
    feed = FeedLog(spec.name, epoch=arena.epoch, tier="dram")
    publish = _Publisher(feed, state)
    async with AsyncExitStack() as owned:
        # bound before anything is running, so that a path in use ends the start as itself
        listener = owned.enter_context(bound(spec.socket))
        shared = None
        if spec.lends or spec.has_peers:
            shared = await owned.enter_async_context(share_arena(spec, arena, state.call_keys))
        in_memory, on_ssd = TierHoldings.pair(feed) if spec.ssd else (feed, None)
        pool = open_pool_of(spec, memory, in_memory, on_ssd, reuse)
        clients = Clients(pool, arena, str(spec.arena), state.call_keys, publish, feed)
        if spec.ssd is not None and on_ssd is not None:
            state.phase = Phase.LOG
            tier = await owned.enter_async_context(open_ssd_tier(spec.ssd, feed=on_ssd))
            _say_recovered(tier)
            clients.second = SecondTier(spec, pool, arena, tier, on_ssd, publish)
            await owned.enter_async_context(clients.second.running())
        if shared is not None:
            given = (spec, shared, pool, arena, state.call_keys, publish, clients.second, tls)
            clients.remote = await owned.enter_async_context(open_remote(*given))
        state.phase = Phase.PEERS
        async with _answering(spec, clients, state, listener, publish):
            yield clients


@asynccontextmanager
async def _answering(
    spec: UmbpSpec,
    clients: Clients,
    state: DaemonState,
    listener: socket.socket,
    publish: "_Publisher",
) -> AsyncIterator[None]:
    server = await asyncio.get_running_loop().create_unix_server(
        lambda: Connection(clients), sock=listener
    )
    state.clients = clients
    if not spec.has_peers:
        state.phase = Phase.READY
    tier = DramTier(clients.pool, clients.arena)
    try:
        async with asyncio.TaskGroup() as tasks:
            prove = clients.proving.run(tier, clients.pool.blocks())
            beside = [
                tasks.create_task(_expire(clients, publish), name="umbp-expiry"),
                tasks.create_task(_make_room(clients, publish), name="umbp-room"),
                tasks.create_task(prove, name="umbp-proving"),
                tasks.create_task(_know_peers(spec, clients, state), name="umbp-peers-known"),
            ]
            try:
                yield
            finally:
                for task in beside:
                    task.cancel()
    finally:
        state.clients = None
        server.close()
        clients.close()


async def _know_peers(spec: UmbpSpec, clients: Clients, state: DaemonState) -> None:
    """Get ready once it is known what the peers hold, or their time is over.

    A daemon that fetched from nobody for want of knowing would compute what peers have; one that
    waited for a peer that is down would not serve at all.
    """
    ends_s = clock.now_s() + spec.peers_within
    while clients.remote is not None and spec.has_peers:
        state.awaited = clients.remote.owners.awaited()
        if not state.awaited or clock.now_s() >= ends_s:
            break
        await asyncio.sleep(LOOK_S)
    if state.awaited:
        state.unknown_peers = len(state.awaited)
        log.warning(
            "umbp: ready without knowing what %s hold after %.0f s; they are asked nothing until "
            "they answer",
            ", ".join(state.awaited),
            spec.peers_within,
        )
        state.awaited = ()
    if state.phase is Phase.PEERS:
        state.phase = Phase.READY
    log.info("umbp: %s is ready", spec.name)


def _say_recovered(tier: SsdTier) -> None:
    stats = tier.stats()
    log.info(
        "umbp: %d blocks of %s are on SSD, in %d segments",
        stats.blocks,
        format_bytes(stats.live_bytes),
        stats.segments,
    )


class _Publisher:
    """Wakes the feed's followers when the log has moved."""

    def __init__(self, feed: FeedLog, state: DaemonState) -> None:
        self._feed, self._state, self._seq = feed, state, feed.seq

    def __call__(self) -> None:
        if self._feed.seq != self._seq:
            self._seq = self._feed.seq
            self._state.pulse.fire()


async def _expire(clients: Clients, publish: _Publisher) -> None:
    """Let leases and reservations end in time, at a tenth of the shorter one."""
    pool = clients.pool
    tick_s = min(1.0, pool.reservation_ttl_s / 10, pool.pin_lease_s / 10)
    while True:
        await asyncio.sleep(tick_s)
        pool.expire(clock.now_s())
        clients.sweep()
        if pool.crowded:
            clients.crowded.set()
        publish()


async def _make_room(clients: Clients, publish: _Publisher) -> None:
    """Keep memory below its high watermark: puts find free pages, and have not to wait for any."""
    pool = clients.pool
    while True:
        await clients.crowded.wait()
        clients.crowded.clear()
        while pool.trim(clock.now_s(), TRIM_BLOCKS) == TRIM_BLOCKS:
            publish()
            await asyncio.sleep(0)
        publish()
