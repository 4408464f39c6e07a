"""What a pool client promises, the asynchronous one and the blocking one alike."""

import asyncio
from collections.abc import Sequence

import pytest

from kimi_connect import blocks, copiers, small_puts
from kimi_connect.client import ArenaClient
from kimi_connect.wire import Outcome
from kimi_runtime.spec.ssd import SsdSpec
from kimi_runtime.umbp.client import open_pool
from kimi_runtime.umbp.daemon import running
from kimi_runtime.umbp.funnel import Lost, Where
from pool_daemon import BLOCK, CALL_KEY, blocks_of, keys_of, pool_spec, targets

SOON_S = 20.0
GROUPS = (4096, 5000, 904)


class Blocking:
    """The blocking client behind the asynchronous one's face."""

    def __init__(self, socket, call_key, group_bytes, threads):
        self.client = ArenaClient(socket, call_key, group_bytes=group_bytes, threads=threads)

    async def load(self, keys: Sequence[bytes], into, *, deadline_s):
        return await asyncio.to_thread(self.client.load, keys, into, deadline_s=deadline_s)

    async def store(self, keys, blocks, *, deadline_s):
        return await asyncio.to_thread(self.client.store, keys, blocks, deadline_s=deadline_s)

    async def held(self, keys):
        return await asyncio.to_thread(self.client.held, keys)

    async def prefault(self):
        await asyncio.to_thread(self.client.prefault)

    async def aclose(self):
        await asyncio.to_thread(self.client.close)


@pytest.fixture(params=["memory", "ssd"])
async def daemon(tmp_path, request):
    ssd = SsdSpec.sized(tmp_path / "ssd", 64 << 20) if request.param == "ssd" else None
    async with running(pool_spec(tmp_path, ssd=ssd)) as made:
        yield made
        made.clients.pool.check_integrity()


@pytest.fixture(params=["async", "async in two steps", "blocking", "blocking on two threads"])
async def connect(request, monkeypatch):
    """Opens clients that are closed at the end."""
    made = []
    if "two" in request.param:  # blocks of tests are small: reserve, write and commit them as well
        monkeypatch.setattr(small_puts, "SMALL_PUT_BYTES", 0)
    monkeypatch.setattr(copiers, "LEAST_BYTES", BLOCK)  # so that small batches are shared out too

    async def open_one(socket, call_key=CALL_KEY, group_bytes=GROUPS):
        if "async" in request.param:
            made.append(await open_pool(socket, call_key, group_bytes=group_bytes))
        else:
            threads = 2 if "threads" in request.param else 1
            made.append(Blocking(socket, call_key, group_bytes, threads))
        return made[-1]

    yield open_one
    for client in made:
        await client.aclose()


@pytest.fixture
async def client(connect, daemon):
    return await connect(daemon.spec.socket)


def damage(daemon, key):
    pool = daemon.clients.pool
    (block,) = pool.pin([key], reader=999, now_s=0.0).blocks
    next(daemon.tier.arena.parts(block.extents, block.size))[4100 % 4096] ^= 0x10
    pool.reader_gone(999)


async def test_what_one_client_stores_another_loads(client, connect, daemon):
    keys = keys_of(10)
    assert await client.store(keys, blocks_of(keys), deadline_s=SOON_S) == 10
    other = await connect(daemon.spec.socket)
    into = targets(10)
    assert await other.load(keys, into, deadline_s=SOON_S) == (10, Outcome.HIT)
    assert into == blocks_of(keys)
    await other.held(keys)  # by now the daemon knows also of what was taken without asking
    assert daemon.clients.pool.funnel.hits == {Where.MEMORY: 10}


async def test_the_leading_run_is_loaded_and_the_rest_is_a_miss(client, daemon):
    keys = keys_of(4)
    part = [keys[0], keys[1], keys[3]]
    await client.store(part, blocks_of(part), deadline_s=SOON_S)
    assert await client.held(keys) == 2
    into = targets(4)
    assert await client.load(keys, into, deadline_s=SOON_S) == (2, Outcome.MISS)
    assert into == [*blocks_of(keys[:2]), *targets(2)]
    assert await client.load(keys_of(1, 50), targets(1), deadline_s=SOON_S) == (0, Outcome.MISS)
    assert daemon.clients.pool.funnel.lost == {Lost.NOT_COMPUTED: 3}


async def test_an_evicted_block_is_a_miss_that_is_counted_as_evicted(client, daemon):
    keys = keys_of(2)
    await client.store(keys, blocks_of(keys), deadline_s=SOON_S)
    daemon.tier.evict(2)
    assert await client.load(keys, targets(2), deadline_s=SOON_S) == (0, Outcome.MISS)
    assert daemon.clients.pool.funnel.lost == {Lost.EVICTED: 2}


