"""Blocks read where they lie."""

import asyncio

import pytest

from kimi_connect.wire import Outcome
from kimi_runtime.umbp.client import open_pool
from kimi_runtime.umbp.daemon import running
from pool_daemon import BLOCK, CALL_KEY, blocks_of, keys_of, pool_spec


@pytest.fixture
async def daemon(tmp_path):
    async with running(pool_spec(tmp_path, pin_lease=0.4)) as made:
        yield made
        made.clients.pool.check_integrity()


@pytest.fixture
async def pool(daemon):
    client = await open_pool(daemon.spec.socket, CALL_KEY)
    yield client
    await client.aclose()


def bytes_of(lent):
    return [b"".join(parts) for parts in lent.parts]


async def test_what_is_lent_is_the_leading_run_and_stays_until_it_is_given_back(daemon, pool):
    keys = keys_of(4)
    await pool.store(keys[:3], blocks_of(keys[:3]), deadline_s=5.0)
    lent = await pool.lend(keys, deadline_s=5.0)
    assert (len(lent.parts), lent.outcome) == (3, Outcome.MISS)
    daemon.tier.evict(9)
    (pin,) = daemon.clients.pool._readers.pins.values()
    first_s = pin.expires_s
    async with asyncio.timeout(20):
        while pin.expires_s < first_s + 2 * 0.4:  # its lease is renewed, again and again
            await asyncio.sleep(0.01)
    assert daemon.clients.pool.held(keys) == 3
    assert bytes_of(lent) == [bytes(block) for block in blocks_of(keys[:3])]
    with pytest.raises(TypeError, match="read-only"):
        lent.parts[0][0][0] = 1
    assert await lent.give_back()
    assert len(daemon.tier.evict(9)) == 3


async def test_a_pin_that_lapsed_is_said_when_it_is_given_back(daemon, pool):
    keys = keys_of(1)
    await pool.store(keys, blocks_of(keys), deadline_s=5.0)
    lent = await pool.lend(keys, deadline_s=5.0)
    daemon.clients.pool.expire(1e12)
    assert not await lent.give_back()


async def test_a_damaged_block_is_not_lent_and_is_dropped(daemon, pool):
    keys = keys_of(3)
    await pool.store(keys, blocks_of(keys), deadline_s=5.0)
    extents = daemon.clients.pool.block(keys[1]).extents
    next(daemon.tier.arena.parts(extents, BLOCK))[7] ^= 1
    lent = await pool.lend(keys, deadline_s=5.0)
    assert (len(lent.parts), lent.outcome) == (1, Outcome.CORRUPT)
    assert await lent.give_back()
    assert [daemon.clients.pool.block(key) is None for key in keys] == [False, True, False]


async def test_without_a_daemon_nothing_is_lent(tmp_path):
    client = await open_pool(tmp_path / "nobody.sock", CALL_KEY)
    lent = await client.lend(keys_of(2), deadline_s=1.0)
    assert (lent.parts, lent.outcome) == ([], Outcome.UNAVAILABLE)
    assert await lent.give_back()
    await client.aclose()
