"""A daemon's memory and the pool over it, from its spec."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from kimi_connect.arena import Arena
from kimi_connect.blocks import copy_in, copy_out
from kimi_connect.wire import Grant, Granted, PinnedBlock
from kimi_runtime import clock
from kimi_runtime.errors import ConfigError, KvCorrupt
from kimi_runtime.spec.umbp import TenantTerms, UmbpSpec
from kimi_runtime.umbp.cells import CellJournal
from kimi_runtime.umbp.holdings import Holdings
from kimi_runtime.umbp.journal import Kept, NoJournal
from kimi_runtime.umbp.memory import segments_of
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.retention import Retention, ReuseProbability
from kimi_runtime.umbp.sockets import SOCKET_PATH_BYTES
from kimi_runtime.umbp.tags import leaves
from kimi_runtime.umbp.tenants import Accounts, Terms
from kimi_runtime.umbp.tiers.ssd import COST as SSD_COST
from kimi_runtime.units import format_bytes

MIN_PAGE_BYTES = 512

log = logging.getLogger(__name__)


class Memory(NamedTuple):
    """An arena, who keeps account in it, and the account that was there."""

    arena: Arena
    journal: CellJournal | None
    kept: Kept


@contextmanager
def closing(spec: UmbpSpec, memory: Memory) -> Iterator[None]:
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


def check(spec: UmbpSpec) -> None:
    """ConfigError for what can't work and a spec's own rules don't know."""
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
    if len(os.fsencode(spec.control_socket)) > SOCKET_PATH_BYTES:
        raise ConfigError(
            f"the socket path {spec.control_socket} has more than {SOCKET_PATH_BYTES} bytes, the "
            "system's limit; choose a shorter folder"
        )


def open_pool_of(
    spec: UmbpSpec,
    memory: Memory,
    feed: Holdings,
    on_ssd: Holdings | None,
    reuse: ReuseProbability,
) -> Pool:
    """The pool of the arena's pages, with what was there."""
    arena = memory.arena
    pool = Pool(
        *(arena.pages, arena.page_bytes, feed, spec.reservation_ttl, spec.pin_lease),
        high=spec.evict_above,
        low=spec.evict_to,
        retention=Retention(reuse=reuse, seconds_per_byte=seconds_per_byte(spec, on_ssd)),
        accounts=Accounts(arena.pages, *terms_of(spec, arena.page_bytes)),
        segments=segments_of(spec, arena.pages),
        journal=memory.journal or NoJournal(),
        take=arena.take,
    )
    pool.adopt(memory.kept, clock.now_s())
    if memory.kept.blocks or memory.kept.reservations:
        log.info(
            "umbp: took over %d blocks of %s, and %d reservations",
            pool.live_blocks,
            format_bytes(pool.live_bytes),
            len(memory.kept.reservations),
        )
    _self_test(pool, arena)
    return pool


def seconds_per_byte(spec: UmbpSpec, on_ssd: Holdings | None) -> Callable[[bytes], float]:
    """What it costs to have a byte of a block again: from the SSD, or computed."""

    def price(key: bytes) -> float:
        kept = on_ssd is not None and key in on_ssd
        return 1.0 / (SSD_COST.bytes_per_s if kept else spec.recompute_rate)

    return price


def terms_of(spec: UmbpSpec, page_bytes: int) -> tuple[dict[str, Terms], Terms]:
    """What each tenant is granted, and what those are that the spec does not name."""

    def terms(granted: TenantTerms) -> Terms:
        quota = None if granted.quota is None else granted.quota // page_bytes
        return Terms(granted.weight, quota)

    named = {name: terms(granted) for name, granted in spec.tenants.items()}
    return named, terms(spec.tenant_default)


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
