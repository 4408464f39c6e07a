"""Forgetting blocks because an operator says so."""

import asyncio
from collections.abc import Iterator, Sequence

from kimi_connect.wire import KEY_BYTES
from kimi_runtime import clock
from kimi_runtime.errors import RequestError
from kimi_runtime.umbp.clients import Clients
from kimi_runtime.umbp.proto import control_pb2 as wire
from kimi_runtime.units import format_bytes

SLICE = 256
"""Blocks forgotten between two looks at requests."""


async def evict(clients: Clients, asked: wire.EvictRequest) -> wire.EvictAnswer:
    """Forget what `asked` names, but for what somebody reads; RequestError if it names nothing."""
    pool, which = clients.pool, asked.WhichOneof("which")
    if which == "until_free_bytes":
        return await _until_free(clients, asked.until_free_bytes)
    if which == "tenant":
        keys = [b.key for b in pool.blocks() if b.account.name == asked.tenant]
    elif which == "keys":
        keys = list(asked.keys.keys)
        if any(len(key) != KEY_BYTES for key in keys):
            raise RequestError(f"a key has {KEY_BYTES} bytes")
    elif which == "all":
        keys = [block.key for block in pool.blocks()]
    else:
        raise RequestError("say what to evict: a tenant, keys, all, or until how much is free")
    answer = wire.EvictAnswer()
    for part in _slices(keys):
        gone, size, pinned = pool.forget(part)
        answer.blocks += gone
        answer.bytes += size
        answer.pinned_blocks += pinned
        await _others(clients)
    if clients.second is not None and not asked.memory_only:
        tier = clients.second.tier
        answer.ssd_blocks = len(tier.forget(tier.keys() if which == "all" else keys))
        await _others(clients)
    answer.free_bytes = pool.free_pages * pool.page_bytes
    return answer


async def _until_free(clients: Clients, free_bytes: int) -> wire.EvictAnswer:
    pool, answer = clients.pool, wire.EvictAnswer()
    most = pool.total_pages * pool.page_bytes
    if free_bytes > most:
        raise RequestError(
            f"{format_bytes(free_bytes)} can't become free: the memory has {format_bytes(most)}; "
            "ask for less, or for all of it to be forgotten"
        )
    before = pool.counters.evicted_bytes
    if pool.free_pages * pool.page_bytes < free_bytes:
        pool.revoke()  # which loses nothing
    while pool.free_pages * pool.page_bytes < free_bytes:
        gone = len(pool.evict(1, clock.now_s()))
        answer.blocks += gone
        if not gone:
            break
        if answer.blocks % SLICE == 0:
            await _others(clients)
    clients.changed()
    answer.bytes = pool.counters.evicted_bytes - before
    answer.pinned_blocks = sum(block.pins > 0 for block in pool.blocks())
    answer.free_bytes = pool.free_pages * pool.page_bytes
    return answer


def clear(clients: Clients, asked: wire.ClearRequest) -> wire.ClearAnswer:
    """Forget all that was put until now, or up to a generation; RequestError in another epoch."""
    epoch, pool = clients.arena.epoch, clients.pool
    if asked.epoch != epoch:
        raise RequestError(
            f"this daemon's epoch is {epoch}, not {asked.epoch}: ask again for that", param="epoch"
        )
    up_to = min(asked.up_to, pool.number) if asked.HasField("up_to") else pool.number
    blocks = pool.clear(up_to)
    if clients.second is not None:
        blocks += clients.second.clear()
    clients.changed()
    return wire.ClearAnswer(epoch=epoch, up_to=up_to, blocks=blocks)


def _slices(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    for start in range(0, len(keys), SLICE):
        yield keys[start : start + SLICE]


async def _others(clients: Clients) -> None:
    """Tell followers, and let requests have their turn."""
    clients.changed()
    await asyncio.sleep(0)
