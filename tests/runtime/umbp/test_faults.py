"""Processes that die or dawdle at the worst moment."""

import asyncio
import signal
import time

import pytest

from kimi_connect import payloads
from kimi_connect.wire import Commitment, Grant, GroupTag, Op, Outcome
from kimi_runtime.errors import ConfigError
from kimi_runtime.umbp import tags
from kimi_runtime.umbp.client import open_pool
from kimi_runtime.umbp.daemon import running
from kimi_runtime.umbp.link import LinkLost, open_link
from pool_daemon import (
    BLOCK,
    CALL_KEY,
    DaemonProcess,
    blocks_of,
    keys_of,
    pool_spec,
    start_python,
    targets,
)

WRITER = """
import sys
from kimi_connect.connection import Connection, now_s
from kimi_connect import payloads
from kimi_connect.wire import Op
ends_s = now_s() + 60
link = Connection(sys.argv[1], sys.argv[2].encode(), b"i" * 16, "writer", (), ends_s)
key = (1).to_bytes(16, "big")
payload = payloads.pack_reserve([(key, 10_000)])
(granted,) = payloads.unpack_reserved(link.call(Op.RESERVE, payload, Op.RESERVED, ends_s))
next(link.arena.parts(granted.extents, 10_000))[:100] = b"half a block" + bytes(88)
if sys.argv[3] == "hang up":
    link.close()
print(granted.generation, flush=True)
sys.stdin.read()
"""


async def until(condition, within_s=20.0):
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
async def daemon(tmp_path):
    spec = pool_spec(tmp_path, reservation_ttl=0.4, pin_lease=0.4)
    async with running(spec) as made:
        yield made
        made.clients.pool.check_integrity()


async def connect(daemon, instance=b"r" * 16, writing=frozenset()):
    """A bare connection, to do what a proper client never does."""
    return await open_link(
        daemon.spec.socket,
        CALL_KEY,
        instance=instance,
        name="bare",
        writing=writing,
        within_s=5.0,
    )


async def reserve(link, key, size=BLOCK):
    answer = await link.call(Op.RESERVE, payloads.pack_reserve([(key, size)]), within_s=5.0)
    (granted,) = payloads.unpack_reserved(answer.payload)
    return granted


async def commit(link, generation, key):
    block = blocks_of([key])[0]
    group = GroupTag(BLOCK, tags.tag(key, 0, block))
    payload = payloads.pack_commit([(generation, (group,))])
    answer = await link.call(Op.COMMIT, payload, within_s=5.0)
    return payloads.unpack_committed(answer.payload)[0]


async def pin(link, keys):
    answer = await link.call(Op.PIN, payloads.pack_pin(keys, 5.0), within_s=5.0)
    return payloads.unpack_pinned(answer.payload)


async def number(link, op, payload):
    return payloads.unpack_number((await link.call(op, payload, within_s=5.0)).payload)


@pytest.mark.parametrize("how", ["stay", "hang up"])
async def test_a_writer_killed_mid_put_is_never_visible_and_its_pages_come_back(daemon, how):
    pool = daemon.clients.pool
    writer = start_python(WRITER, str(daemon.spec.socket), CALL_KEY.decode(), how)
    try:
        await asyncio.to_thread(writer.stdout.readline)
        if how == "hang up":
            # without its connection it could still write: nothing is given back while it lives
            await until(lambda: pool.reservations(quarantined=True) == 1)
        assert pool.free_pages == pool.total_pages - 3
        writer.send_signal(signal.SIGKILL)
        await until(lambda: pool.free_pages == pool.total_pages)
    finally:
        writer.kill()
        await asyncio.to_thread(writer.communicate)
    assert pool.held(keys_of(1)) == 0
    assert pool.counters.writer_gone == 1


