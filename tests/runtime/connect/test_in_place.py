"""Blocks that a blocking client writes and reads where they lie."""

import asyncio
import socket
import time

import pytest

from kimi_connect.client import ArenaClient
from kimi_connect.payloads import pack_keys
from kimi_connect.wire import Op, Outcome
from kimi_runtime.umbp.daemon import running
from kimi_runtime.umbp.tags import leaves
from pool_daemon import BLOCK, CALL_KEY, blocks_of, keys_of, pool_spec, targets

GROUPS = (4096, 5000, 904)
SOON_S = 20.0


@pytest.fixture
async def daemon(tmp_path):
    async with running(pool_spec(tmp_path, pin_lease=0.4)) as made:
        yield made
        made.clients.pool.check_integrity()


@pytest.fixture
async def client(daemon):
    made = ArenaClient(daemon.spec.socket, CALL_KEY, group_bytes=GROUPS, leaves=leaves)
    yield made
    made.close()


async def of(work, *arguments, **named):
    """A blocking call, while the daemon of this process goes on."""
    return await asyncio.to_thread(work, *arguments, **named)


def fill(placed, blocks):
    for parts, block in zip(placed.parts, blocks, strict=False):
        at = 0
        for part in parts or ():
            part[:] = block[at : at + part.nbytes]
            at += part.nbytes


async def test_what_was_placed_and_committed_is_loaded_and_nothing_before(client):
    keys = keys_of(3)
    placed = await of(client.place, keys, [BLOCK] * 3, deadline_s=SOON_S)
    fill(placed, blocks_of(keys))
    assert await of(client.held, keys) == 0
    assert await of(placed.commit) == 3
    into = targets(3)
    assert await of(client.load, keys, into, deadline_s=SOON_S) == (3, Outcome.HIT)
    assert into == blocks_of(keys)


async def test_what_the_pool_holds_already_is_not_placed_again(client, daemon):
    keys = keys_of(3)
    await of(client.store, keys[:2], blocks_of(keys[:2]), deadline_s=SOON_S)
    placed = await of(client.place, keys, [BLOCK] * 3, deadline_s=SOON_S)
    assert [parts is None for parts in placed.parts] == [True, True, False]
    fill(placed, blocks_of(keys))
    assert await of(placed.commit) == 3


async def test_a_part_can_be_committed_and_the_rest_is_given_back(client, daemon):
    keys = keys_of(3)
    free = daemon.clients.pool.free_pages
    with await of(client.place, keys, [BLOCK] * 3, deadline_s=SOON_S) as placed:
        fill(placed, blocks_of(keys))
        assert await of(placed.commit, 1) == 1
        with pytest.raises(ValueError, match="already"):
            placed.commit()
    assert await of(client.held, keys) == 1
    daemon.tier.evict(1)
    assert daemon.clients.pool.free_pages == free


async def test_a_block_that_was_left_is_given_back(client, daemon):
    free = daemon.clients.pool.free_pages

    def leave():
        with client.place(keys_of(2), [BLOCK] * 2, deadline_s=SOON_S):
            assert daemon.clients.pool.free_pages < free

    await of(leave)
    assert daemon.clients.pool.free_pages == free


async def test_a_commit_after_the_reservation_lapsed_keeps_nothing_and_frees_its_pages(
    client, daemon
):
    pool = daemon.clients.pool
    free = pool.free_pages
    placed = await of(client.place, keys_of(1), [BLOCK], deadline_s=SOON_S)
    pool.expire(1e12)
    assert pool.free_pages < free  # in quarantine: it may still be written to
    fill(placed, blocks_of(keys_of(1)))
    assert await of(placed.commit) == 0
    assert pool.free_pages == free


async def test_pages_stay_out_of_use_over_a_new_connection_until_their_writer_has_ended(
    client, daemon
):
    pool = daemon.clients.pool
    free = pool.free_pages
    placed = await of(client.place, keys_of(1), [BLOCK], deadline_s=SOON_S)
    client._daemon.drop()
    await of(client.held, keys_of(1))
    assert pool.free_pages < free
    await of(placed.abort)
    assert pool.free_pages == free


