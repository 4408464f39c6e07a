"""A daemon among others: what it lacks is fetched from them, what it has is lent to them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, NamedTuple

from kimi_connect.arena import Arena
from kimi_connect.wire import Gap
from kimi_runtime import clock
from kimi_runtime.spec.request import RegionRef
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.transfer import open_transport
from kimi_runtime.transfer.base import Transport
from kimi_runtime.transfer.memory import Memory
from kimi_runtime.transfer.network import NetworkSettings, RdmaSettings
from kimi_runtime.transfer.sessions import SessionCache
from kimi_runtime.umbp.pool import DEFAULT_TENANT, Pool
from kimi_runtime.umbp.remote.calls import open_http
from kimi_runtime.umbp.remote.fetch import Fetcher
from kimi_runtime.umbp.remote.lender import Lender
from kimi_runtime.umbp.remote.owners import Owners
from kimi_runtime.umbp.second_tier import MAX_WAIT_S, MAX_WAITING, WAIT_SHARE, SecondTier


class Errands:
    """Tasks of a group that end, at the latest, with what they are for."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group, self._over = group, False
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run this; nothing happens once all is over."""
        if self._over:
            work.close()
            return
        task = self._group.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def end(self) -> None:
        """Cancel what runs, begin nothing more."""
        self._over = True
        for task in list(self._running):
            task.cancel()


class Remote:
    """Fetching and lending of one daemon. Use `open_remote`."""

    def __init__(
        self,
        owners: Owners,
        fetcher: Fetcher,
        lender: Lender,
        errands: Errands,
        changed: Callable[[], None],
    ) -> None:
        self.owners, self.fetcher, self.lender = owners, fetcher, lender
        self.busy = 0
        """Requests not helped because `MAX_WAITING` others waited."""
        self._errands, self._changed, self._waiting = errands, changed, 0

    def help(
        self,
        keys: Sequence[bytes],
        answer: Callable[[Gap], None],
        *,
        within_s: float,
        tenant: str = DEFAULT_TENANT,
    ) -> bool:
        """Fetch some of the run of `keys`, then call `answer` with why no more came.

        See `Fetcher.bring`. False, and nothing happens, if nobody can be asked for the block that
        ends the run in memory, or if enough others wait.
        """
        if not self.fetcher.lacks(keys):
            return False
        if self._waiting >= MAX_WAITING:
            self.busy += 1
            return False
        self._waiting += 1
        self._errands.spawn(self._help(keys, answer, within_s, tenant), "umbp-pin")
        return True

    async def _help(
        self, keys: Sequence[bytes], answer: Callable[[Gap], None], within_s: float, tenant: str
    ) -> None:
        try:
            ends_s = clock.now_s() + min(WAIT_SHARE * within_s, MAX_WAIT_S)
            gap = await self.fetcher.bring(keys, ends_s=ends_s, tenant=tenant)
        finally:
            self._waiting -= 1
        answer(gap)
        self._changed()


class Shared(NamedTuple):
    """The arena as peers reach it."""

    transport: Transport
    region: RegionRef


@asynccontextmanager
async def share_arena(
    spec: UmbpSpec, arena: Arena, call_keys: Sequence[bytes]
) -> AsyncIterator[Shared]:
    """Let peers read the pages of `arena`. ConfigError where the transport is not to be had."""
    transport = await open_transport(
        spec.transfer, peer=spec.name, network=_network(spec, call_keys)
    )
    async with aclosing(transport):
        yield Shared(transport, transport.register(Memory(arena.data)))


@asynccontextmanager
async def open_remote(
    spec: UmbpSpec,
    shared: Shared,
    pool: Pool,
    arena: Arena,
    call_key: bytes,
    changed: Callable[[], None],
    second: SecondTier | None,
) -> AsyncIterator[Remote]:
    """Lend what `pool` holds in `arena`, and follow the peers of `spec`, until the way out."""

    def here(key: bytes) -> bool:
        return pool.block(key) is not None or bool(second and second.tier.held([key]))

    lender = Lender(pool, arena, shared.region, changed, second)
    async with open_http() as http, asyncio.TaskGroup() as tasks:
        errands, sessions = Errands(tasks), SessionCache(shared.transport)
        owners = Owners(spec.name, http, call_key, tasks)
        fetcher = Fetcher(pool, arena, owners, sessions, errands.spawn, here=here)
        owners.update(spec.peers)
        if spec.peers_file is not None:
            errands.spawn(owners.watch(spec.peers_file), "umbp-peers")
        try:
            yield Remote(owners, fetcher, lender, errands, changed)
        finally:
            errands.end()
            owners.close()
            await sessions.aclose()
            shared.transport.release(shared.region)  # from now on nobody reads the arena
            lender.close()


def _network(spec: UmbpSpec, call_keys: Sequence[bytes]) -> NetworkSettings:
    wanted = spec.network
    return NetworkSettings(
        call_keys,
        host=wanted.host or spec.host,
        port=wanted.port,
        advertised=wanted.advertised,
        streams=wanted.streams,
        rdma=RdmaSettings(**wanted.rdma.model_dump()),
    )