async def test_a_writer_later_than_its_reservation_never_becomes_visible(daemon):
    pool, (key,) = daemon.clients.pool, keys_of(1)
    link = await connect(daemon)
    granted = await reserve(link, key)
    await until(lambda: pool.reservations(quarantined=True) == 1)
    other = await connect(daemon, instance=b"o" * 16)
    taken = [await reserve(other, k, 4096) for k in keys_of(pool.total_pages - 3, 10)]
    assert all(g.grant is Grant.RESERVED for g in taken)
    # the rest of the pool is given out, the three quarantined pages to nobody
    assert (await reserve(other, keys_of(1, 999)[0], 4096)).grant is Grant.FULL
    assert await commit(link, granted.generation, key) is Commitment.EXPIRED
    assert pool.held([key]) == 0
    assert (await reserve(other, keys_of(1, 999)[0], 4096)).grant is Grant.RESERVED
    link.close()
    other.close()


async def test_a_reader_slower_than_its_lease_is_told_so(daemon):
    pool, keys = daemon.clients.pool, keys_of(2)
    client = await open_pool(daemon.spec.socket, CALL_KEY)
    await client.store(keys, blocks_of(keys), deadline_s=5.0)
    link = await connect(daemon)
    number_, _, blocks = await pin(link, keys)
    assert len(blocks) == 2
    await until(lambda: pool.counters.lapsed == 2)
    unpin = payloads.pack_unpin(number_, 2, corrupt=False)
    assert await number(link, Op.UNPIN, unpin) == 0
    assert await number(link, Op.RENEW, payloads.pack_number(number_)) == 0
    link.close()
    await client.aclose()


async def test_a_renewed_lease_outlives_the_first_one(daemon):
    pool, keys = daemon.clients.pool, keys_of(1)
    client = await open_pool(daemon.spec.socket, CALL_KEY)
    await client.store(keys, blocks_of(keys), deadline_s=5.0)
    link = await connect(daemon)
    pinned, _, _ = await pin(link, keys)
    ends = time.monotonic() + 1.0
    while time.monotonic() < ends:
        assert await number(link, Op.RENEW, payloads.pack_number(pinned)) == 1
        await asyncio.sleep(0.02)
    assert await number(link, Op.UNPIN, payloads.pack_unpin(pinned, 1, corrupt=False)) == 1
    assert pool.counters.lapsed == 0
    link.close()
    await client.aclose()


async def test_a_lost_connection_ends_its_pins_at_once(daemon):
    keys = keys_of(1)
    client = await open_pool(daemon.spec.socket, CALL_KEY)
    await client.store(keys, blocks_of(keys), deadline_s=5.0)
    link = await connect(daemon)
    await pin(link, keys)
    assert daemon.clients.pool.open_pins == 1
    link.close()
    await until(lambda: daemon.clients.pool.open_pins == 0)
    await client.aclose()


async def test_a_client_that_comes_back_frees_what_it_no_longer_writes(daemon):
    pool, (one, two) = daemon.clients.pool, keys_of(2)
    link = await connect(daemon)
    first, second = await reserve(link, one), await reserve(link, two)
    link.close()
    await until(lambda: pool.reservations(quarantined=True) == 2)
    again = await connect(daemon, writing=frozenset({second.generation}))
    assert pool.reservations(quarantined=True) == 1
    assert await commit(again, first.generation, one) is Commitment.EXPIRED
    abort = payloads.pack_generations([second.generation])
    assert await number(again, Op.ABORT, abort) == 1
    assert pool.free_pages == pool.total_pages
    again.close()


async def test_a_second_connection_of_one_client_replaces_the_first(daemon):
    link = await connect(daemon)
    again = await connect(daemon)
    with pytest.raises(LinkLost):
        await reserve(link, keys_of(1)[0])
    assert (await reserve(again, keys_of(1)[0])).grant is Grant.RESERVED
    again.close()


@pytest.mark.parametrize("op", [Op.RESERVE, Op.PIN])
async def test_an_answer_nobody_waits_for_is_given_back(daemon, op):
    pool, keys = daemon.clients.pool, keys_of(1)
    client = await open_pool(daemon.spec.socket, CALL_KEY)
    await client.store(keys, blocks_of(keys), deadline_s=5.0)
    assert await client.held(keys) == 1  # which is answered after it has its stock
    link = await connect(daemon)
    free, before = pool.free_pages, pool.counters.pinned + pool.counters.reserved
    new = keys_of(1, 50)[0]
    payload = payloads.pack_pin(keys, 5.0) if op is Op.PIN else payloads.pack_reserve([(new, 9)])
    call = asyncio.gather(link.call(op, payload, within_s=5.0))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: pool.counters.pinned + pool.counters.reserved == before + 1)
    await until(lambda: pool.open_pins == 0 and pool.free_pages == free)
    link.close()
    await client.aclose()


