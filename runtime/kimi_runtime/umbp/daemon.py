"""The pool's daemon: one per node, the only truth about its pages.

It owns the arena file, answers engines on a Unix socket and publishes what it holds on HTTP. A
start takes over the arena of a daemon that ended without removing it, with a new epoch.
"""

import asyncio
import fcntl
import logging
import os
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from kimi_connect.arena import Arena
from kimi_connect.blocks import copy_in, copy_out
from kimi_connect.wire import Grant, Granted, PinnedBlock
from kimi_runtime import clock
from kimi_runtime.auth import read_call_keys
from kimi_runtime.errors import ConfigError, KvCorrupt
from kimi_runtime.spec.umbp import TenantTerms, UmbpSpec
from kimi_runtime.umbp.cells import CellJournal
from kimi_runtime.umbp.clients import Clients
from kimi_runtime.umbp.feed import FeedLog
from kimi_runtime.umbp.holdings import Holdings, TierHoldings
from kimi_runtime.umbp.http import Phase, PoolHttp
from kimi_runtime.umbp.journal import Kept, NoJournal
from kimi_runtime.umbp.memory import open_arena, segments_of
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.remote.service import open_remote, share_arena
from kimi_runtime.umbp.retention import Retention, ReuseProbability, tool_gap_reuse
from kimi_runtime.umbp.second_tier import SecondTier
from kimi_runtime.umbp.tags import leaves
from kimi_runtime.umbp.tenants import Accounts, Terms
from kimi_runtime.umbp.tiers.dram import OWN_WRITER, DramTier
from kimi_runtime.umbp.tiers.ssd import COST as SSD_COST
from kimi_runtime.umbp.tiers.ssd import SsdTier, open_ssd_tier
from kimi_runtime.units import format_bytes

MIN_PAGE_BYTES = 512
SOCKET_PATH_BYTES = 107
CLOSE_S = 2.0
TRIM_BLOCKS = 32
"""Evicted at a time beside requests, which wait a millisecond for it."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Daemon:
    """A running daemon."""

    spec: UmbpSpec
    clients: Clients
    tier: DramTier
    port: int

    @property
    def url(self) -> str:
        """Where its HTTP face answers."""
        host = f"[{self.spec.host}]" if ":" in self.spec.host else self.spec.host
        return f"http://{host}:{self.port}"


async def serve(spec: UmbpSpec, *, reuse: ReuseProbability = tool_gap_reuse) -> None:
    """Run a daemon until cancelled. ConfigError or CapacityError if it can't start."""
    async with running(spec, reuse=reuse) as daemon:
        log.info("umbp: %s is ready at %s and %s", spec.name, daemon.url, spec.socket)
        await asyncio.Event().wait()


@asynccontextmanager
async def running(
    spec: UmbpSpec, *, reuse: ReuseProbability = tool_gap_reuse
) -> AsyncIterator[Daemon]:
    """A daemon that is ready; on the way out it retires or leaves its arena, as its spec says."""
    _check(spec)
    http = PoolHttp(spec.name, read_call_keys(spec.call_key), spec.feed_interval)
    for folder in {spec.socket.parent, spec.arena.parent}:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _alone(spec.arena):
        runner = web.AppRunner(http.app(), access_log=None, shutdown_timeout=CLOSE_S)
        await runner.setup()
        try:
            port = await _listen(runner, spec)
            memory = Memory(*await asyncio.to_thread(open_arena, spec, own_writer=OWN_WRITER))
            with _closing(spec, memory):
                async with _engines(spec, http, memory, reuse) as clients:
                    yield Daemon(spec, clients, DramTier(clients.pool, memory.arena), port)
        finally:
            http.pulse.close()
            await runner.cleanup()


class Memory(NamedTuple):
    """An arena, who keeps account in it, and the account that was there."""

    arena: Arena
    journal: CellJournal | None
    kept: Kept


@contextmanager
def _closing(spec: UmbpSpec, memory: Memory) -> Iterator[None]:
    """What becomes of the arena. A start that fails leaves what it took over to the next."""
    leave = spec.keep_arena
    try:
        yield
    except Exception:
        leave = leave or bool(memory.kept.blocks)
        raise
    finally:
        if leave and memory.journal is not None:
            memory.arena.leave()
        else:
            memory.arena.retire()
            spec.arena.unlink(missing_ok=True)
        memory.arena.close()


