"""What a daemon holds, for whom, and how it fares."""

import heapq
from collections.abc import Mapping
from typing import TypeVar

from kimi_runtime import clock
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.proto import control_pb2 as wire
from kimi_runtime.umbp.remote.service import Remote
from kimi_runtime.umbp.second_tier import SecondTier
from kimi_runtime.umbp.ssdlog.health import Access
from kimi_runtime.umbp.state import DaemonState

Name = TypeVar("Name", bound=str)

MAX_HOTTEST = 1000
MAX_TENANTS = 256


def inspect(state: DaemonState, asked: wire.InspectRequest) -> wire.InspectAnswer:
    """Everything at one moment. Unavailable while the daemon serves nothing."""
    clients = state.serving()
    pool, second = clients.pool, clients.second
    return wire.InspectAnswer(
        name=state.name,
        epoch=clients.arena.epoch,
        phase=state.phase.value,
        awaited=state.awaited,
        tiers=[_memory(pool), *([_ssd(second)] if second is not None else [])],
        tenants=_tenants(pool),
        hottest=_hottest(pool, min(asked.hottest, MAX_HOTTEST)),
        peers=_peers(clients.remote) if clients.remote is not None else [],
        funnel=_funnel(pool),
        clients=len(clients),
        pins=pool.open_pins,
        reservations=pool.reservations(quarantined=False) + pool.reservations(quarantined=True),
    )


def _memory(pool: Pool) -> wire.Tier:
    page = pool.page_bytes
    return wire.Tier(
        name="memory",
        blocks=pool.live_blocks,
        used_bytes=(pool.total_pages - pool.free_pages) * page,
        evictable_bytes=pool.evictable_pages * page,
        capacity_bytes=pool.total_pages * page,
        state="bound",
    )


def _ssd(second: SecondTier) -> wire.Tier:
    stats = second.tier.stats()
    # "full" access would be read as a disk that has no room
    access = "open" if stats.access is Access.FULL else stats.access.value
    return wire.Tier(
        name="ssd",
        blocks=stats.blocks,
        used_bytes=stats.disk_bytes,
        evictable_bytes=stats.live_bytes,
        capacity_bytes=stats.capacity_bytes,
        state=f"{access}: {stats.reason}" if stats.reason else access,
    )


def _tenants(pool: Pool) -> list[wire.Tenant]:
    page, shares = pool.page_bytes, pool.accounts.shares(clock.now_s())
    largest = heapq.nlargest(MAX_TENANTS, shares, key=lambda account: account.used_pages)
    return [
        wire.Tenant(
            name=account.name,
            used_bytes=account.used_pages * page,
            evictable_bytes=account.idle_pages * page,
            share_bytes=int(shares[account] * page),
            quota_bytes=None if (quota := account.terms.quota_pages) is None else quota * page,
        )
        for account in largest
    ]


def _hottest(pool: Pool, count: int) -> list[wire.HotBlock]:
    now_s = clock.now_s()
    blocks = heapq.nlargest(count, pool.blocks(), key=lambda block: (block.uses, block.used_s))
    return [
        wire.HotBlock(
            key=block.key,
            tenant=block.account.name,
            uses=block.uses,
            size=block.size,
            idle_s=max(0.0, now_s - block.used_s),
            pinned=block.pins > 0,
        )
        for block in blocks
    ]


def _peers(remote: Remote) -> list[wire.Peer]:
    owners, now_s = remote.owners, clock.now_s()
    return [
        wire.Peer(
            name=owner.name,
            url=owner.calls.url,
            feed=owners.state(owner).value,
            standing=owner.health.standing(now_s).value,
            known_blocks=owners.known(owner),
            fetched_bytes=owner.bytes,
            blocks=_counts(owner.blocks),
            quarantines=owner.health.quarantines,
        )
        for owner in owners
    ]


def _funnel(pool: Pool) -> wire.Funnel:
    funnel = pool.funnel
    return wire.Funnel(
        looked_up=funnel.looked_up,
        hits=_counts(funnel.hits),
        lost=_counts(funnel.lost),
        open=funnel.open,
    )


def _counts(counts: Mapping[Name, int]) -> list[wire.Count]:
    return [wire.Count(name=str(name), value=count) for name, count in counts.items()]