async def test_cancelling_a_client_s_calls_leaves_nothing_held(daemon):
    pool, size = daemon.clients.pool, 100_000
    keys = keys_of(8)
    client = await open_pool(daemon.spec.socket, CALL_KEY)
    for ticks in range(1, 7):
        for work in (
            lambda: client.store(keys, blocks_of(keys, size), deadline_s=5.0),
            lambda: client.load(keys, targets(8, size), deadline_s=5.0),
        ):
            running_ = asyncio.gather(work())
            for _ in range(ticks):
                await asyncio.sleep(0)
            running_.cancel()
            await asyncio.gather(running_, return_exceptions=True)
            await until(
                lambda: (
                    not pool.open_pins
                    and not pool.reservations(quarantined=False)
                    and not pool.reservations(quarantined=True)
                )
            )
            pool.check_integrity()
    assert await client.store(keys, blocks_of(keys, size), deadline_s=5.0) == 8
    assert await client.load(keys, targets(8, size), deadline_s=5.0) == (8, Outcome.HIT)
    await client.aclose()


async def test_a_killed_daemon_costs_what_the_arena_lacks_and_a_new_one_is_used_without_a_restart(
    tmp_path,
):
    spec, keys = pool_spec(tmp_path), keys_of(20)
    first = await asyncio.to_thread(DaemonProcess, spec)
    client = await open_pool(spec.socket, CALL_KEY)
    assert await client.store(keys, blocks_of(keys), deadline_s=5.0) == 20
    into = targets(20)
    first.kill()
    others = keys_of(3, 100)
    assert await client.load(others, targets(3), deadline_s=1.0) == (0, Outcome.UNAVAILABLE)
    assert await client.load(keys, into, deadline_s=1.0) == (20, Outcome.HIT)
    assert into == blocks_of(keys)
    assert await client.store(keys, blocks_of(keys), deadline_s=1.0) == 0
    second = await asyncio.to_thread(DaemonProcess, spec)
    try:
        outcomes = set()
        async with asyncio.timeout(20):
            while await client.store(keys, blocks_of(keys), deadline_s=1.0) < 20:
                count, outcome = await client.load(keys, into, deadline_s=1.0)
                outcomes.add(outcome)
                assert into[:count] == blocks_of(keys[:count])
        assert outcomes <= {Outcome.UNAVAILABLE, Outcome.MISS, Outcome.HIT}
        assert await client.load(keys, into, deadline_s=5.0) == (20, Outcome.HIT)
        assert into == blocks_of(keys)
        assert client.connects == 2
    finally:
        second.kill()
        await client.aclose()


async def test_a_stopped_daemon_is_late_not_a_hang(tmp_path):
    spec, keys = pool_spec(tmp_path), keys_of(2)
    process = await asyncio.to_thread(DaemonProcess, spec)
    client = await open_pool(spec.socket, CALL_KEY)
    await client.store(keys, blocks_of(keys), deadline_s=5.0)
    process._process.send_signal(signal.SIGSTOP)
    try:
        start_s = time.monotonic()
        others = keys_of(2, 50)
        assert await client.load(others, targets(2), deadline_s=0.1) == (0, Outcome.LATE)
        assert time.monotonic() - start_s < 2
        into = targets(2)
        assert await client.load(keys, into, deadline_s=5.0) == (2, Outcome.HIT)
        assert into == blocks_of(keys)  # what the arena lists needs no daemon
    finally:
        process.kill()
        await client.aclose()


def listening(spec):
    return asyncio.to_thread(DaemonProcess, spec)