@asynccontextmanager
async def _engines(
    spec: UmbpSpec, http: PoolHttp, memory: Memory, reuse: ReuseProbability
) -> AsyncIterator[Clients]:
    """The pool, what is behind it, its Unix socket and its clock."""
    arena = memory.arena
    feed = FeedLog(spec.name, epoch=arena.epoch, tier="dram")
    publish = _Publisher(feed, http)
    async with AsyncExitStack() as owned:
        # bound before anything is running, so that a path in use ends the start as itself
        listener = owned.enter_context(_bound(spec.socket))
        shared = None
        if spec.lends or spec.has_peers:
            shared = await owned.enter_async_context(share_arena(spec, arena, http.call_keys))
        in_memory, on_ssd = TierHoldings.pair(feed) if spec.ssd else (feed, None)
        pool = _pool(spec, memory, in_memory, on_ssd, reuse)
        _self_test(pool, arena)
        clients = Clients(pool, arena, str(spec.arena), http.call_keys, publish, feed)
        if spec.ssd is not None and on_ssd is not None:
            http.phase = Phase.LOG
            tier = await owned.enter_async_context(open_ssd_tier(spec.ssd, feed=on_ssd))
            _say_recovered(tier)
            clients.second = SecondTier(spec, pool, arena, tier, on_ssd, publish)
            await owned.enter_async_context(clients.second.running())
        if shared is not None:
            given = (spec, shared, pool, arena, http.call_keys[0], publish, clients.second)
            clients.remote = await owned.enter_async_context(open_remote(*given))
        http.phase = Phase.READY
        async with _answering(clients, http, listener, publish):
            yield clients


@asynccontextmanager
async def _answering(
    clients: Clients, http: PoolHttp, listener: socket.socket, publish: "_Publisher"
) -> AsyncIterator[None]:
    server = await asyncio.get_running_loop().create_unix_server(clients.connect, sock=listener)
    http.clients = clients
    try:
        async with asyncio.TaskGroup() as tasks:
            expiry = tasks.create_task(_expire(clients, publish), name="umbp-expiry")
            prove = clients.proving.run(
                DramTier(clients.pool, clients.arena), clients.pool.blocks()
            )
            proving = tasks.create_task(prove, name="umbp-proving")
            try:
                yield
            finally:
                expiry.cancel()
                proving.cancel()
    finally:
        http.clients = None
        server.close()
        clients.close()


def _pool(
    spec: UmbpSpec,
    memory: Memory,
    feed: Holdings,
    on_ssd: Holdings | None,
    reuse: ReuseProbability,
) -> Pool:
    """The pool of the arena's pages, with what was there."""
    arena = memory.arena

    def seconds_per_byte(key: bytes) -> float:
        kept = on_ssd is not None and key in on_ssd
        return 1.0 / (SSD_COST.bytes_per_s if kept else spec.recompute_rate)

    def terms(granted: TenantTerms) -> Terms:
        quota = None if granted.quota is None else granted.quota // arena.page_bytes
        return Terms(granted.weight, quota)

    pool = Pool(
        *(arena.pages, arena.page_bytes, feed, spec.reservation_ttl, spec.pin_lease),
        high=spec.evict_above,
        low=spec.evict_to,
        retention=Retention(reuse=reuse, seconds_per_byte=seconds_per_byte),
        accounts=Accounts(
            arena.pages,
            {name: terms(granted) for name, granted in spec.tenants.items()},
            terms(spec.tenant_default),
        ),
        segments=segments_of(spec, arena.pages),
        journal=memory.journal or NoJournal(),
    )
    if memory.kept.number:
        pool.adopt(memory.kept, clock.now_s())
        log.info(
            "umbp: took over %d blocks of %s, and %d reservations",
            pool.live_blocks,
            format_bytes(pool.live_bytes),
            len(memory.kept.reservations),
        )
    return pool


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

    def __init__(self, feed: FeedLog, http: PoolHttp) -> None:
        self._feed, self._http, self._seq = feed, http, feed.seq

    def __call__(self) -> None:
        if self._feed.seq != self._seq:
            self._seq = self._feed.seq
            self._http.pulse.fire()