async def test_without_a_daemon_there_is_nothing_to_write_or_read(tmp_path):
    client = ArenaClient(tmp_path / "nobody", CALL_KEY)
    placed = client.place(keys_of(1), [BLOCK], deadline_s=1)
    assert (placed.parts, placed.commit()) == ([], 0)
    lent = client.lend(keys_of(1), deadline_s=1)
    assert (list(lent.parts), lent.outcome) == ([], Outcome.UNAVAILABLE)


async def test_what_is_lent_is_the_leading_run_and_stays_until_it_is_given_back(client, daemon):
    keys = keys_of(3)
    await of(client.store, keys[:2], blocks_of(keys[:2]), deadline_s=SOON_S)
    lent = await of(client.lend, keys, deadline_s=SOON_S)
    assert (len(lent.parts), lent.outcome) == (2, Outcome.MISS)
    assert [b"".join(parts) for parts in lent.parts] == [bytes(b) for b in blocks_of(keys[:2])]
    with pytest.raises(TypeError, match="read-only"):
        lent.parts[0][0][0] = 1
    assert await of(lent.renew)
    assert not daemon.tier.evict(9)
    assert await of(lent.give_back)
    assert not await of(lent.renew)
    assert len(daemon.tier.evict(9)) == 2


async def test_a_pin_that_lapsed_is_said_when_it_is_given_back(client, daemon):
    keys = keys_of(1)
    await of(client.store, keys, blocks_of(keys), deadline_s=SOON_S)
    lent = await of(client.lend, keys, deadline_s=SOON_S)
    daemon.clients.pool.expire(1e12)
    assert not await of(lent.give_back)


async def test_a_daemon_that_goes_while_blocks_are_checked_is_an_outcome(client, daemon):
    keys = keys_of(2)
    await of(client.store, keys, blocks_of(keys), deadline_s=SOON_S)

    def gone_meanwhile(view):
        client._daemon.close()
        time.sleep(0.2)  # past a third of the lease, when the pin is renewed
        return leaves(view)

    client._leaves = gone_meanwhile
    lent = await of(client.lend, keys, deadline_s=SOON_S)
    assert (list(lent.parts), lent.outcome) == ([], Outcome.UNAVAILABLE)


async def test_a_damaged_block_is_not_lent(client, daemon):
    keys = keys_of(2)
    await of(client.store, keys, blocks_of(keys), deadline_s=SOON_S)
    extents = daemon.clients.pool.block(keys[1]).extents
    next(daemon.tier.arena.parts(extents, BLOCK))[7] ^= 1
    with await of(client.lend, keys, deadline_s=SOON_S) as lent:
        assert (len(lent.parts), lent.outcome) == (1, Outcome.CORRUPT)


async def test_a_frame_of_which_the_socket_takes_a_part_at_a_time_arrives_whole(daemon):
    client = ArenaClient(daemon.spec.socket, CALL_KEY, leaves=leaves)
    keys = keys_of(12)
    assert await of(client.held, keys) == 0
    connection = client._daemon.connection(time.monotonic() + SOON_S)
    connection._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    assert await of(client.store, keys, blocks_of(keys), deadline_s=SOON_S) == 12  # in one PUT
    assert client._daemon.connected
    into = targets(12)
    assert await of(client.load, keys, into, deadline_s=SOON_S) == (12, Outcome.HIT)
    assert into == blocks_of(keys)
    client.close()


async def test_a_daemon_that_reads_no_more_costs_who_tells_it_no_more_than_the_deadline(daemon):
    client = ArenaClient(daemon.spec.socket, CALL_KEY, leaves=leaves)
    await of(client.held, keys_of(1))
    connection = client._daemon.connection(time.monotonic() + SOON_S)
    connection._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with pytest.raises(TimeoutError):  # its loop is ours, and does not run meanwhile
        client._daemon.tell(Op.USED, pack_keys(keys_of(4096)), time.monotonic() + 0.05)
    assert not client._daemon.connected
    client.close()