async def test_a_killed_daemon_s_memory_is_served_by_the_next(tmp_path):
    spec, keys = pool_spec(tmp_path), keys_of(60)
    process = await listening(spec)
    client = await open_pool(spec.socket, CALL_KEY)
    assert await client.store(keys, blocks_of(keys), deadline_s=5.0) == 60
    await client.load(keys[:20], targets(20), deadline_s=5.0)
    first = client._daemon.arena.epoch
    process.kill()
    async with running(spec) as daemon:
        assert daemon.clients.arena.epoch > first
        assert all(key in daemon.clients.feed for key in keys)
        await until(lambda: daemon.clients.proving.intact == 60)
        other = await open_pool(spec.socket, CALL_KEY)
        for one in (client, other):  # who was there before, and who is new
            into = targets(60)
            async with asyncio.timeout(20):
                while (await one.load(keys, into, deadline_s=5.0)) != (60, Outcome.HIT):
                    await asyncio.sleep(0.01)
            assert into == blocks_of(keys)
        more = keys_of(5, 500)
        assert await client.store(more, blocks_of(more), deadline_s=5.0) == 5
        daemon.clients.pool.check_integrity()
        await other.aclose()
    assert not spec.arena.exists()
    await client.aclose()


async def test_what_was_damaged_while_no_daemon_ran_is_dropped_and_never_served(tmp_path):
    spec, keys = pool_spec(tmp_path), keys_of(3)
    process = await listening(spec)
    client = await open_pool(spec.socket, CALL_KEY)
    assert await client.store(keys, blocks_of(keys), deadline_s=5.0) == 3
    process.kill()
    page = client._daemon.arena.directory.find(keys[1]).block.extents[0]
    next(client._daemon.arena.parts([page], 100))[50] ^= 1
    into = targets(3)
    assert (await client.load(keys, into, deadline_s=1.0)).blocks == 1
    async with running(spec) as daemon:
        await until(lambda: daemon.clients.proving.intact == 2)
        assert (daemon.clients.proving.intact, daemon.clients.proving.damaged) == (2, 1)
        assert [key in daemon.clients.feed for key in keys] == [True, False, True]
        daemon.clients.pool.check_integrity()
    await client.aclose()


async def test_a_put_that_a_daemon_s_end_cut_is_kept_out_while_its_writer_lives(tmp_path):
    spec, (key,) = pool_spec(tmp_path), keys_of(1)
    process = await listening(spec)
    args = (str(spec.socket), CALL_KEY.decode(), "hold on")
    writer = await asyncio.to_thread(start_python, WRITER, *args)
    try:
        generation = int(await asyncio.to_thread(writer.stdout.readline))
        process.kill()
        async with running(spec) as daemon:
            pool = daemon.clients.pool
            assert pool.reservations(quarantined=True) == 1
            assert pool.number >= generation
            client = await open_pool(spec.socket, CALL_KEY)
            await client.store([key], blocks_of([key]), deadline_s=5.0)
            daemon.clients.sweep()
            assert pool.reservations(quarantined=True) == 1
            writer.kill()
            await asyncio.to_thread(writer.communicate)
            await until(lambda: pool.reservations(quarantined=True) == 0)  # by the daemon's clock
            into = targets(1)
            assert await client.load([key], into, deadline_s=5.0) == (1, Outcome.HIT)
            assert into == blocks_of([key])
            pool.check_integrity()
            await client.aclose()
    finally:
        writer.kill()
        await asyncio.to_thread(writer.communicate)


async def test_a_writer_that_comes_back_to_the_next_daemon_gives_up_what_it_no_longer_writes(
    tmp_path,
):
    spec, keys = pool_spec(tmp_path), keys_of(2)
    process = await listening(spec)
    link = await open_link(
        *(spec.socket, CALL_KEY),
        instance=b"r" * 16,
        name="bare",
        writing=frozenset(),
        within_s=5.0,
    )
    one, two = [await reserve(link, key) for key in keys]
    process.kill()
    async with running(spec) as daemon:
        assert daemon.clients.pool.reservations(quarantined=True) == 2
        back = await connect(daemon, writing=frozenset({two.generation}))
        assert daemon.clients.pool.reservations(quarantined=True) == 1
        assert await commit(back, two.generation, keys[1]) is Commitment.EXPIRED
        assert daemon.clients.pool.reservations(quarantined=True) == 0
        assert one.generation < two.generation < (await reserve(back, keys[0])).generation
        back.close()
    link.close()