async def test_a_damaged_page_is_corrupt_counted_and_dropped(client, daemon):
    keys = keys_of(3)
    await client.store(keys, blocks_of(keys), deadline_s=SOON_S)
    damage(daemon, keys[1])
    into = targets(3)
    assert await client.load(keys, into, deadline_s=SOON_S) == (1, Outcome.CORRUPT)
    assert into[0] == blocks_of(keys)[0]
    assert await client.held(keys[1:]) == 0
    assert daemon.clients.pool.funnel.lost == {Lost.CORRUPT: 2}
    assert daemon.clients.pool.counters.corrupt == 1
    assert await client.store(keys, blocks_of(keys), deadline_s=SOON_S) == 3
    assert await client.load(keys, targets(3), deadline_s=SOON_S) == (3, Outcome.HIT)


async def test_of_a_batch_that_is_checked_in_parts_the_run_before_a_damaged_block_is_right(
    client, daemon, monkeypatch
):
    monkeypatch.setattr(blocks, "TOGETHER", 4)
    keys = keys_of(11)
    await client.store(keys, blocks_of(keys), deadline_s=SOON_S)
    into = targets(11)
    assert await client.load(keys, into, deadline_s=SOON_S) == (11, Outcome.HIT)
    assert into == blocks_of(keys)
    damage(daemon, keys[9])
    assert await client.load(keys, targets(11), deadline_s=SOON_S) == (9, Outcome.CORRUPT)
    damage(daemon, keys[4])
    into = targets(9)
    assert await client.load(keys[:9], into, deadline_s=SOON_S) == (4, Outcome.CORRUPT)
    assert into[:4] == blocks_of(keys[:4])


async def test_bytes_of_another_block_under_a_key_are_corrupt(client, daemon):
    keys = keys_of(2)
    await client.store(keys, blocks_of(keys), deadline_s=SOON_S)
    for key, other in zip(keys, blocks_of(keys)[::-1], strict=True):
        at = 0
        for part in daemon.tier.arena.parts(daemon.clients.pool.block(key).extents, BLOCK):
            part[:] = other[at : at + part.nbytes]
            at += part.nbytes
    assert await client.load(keys, targets(2), deadline_s=SOON_S) == (0, Outcome.CORRUPT)


async def test_a_target_of_another_size_gets_nothing(client, connect, daemon):
    keys = keys_of(1)
    await client.store(keys, blocks_of(keys), deadline_s=SOON_S)
    assert (await client.load(keys, targets(1, BLOCK - 1), deadline_s=SOON_S))[0] == 0


async def test_a_full_pool_evicts_the_coldest_for_new_blocks(client, daemon):
    capacity = daemon.clients.pool.total_pages // 3
    keys = keys_of(3 * capacity)
    for start in range(0, len(keys), 20):
        part = keys[start : start + 20]
        assert await client.store(part, blocks_of(part), deadline_s=SOON_S) == len(part)
    assert await client.held(keys[-20:]) == 20
    assert await client.held(keys[:1]) == 0
    assert daemon.clients.pool.counters.evicted == len(keys) - capacity


async def test_a_pool_full_of_pins_refuses_instead_of_waiting(client, daemon):
    pool = daemon.clients.pool
    capacity = pool.total_pages // 3
    keys = keys_of(capacity)
    assert await client.store(keys, blocks_of(keys), deadline_s=SOON_S) == capacity
    daemon.clients.pool.pin(keys, reader=999, now_s=1e12)
    more = keys_of(3, 1000)
    assert await client.store(more, blocks_of(more), deadline_s=SOON_S) == 0
    assert pool.counters.refused == 3
    pool.reader_gone(999)
    assert await client.store(more, blocks_of(more), deadline_s=SOON_S) == 3


async def test_a_store_larger_than_the_pool_keeps_its_beginning(client, daemon):
    capacity = daemon.clients.pool.total_pages // 3
    keys = keys_of(2 * capacity)
    stored = await client.store(keys, blocks_of(keys), deadline_s=SOON_S)
    assert capacity <= stored < 2 * capacity


async def test_storing_what_is_held_writes_nothing(client, daemon):
    keys = keys_of(5)
    await client.store(keys, blocks_of(keys), deadline_s=SOON_S)
    assert await client.store(keys, blocks_of(keys), deadline_s=SOON_S) == 5
    counters = daemon.clients.pool.counters
    assert (counters.put, counters.duplicate, counters.expired) == (5, 0, 0)


