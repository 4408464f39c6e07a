"""A daemon among others: what it lacks is fetched from them, what it has is lent to them."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import NamedTuple

from kimi_connect.arena import Arena
from kimi_runtime.spec.request import RegionRef
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.transfer import open_transport
from kimi_runtime.transfer.base import Transport
from kimi_runtime.transfer.chaos import ChaosTransport
from kimi_runtime.transfer.memory import Memory
from kimi_runtime.transfer.network import NetworkSettings
from kimi_runtime.transfer.sessions import SessionCache
from kimi_runtime.umbp.helper import Errands, Helper
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.remote.calls import open_http
from kimi_runtime.umbp.remote.evacuate import Evacuation, EvacuationReport
from kimi_runtime.umbp.remote.fetch import Fetcher
from kimi_runtime.umbp.remote.lender import Lender
from kimi_runtime.umbp.remote.owners import Owners
from kimi_runtime.umbp.remote.replicate import Replicator
from kimi_runtime.umbp.remote.taker import Taker
from kimi_runtime.umbp.rpc.tls import Tls
from kimi_runtime.umbp.second_tier import SecondTier

log = logging.getLogger(__name__)


class Remote(Helper):
    """Fetching and lending of one daemon. Use `open_remote`."""

    def __init__(
        self,
        owners: Owners,
        fetcher: Fetcher,
        lender: Lender,
        taker: Taker,
        replicator: Replicator,
        evacuation: Evacuation,
        errands: Errands,
        changed: Callable[[], None],
        faults: Counter[str],
    ) -> None:
        """`faults` are those injected into reads from peers, by kind (`UmbpSpec.chaos`)."""
        self.owners, self.fetcher, self.lender = owners, fetcher, lender
        self.taker, self.replicator = taker, replicator
        self._evacuation = evacuation
        self.faults = faults
        super().__init__(fetcher, errands.spawn, changed)

    async def evacuate(self, *, deadline_s: float) -> EvacuationReport:
        """Move what this node alone has to peers, and take nothing from them any more."""
        self.taker.closed = True
        return await self._evacuation.run(deadline_s=deadline_s)


class Shared(NamedTuple):
    """The arena as peers reach it."""

    transport: Transport
    region: RegionRef
    faults: Counter[str]
    """What `transport` injects because the daemon's file asks for it, by kind."""


@asynccontextmanager
async def share_arena(
    spec: UmbpSpec, arena: Arena, call_keys: Sequence[bytes]
) -> AsyncIterator[Shared]:
    """Let peers read the pages of `arena`. ConfigError where the transport is not to be had."""
    network = NetworkSettings.of(spec.network, call_keys, host=spec.host)
    transport = await open_transport(spec.transfer, peer=spec.name, network=network)
    faults: Counter[str] = Counter()
    if spec.chaos is not None:
        log.warning("umbp: reads from peers fail on purpose: %s", spec.chaos)
        transport = ChaosTransport.asked(transport, spec.chaos, faults)
    async with aclosing(transport):
        yield Shared(transport, transport.register(Memory(arena.data)), faults)


@asynccontextmanager
async def open_remote(
    spec: UmbpSpec,
    shared: Shared,
    pool: Pool,
    arena: Arena,
    call_keys: Sequence[bytes],
    changed: Callable[[], None],
    second: SecondTier | None,
    tls: Tls | None,
) -> AsyncIterator[Remote]:
    """Lend what `pool` holds in `arena`, and follow the peers of `spec`, until the way out."""

    def here(key: bytes) -> bool:
        return pool.block(key) is not None or bool(second and second.tier.held([key]))

    lender = Lender(pool, arena, shared.region, changed, second)
    async with open_http() as http, asyncio.TaskGroup() as tasks:
        errands, sessions = Errands(tasks), SessionCache(shared.transport)
        owners = Owners(spec.name, http, call_keys, tasks, tls=tls)
        fetcher = Fetcher(pool, arena, owners, sessions, errands.spawn, here=here, name=spec.name)
        taker = Taker(pool, owners, fetcher, changed)
        replicator = Replicator(spec.name, arena.epoch, pool, owners, lender)
        cost = 1.0 / spec.recompute_rate
        leaving = (spec.name, pool, owners, arena.epoch, second)
        evacuation = Evacuation(*leaving, seconds_per_byte=cost)
        errands.spawn(replicator.run(), "umbp-replicate")
        owners.update(spec.peers)
        if spec.peers_file is not None:
            errands.spawn(owners.watch(spec.peers_file), "umbp-peers")
        try:
            yield Remote(
                *(owners, fetcher, lender, taker, replicator, evacuation),
                *(errands, changed, shared.faults),
            )
        finally:
            errands.end()
            owners.close()
            await sessions.aclose()
            shared.transport.release(shared.region)  # from now on nobody reads the arena
            lender.close()