async def _expire(clients: Clients, publish: _Publisher) -> None:
    """Let leases and reservations end in time, at a tenth of the shorter one."""
    pool = clients.pool
    tick_s = min(1.0, pool.reservation_ttl_s / 10, pool.pin_lease_s / 10)
    while True:
        await asyncio.sleep(tick_s)
        pool.expire(clock.now_s())
        clients.sweep()
        while pool.trim(clock.now_s(), TRIM_BLOCKS) == TRIM_BLOCKS:
            publish()
            await asyncio.sleep(0)
        publish()


def _self_test(pool: Pool, arena: Arena) -> None:
    """A block through free pages of the arena and back, before anyone else sees it.

    An arena that was taken over full has none; it has been through this.
    """
    size = min(pool.free_pages * arena.page_bytes, 3 * arena.page_bytes // 2)
    if not size:
        return
    key, pages = b"umbp self-test..", pool.some_free(-(-size // arena.page_bytes))
    data = memoryview((bytes(range(251)) * (size // 251 + 1))[:size])
    back = memoryview(bytearray(size))
    granted = [Granted(Grant.RESERVED, 0, pages)]
    ((_, tags),) = copy_in(arena, [key], granted, [data], (), leaves, lambda: False)
    block = PinnedBlock(0, size, tags, pages)
    copied = copy_out(arena, [key], [block], [back], leaves, lambda: False)
    if not copied.good or data != back:
        raise KvCorrupt("a block did not come back from a fresh arena as it went in: check memory")


def _check(spec: UmbpSpec) -> None:
    if spec.page_bytes & (spec.page_bytes - 1) or spec.page_bytes < MIN_PAGE_BYTES:
        raise ConfigError(
            f"page_bytes is {spec.page_bytes}; it must be a power of two of at least "
            f"{MIN_PAGE_BYTES}"
        )
    if spec.dram_bytes < spec.page_bytes:
        raise ConfigError(
            f"dram_bytes {format_bytes(spec.dram_bytes)} hold no page of "
            f"{format_bytes(spec.page_bytes)}"
        )
    if len(os.fsencode(spec.socket)) > SOCKET_PATH_BYTES:
        raise ConfigError(
            f"the socket path {spec.socket} has more than {SOCKET_PATH_BYTES} bytes, the system's "
            "limit; choose a shorter folder"
        )


@contextmanager
def _alone(arena: Path) -> Iterator[None]:
    """Only one daemon may own an arena; the lock ends with the process."""
    descriptor = os.open(f"{arena}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise ConfigError(
                f"another daemon runs on the arena {arena}; stop it or choose another arena"
            ) from exc
        yield
    finally:
        os.close(descriptor)


async def _listen(runner: web.AppRunner, spec: UmbpSpec) -> int:
    site = web.TCPSite(runner, spec.host, spec.port)
    try:
        await site.start()
    except OSError as exc:
        raise ConfigError(
            f"{spec.host}:{spec.port} can't be listened on ({exc.strerror or exc}); "
            "stop who uses it or choose another port"
        ) from exc
    return int(runner.addresses[0][1])


@contextmanager
def _bound(path: Path) -> Iterator[socket.socket]:
    """A listening Unix socket, removed on the way out."""
    listener = _bind(path)
    try:
        yield listener
    finally:
        listener.close()
        path.unlink(missing_ok=True)


def _bind(path: Path) -> socket.socket:
    """A listening Unix socket, mode 0600, in place of a dead one."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists():
            _remove_dead(path)
        before = os.umask(0o177)  # there must be no moment at which others could connect
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.setblocking(False)
    except OSError as exc:
        listener.close()
        raise ConfigError(f"the socket {path} can't be created: {exc.strerror}") from exc
    except ConfigError:
        listener.close()
        raise
    return listener


def _remove_dead(path: Path) -> None:
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"{path} is there and is no socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink()
            return
    raise ConfigError(f"another process listens on {path}; stop it or choose another path")
