"""Blocks that travel inside their PUT: nobody but the daemon writes them."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_connect import wire
from kimi_connect.frames import pack_frame
from kimi_connect.small_puts import SMALL_PUT_BYTES, SmallBlock, pack_put, tagged
from kimi_connect.storing import Stored, stored
from kimi_connect.wire import Commitment, Grant, Granted, GroupTag, Op, Outcome, Priority
from kimi_runtime.umbp import tags
from kimi_runtime.umbp.client import open_pool
from kimi_runtime.umbp.daemon import running
from kimi_runtime.umbp.link import open_link
from pool_daemon import BLOCK, CALL_KEY, blocks_of, keys_of, pool_spec, targets

SOON_S = 20.0


@pytest.fixture
async def daemon(tmp_path):
    async with running(pool_spec(tmp_path)) as made:
        yield made
        made.clients.pool.check_integrity()


async def bare(daemon):
    """A connection to do what a proper client never does."""
    instance = b"i" * 16
    given = {"instance": instance, "name": "bare", "writing": frozenset()}
    return await open_link(daemon.spec.socket, CALL_KEY, within_s=SOON_S, **given)


def put_of(keys):
    return pack_put(tagged(keys, blocks_of(keys), (), tags.leaves), "default", Priority.NORMAL)


async def until(condition):
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_small_store_waits_for_one_answer_and_the_next_for_none(daemon):
    client, keys = await open_pool(daemon.spec.socket, CALL_KEY), keys_of(3)
    blocks, link = blocks_of(keys), client._daemon._link
    assert sum(map(len, blocks)) <= SMALL_PUT_BYTES
    before = link._number
    assert await client.store(keys, blocks, deadline_s=SOON_S) == 3
    assert link._number == before + 2  # the put, and the wish for a stock
    assert daemon.clients.pool.counters.put == 3
    assert daemon.clients.pool.reservations(quarantined=False) == 0
    assert await client.load(keys, into := targets(3), deadline_s=SOON_S) == (3, Outcome.HIT)
    assert into == blocks
    await client.aclose()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
async def test_a_client_that_ends_in_the_middle_of_a_put_leaves_nothing(daemon, share):
    link, keys = await bare(daemon), keys_of(2)
    put = pack_frame(Op.PUT, 1, put_of(keys))
    link.transport.write(put[: int(share * len(put))])
    await until(lambda: link.transport.get_write_buffer_size() == 0)
    link.close()
    await until(lambda: not len(daemon.clients))
    pool = daemon.clients.pool
    assert pool.held(keys) == 0
    assert (pool.free_pages, pool.counters.reserved) == (pool.total_pages, 0)


async def test_a_put_whose_answer_nobody_waits_for_is_kept_whole(daemon):
    link, keys = await bare(daemon), keys_of(2)
    link.tell(Op.PUT, put_of(keys))
    await until(lambda: daemon.clients.pool.held(keys) == 2)
    link.close()
    client = await open_pool(daemon.spec.socket, CALL_KEY)
    assert await client.load(keys, into := targets(2), deadline_s=SOON_S) == (2, Outcome.HIT)
    assert into == blocks_of(keys)
    await client.aclose()


async def test_bytes_that_changed_on_their_way_are_corrupt_for_who_reads_them(daemon):
    link, keys = await bare(daemon), keys_of(1)
    put = bytearray(put_of(keys))
    put[-1] ^= 1
    await link.call(Op.PUT, bytes(put), within_s=SOON_S)
    link.close()
    client = await open_pool(daemon.spec.socket, CALL_KEY)
    assert await client.load(keys, targets(1), deadline_s=SOON_S) == (0, Outcome.CORRUPT)
    await client.aclose()


async def test_a_draining_daemon_counts_what_it_has_and_takes_nothing(daemon):
    client, keys = await open_pool(daemon.spec.socket, CALL_KEY), keys_of(3)
    assert await client.store(keys[:1], blocks_of(keys[:1]), deadline_s=SOON_S) == 1
    daemon.clients.draining = True
    assert await client.store(keys, blocks_of(keys), deadline_s=SOON_S) == 1
    assert daemon.clients.pool.counters.put == 1
    await client.aclose()


async def test_a_put_larger_than_all_memory_keeps_what_fits(daemon):
    keys = keys_of(3)
    group = (GroupTag(BLOCK, bytes(16)),)
    large = memoryview(bytes(daemon.clients.pool.total_pages * 4096))
    blocks = [SmallBlock(keys[0], group, blocks_of(keys)[0]), SmallBlock(keys[1], group, large)]
    link = await bare(daemon)
    answer = await link.call(Op.PUT, pack_put(blocks, "default", Priority.NORMAL), within_s=SOON_S)
    assert answer.payload == (1).to_bytes(8, "little")
    assert daemon.clients.pool.held(keys) == 1
    link.close()


async def test_a_client_of_another_version_is_told_both(daemon):
    reader, writer = await asyncio.open_unix_connection(str(daemon.spec.socket))
    hello = (wire.VERSION - 1).to_bytes(2, "little") + bytes(100)
    writer.write(pack_frame(Op.HELLO, 0, hello))
    async with asyncio.timeout(SOON_S):
        said = await reader.read()
    versions = f"the client speaks version {wire.VERSION - 1}, this daemon {wire.VERSION}"
    assert versions.encode() in said
    writer.close()
    await writer.wait_closed()


GRANTS = st.lists(st.sampled_from(Grant), max_size=8)


@settings(max_examples=50, deadline=None)
@given(GRANTS, st.data())
def test_the_leading_run_ends_at_the_first_block_the_pool_does_not_hold(grants, data):
    reserved = grants.count(Grant.RESERVED)
    states = data.draw(st.lists(st.sampled_from(Commitment), max_size=reserved))
    left, held = list(states), []
    for grant in grants:
        state = left.pop(0) if grant is Grant.RESERVED and left else Commitment.EXPIRED
        held.append(grant is Grant.HELD or state is not Commitment.EXPIRED)
    run = held.index(False) if False in held else len(held)
    fresh = sum(state is not Commitment.EXPIRED for state in states)
    assert stored([Granted(grant) for grant in grants], states) == Stored(len(grants), run, fresh)