@pytest.mark.parametrize("keep", [True, False])
async def test_a_stop_in_order_leaves_the_memory_if_it_is_to(tmp_path, keep):
    spec, keys = pool_spec(tmp_path, keep_arena=keep), keys_of(6)
    client = await open_pool(spec.socket, CALL_KEY)
    async with running(spec):
        await client.aclose()
        client = await open_pool(spec.socket, CALL_KEY)
        assert await client.store(keys, blocks_of(keys), deadline_s=5.0) == 6
    assert spec.arena.exists() is keep
    assert await client.load(keys, targets(6), deadline_s=1.0) == (0, Outcome.UNAVAILABLE)
    async with running(spec) as daemon:
        assert daemon.clients.pool.live_blocks == (6 if keep else 0)
        daemon.clients.pool.check_integrity()
    await client.aclose()


async def test_memory_of_another_layout_is_not_taken_over(tmp_path):
    spec, keys = pool_spec(tmp_path), keys_of(6)
    process = await listening(spec)
    client = await open_pool(spec.socket, CALL_KEY)
    await client.store(keys, blocks_of(keys), deadline_s=5.0)
    process.kill()
    async with running(pool_spec(tmp_path, page_bytes=8192)) as daemon:
        assert daemon.clients.pool.live_blocks == 0
        assert (await client.load(keys, targets(6), deadline_s=5.0)).blocks == 0
    await client.aclose()


async def test_memory_on_a_numa_node_is_had_there_or_says_why_not(tmp_path):
    spec = pool_spec(tmp_path, numa_nodes=(0,))
    async with running(spec) as daemon:
        client = await open_pool(spec.socket, CALL_KEY)
        keys = keys_of(3)
        assert await client.store(keys, blocks_of(keys), deadline_s=5.0) == 3
        await client.aclose()
        daemon.clients.pool.check_integrity()
    with pytest.raises(ConfigError, match="node 977"):
        async with running(pool_spec(tmp_path, numa_nodes=(0, 977))):
            pass
    assert not spec.arena.exists()


async def test_concurrent_writers_and_readers_never_see_another_key_s_bytes(daemon):
    """The oracle: whatever is evicted, pinned or rewritten meanwhile, bytes are the key's."""
    clients = [await open_pool(daemon.spec.socket, CALL_KEY) for _ in range(4)]
    every = keys_of(120)

    async def churn(client, seed):
        for round_ in range(12):
            start = (seed * 37 + round_ * 29) % 100
            keys = every[start : start + 20]
            await client.store(keys, blocks_of(keys), deadline_s=5.0)
            into = targets(20)
            count, _ = await client.load(keys, into, deadline_s=5.0)
            assert into[:count] == blocks_of(keys[:count])

    async with asyncio.TaskGroup() as tasks:
        for seed, client in enumerate(clients):
            tasks.create_task(churn(client, seed))
    daemon.clients.pool.check_integrity()
    assert daemon.clients.pool.counters.evicted > 0
    assert daemon.clients.pool.funnel.hits.total() > 0
    for client in clients:
        await client.aclose()


@pytest.mark.parametrize("junk", [b"", b"\xff" * 13, b"GET / HTTP/1.1\r\n\r\n", bytes(13)])
async def test_junk_on_the_socket_ends_that_connection_only(daemon, junk):
    reader, writer = await asyncio.open_unix_connection(str(daemon.spec.socket))
    writer.write(junk)
    if not junk:
        writer.write_eof()
    async with asyncio.timeout(5):
        await reader.read()
    writer.close()
    await writer.wait_closed()
    link = await connect(daemon)
    assert (await reserve(link, keys_of(1)[0])).grant is Grant.RESERVED
    link.close()