async def test_more_keys_than_fit_a_request_go_through_and_their_head_stays_warmest(
    connect, tmp_path
):
    async with running(pool_spec(tmp_path, dram_bytes="8MiB")) as daemon:
        client, keys = await connect(daemon.spec.socket, group_bytes=()), keys_of(1500)
        assert await client.store(keys, blocks_of(keys, 100), deadline_s=SOON_S) == 1500
        assert await client.held(keys) == 1500
        into = targets(1500, 100)
        assert await client.load(keys, into, deadline_s=SOON_S) == (1500, Outcome.HIT)
        assert into == blocks_of(keys, 100)
        await client.store(keys, blocks_of(keys, 100), deadline_s=SOON_S)
        assert await client.held(keys) == 1500
        assert daemon.tier.evict(500) == keys[:999:-1]


async def test_a_block_that_is_not_its_layer_groups_is_a_caller_s_error(client, daemon):
    with pytest.raises(ValueError, match="layer groups"):
        await client.store(keys_of(1), targets(1, BLOCK + 1), deadline_s=SOON_S)
    assert daemon.clients.pool.counters.reserved == 0


async def test_more_layer_groups_than_a_block_can_have_tags_are_a_caller_s_error(connect, daemon):
    client = await connect(daemon.spec.socket, group_bytes=(1,) * 255 + (BLOCK - 255,))
    with pytest.raises(ValueError, match="256 layer groups"):
        await client.store(keys_of(1), blocks_of(keys_of(1)), deadline_s=SOON_S)
    assert daemon.clients.pool.counters.reserved == 0


async def test_no_daemon_is_unavailable_and_no_exception(connect, tmp_path):
    client = await connect(tmp_path / "nobody")
    keys = keys_of(2)
    assert await client.load(keys, targets(2), deadline_s=SOON_S) == (0, Outcome.UNAVAILABLE)
    assert await client.store(keys, blocks_of(keys), deadline_s=SOON_S) == 0
    assert await client.held(keys) == 0


async def test_no_time_is_late_or_unavailable_never_a_hit(client):
    keys = keys_of(2)
    await client.store(keys, blocks_of(keys), deadline_s=SOON_S)
    count, outcome = await client.load(keys, targets(2), deadline_s=0.0)
    assert (count, outcome in (Outcome.LATE, Outcome.UNAVAILABLE)) == (0, True)
    assert await client.store(keys, blocks_of(keys), deadline_s=0.0) == 0


async def test_a_client_with_another_call_key_is_refused(connect, daemon):
    client = await connect(daemon.spec.socket, call_key=b"x" * 32)
    keys = keys_of(1)
    assert await client.load(keys, targets(1), deadline_s=1.0) == (0, Outcome.UNAVAILABLE)
    assert await client.store(keys, blocks_of(keys), deadline_s=1.0) == 0
    assert daemon.clients.refused >= 1
    assert daemon.clients.pool.counters.reserved == 0


async def test_lengths_that_differ_are_a_caller_s_error(client):
    with pytest.raises(ValueError, match="2 keys"):
        await client.load(keys_of(2), targets(1), deadline_s=1.0)
    with pytest.raises(ValueError, match="2 keys"):
        await client.store(keys_of(2), targets(1), deadline_s=1.0)


async def test_a_restarted_daemon_holds_nothing_and_is_used_again(connect, tmp_path):
    spec, keys = pool_spec(tmp_path), keys_of(3)
    async with running(spec):
        client = await connect(spec.socket)
        assert await client.store(keys, blocks_of(keys), deadline_s=SOON_S) == 3
    into = targets(3)
    assert await client.load(keys, into, deadline_s=1.0) == (0, Outcome.UNAVAILABLE)
    assert into == targets(3)
    async with running(spec):
        outcome = Outcome.UNAVAILABLE
        async with asyncio.timeout(SOON_S):
            while outcome is Outcome.UNAVAILABLE:  # until the backoff is over
                _, outcome = await client.load(keys, into, deadline_s=1.0)
                await asyncio.sleep(0.01)
        assert outcome is Outcome.MISS
        assert await client.store(keys, blocks_of(keys), deadline_s=SOON_S) == 3
        assert await client.load(keys, into, deadline_s=SOON_S) == (3, Outcome.HIT)


async def test_memory_that_is_mapped_ahead_serves_as_any(client):
    keys = keys_of(4)
    await client.prefault()
    assert await client.store(keys, blocks_of(keys), deadline_s=SOON_S) == 4
    into = targets(4)
    assert await client.load(keys, into, deadline_s=SOON_S) == (4, Outcome.HIT)
    assert into == blocks_of(keys)


async def test_a_closed_client_gets_nothing(client):
    await client.aclose()
    assert await client.load(keys_of(1), targets(1), deadline_s=1.0) == (0, Outcome.UNAVAILABLE)
