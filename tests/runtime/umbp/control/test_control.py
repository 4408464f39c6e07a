"""What an operator can ask of a running daemon."""

import asyncio
import contextlib

import pytest

from kimi_runtime.errors import Overloaded, RequestError
from kimi_runtime.spec.ssd import SsdSpec
from kimi_runtime.umbp.client import open_pool
from kimi_runtime.umbp.daemon import running
from kimi_runtime.umbp.rpc.methods import CLEAR, DRAIN, EVICT, INSPECT, VERIFY
from kimi_runtime.umbp.state import Phase
from pool_control import SOON_S, control_of
from pool_daemon import BLOCK, CALL_KEY, blocks_of, keys_of, pool_spec, targets
from pool_peers import knows, peer, until


@pytest.fixture(params=[False, True], ids=["memory", "memory and ssd"])
async def daemon(request, tmp_path):
    ssd = SsdSpec(folder=tmp_path / "ssd", capacity="16MiB", segment="1MiB")
    spec = pool_spec(tmp_path, ssd=ssd if request.param else None, ssd_after_uses=1)
    async with running(spec) as made:
        yield made
        made.clients.pool.check_integrity()
        made.clients.pool.funnel.check()


@pytest.fixture
async def control(daemon):
    async with control_of(daemon.spec) as made:
        yield made


@pytest.fixture
async def pool(daemon):
    client = await open_pool(daemon.spec.socket, CALL_KEY)
    yield client
    await client.aclose()


async def filled(pool, count, **given):
    keys = keys_of(count)
    assert await pool.store(keys, blocks_of(keys), deadline_s=SOON_S, **given) == count
    return keys


def damage(daemon, key):
    """One flipped bit, as memory does it."""
    block = daemon.clients.pool.block(key)
    next(daemon.clients.arena.parts(block.extents, block.size))[5] ^= 8


async def test_inspect_tells_what_is_held_for_whom_and_what_is_used_most(daemon, control, pool):
    keys = await filled(pool, 5, tenant="a")
    others = keys_of(3, 100)
    await pool.store(others, blocks_of(others), deadline_s=SOON_S, tenant="b")
    for _ in range(3):
        await pool.load(keys[:1], targets(1), deadline_s=SOON_S)
    await pool.held(keys)
    daemon.clients.pool.revoke()  # a stock counts as used
    told = await control(INSPECT, hottest=2)
    assert (told.name, told.phase, told.epoch) == ("pool", "ready", daemon.clients.arena.epoch)
    memory = told.tiers[0]
    assert (memory.name, memory.blocks) == ("memory", 8)
    assert memory.used_bytes == 8 * 3 * 4096
    assert {tenant.name: tenant.used_bytes for tenant in told.tenants} == {
        "a": 5 * 3 * 4096,
        "b": 3 * 3 * 4096,
    }
    assert (told.hottest[0].key, told.hottest[0].tenant, told.hottest[0].uses) == (keys[0], "a", 4)
    assert len(told.hottest) == 2
    assert told.funnel.looked_up == 3
    assert [(count.name, count.value) for count in told.funnel.hits] == [("memory", 3)]
    assert [tier.name for tier in told.tiers] == ["memory", *(["ssd"] if daemon.spec.ssd else [])]


async def test_verify_finds_damaged_blocks_of_memory_and_drops_them(daemon, control, pool):
    keys = await filled(pool, 9)
    damage(daemon, keys[4])
    damage(daemon, keys[7])
    order = [block.key for block in daemon.clients.pool.warmest() if block.key in keys]
    answers = await control(VERIFY, tiers=["memory"])
    assert sorted(key for one in answers for key in one.damaged) == [keys[4], keys[7]]
    last = answers[-1]
    assert (last.done, last.checked_blocks, last.total_blocks) == (True, 9, 9)
    assert last.checked_bytes == 9 * BLOCK
    assert [daemon.clients.pool.held([key]) for key in keys] == [1, 1, 1, 1, 0, 1, 1, 0, 1]
    left = [key for key in order if key not in (keys[4], keys[7])]
    assert [block.key for block in daemon.clients.pool.warmest()] == left
    assert daemon.clients.pool.open_pins == 0


async def test_verify_reads_a_bounded_number_of_bytes_a_second(daemon, control, pool):
    await filled(pool, 3)
    rpc, asked = control.rpc, VERIFY.asked(tiers=["memory"], bytes_per_s=1000)
    with pytest.raises(Exception, match="Deadline"):
        async for _ in rpc.stream(VERIFY, asked, within_s=0.3):
            pass
    await until(lambda: daemon.clients.pool.open_pins == 0)


async def test_blocks_are_verified_for_one_caller_at_a_time(daemon, control, pool):
    await filled(pool, 3)
    first = control.rpc.stream(VERIFY, VERIFY.asked(bytes_per_s=1000), within_s=SOON_S)
    assert (await anext(first)).checked_blocks == 3
    with pytest.raises(Overloaded):
        await control(VERIFY)
    await first.aclose()
    async with asyncio.timeout(SOON_S):
        while True:
            with contextlib.suppress(Overloaded):
                await control(VERIFY, tiers=["memory"], bytes_per_s=1 << 30)
                break


async def test_verify_finds_what_is_damaged_on_ssd(tmp_path):
    ssd = SsdSpec(folder=tmp_path / "ssd", capacity="16MiB", segment="1MiB")
    async with (
        running(pool_spec(tmp_path, ssd=ssd, ssd_after_uses=1)) as daemon,
        control_of(daemon.spec) as control,
    ):
        client = await open_pool(daemon.spec.socket, CALL_KEY)
        keys, tier = await filled(client, 6), daemon.clients.second.tier
        client.used(keys)
        await until(lambda: tier.held(keys) == 6)
        await tier.flush()
        (segment,) = [path for path in (tmp_path / "ssd").iterdir() if path.stat().st_size > 50_000]
        at = segment.read_bytes().find(bytes(blocks_of(keys[2:3])[0]))
        with segment.open("r+b") as file:
            file.seek(at + 77)
            file.write(b"\xee")
        answers = await control(VERIFY, tiers=["ssd"])
        assert [key for one in answers for key in one.damaged] == [keys[2]]
        assert (answers[-1].checked_blocks, answers[-1].total_blocks) == (6, 6)
        assert [tier.held([key]) for key in keys] == [1, 1, 0, 1, 1, 1]
        await client.aclose()


async def test_verify_of_a_tier_that_is_none_says_which_there_are(control):
    with pytest.raises(RequestError, match="memory and ssd"):
        await control(VERIFY, tiers=["tape"])


async def test_evict_takes_a_tenant_s_blocks_keys_or_all_but_what_is_read(daemon, control, pool):
    keys = await filled(pool, 6, tenant="a")
    others = keys_of(4, 100)
    await pool.store(others, blocks_of(others), deadline_s=SOON_S, tenant="b")
    pin = daemon.clients.pool.pin(others[:1], reader=99, now_s=0.0)
    assert (await control(EVICT, tenant="a")).blocks == 6
    assert await pool.held(keys) == 0
    assert (await control(EVICT, keys={"keys": others[1:2]})).blocks == 1
    answer = await control(EVICT, all=True)
    assert (answer.blocks, answer.pinned_blocks) == (2, 1)
    daemon.clients.pool.unpin(pin.number, (), reader=99, now_s=0.0)
    assert await pool.held(others) == 1


async def test_evict_forgets_the_ssd_too_unless_it_is_told_not_to(tmp_path):
    ssd = SsdSpec(folder=tmp_path / "ssd", capacity="16MiB", segment="1MiB")
    async with (
        running(pool_spec(tmp_path, ssd=ssd, ssd_after_uses=1)) as daemon,
        control_of(daemon.spec) as control,
    ):
        client = await open_pool(daemon.spec.socket, CALL_KEY)
        keys, tier = await filled(client, 6), daemon.clients.second.tier
        client.used(keys)
        await until(lambda: tier.held(keys) == 6)
        assert (await control(EVICT, all=True, memory_only=True)).ssd_blocks == 0
        assert tier.held(keys) == 6
        assert (await control(EVICT, keys={"keys": keys[:2]})).ssd_blocks == 2
        assert (await control(EVICT, all=True)).ssd_blocks == 4
        assert await client.held(keys) == 0
        await client.aclose()


async def test_evict_until_so_much_is_free_takes_stocks_first(daemon, control, pool):
    await filled(pool, 60)
    assert await pool.held(keys_of(60)) == 60
    room = daemon.clients.pool
    stocked = room.stocks * 3
    assert stocked
    wanted = (room.free_pages + stocked) * 4096
    assert (await control(EVICT, until_free_bytes=wanted)).blocks == 0


async def test_evict_until_so_much_is_free(daemon, control, pool):
    await filled(pool, 60)
    answer = await control(EVICT, until_free_bytes=512 << 10)
    assert answer.free_bytes >= 512 << 10
    assert answer.free_bytes - 3 * 4096 < 512 << 10
    assert answer.bytes == answer.blocks * BLOCK


@pytest.mark.parametrize("fields", [{}, {"keys": {"keys": [b"short"]}}])
async def test_evict_of_nothing_in_particular_is_refused(control, fields):
    with pytest.raises(RequestError):
        await control(EVICT, **fields)


async def test_what_names_another_epoch_does_nothing(daemon, control, pool):
    keys = await filled(pool, 2)
    other = daemon.clients.arena.epoch + 1
    for method, fields in ((EVICT, {"all": True}), (DRAIN, {"within_ms": 100})):
        with pytest.raises(RequestError, match="epoch"):
            await control(method, **fields, epoch=other)
    assert (await pool.held(keys), daemon.state.phase) == (2, Phase.READY)


async def test_a_clear_is_of_its_epoch_and_takes_nothing_newer(daemon, control, pool):
    keys = await filled(pool, 4)
    epoch = daemon.clients.arena.epoch
    with pytest.raises(RequestError, match="epoch"):
        await control(CLEAR, epoch=epoch - 1)
    answer = await control(CLEAR, epoch=epoch)
    assert (answer.blocks, await pool.held(keys)) == (4, 0)
    await pool.store(keys, blocks_of(keys), deadline_s=SOON_S)
    assert (await control(CLEAR, epoch=epoch, up_to=answer.up_to)).blocks == 0
    assert await pool.held(keys) == 4


async def test_a_drained_daemon_takes_nothing_serves_what_it_has_and_is_not_ready(
    daemon, control, pool
):
    keys = await filled(pool, 4)
    answer = await control(DRAIN, within_ms=500)
    assert {count.name: count.value for count in answer.blocks}["refused"] == 4
    more = keys_of(2, 50)
    assert await pool.store(more, blocks_of(more), deadline_s=SOON_S) == 0
    assert (await pool.load(keys, targets(4), deadline_s=SOON_S)).blocks == 4
    assert daemon.state.phase is Phase.DRAINED
    with pytest.raises(RequestError, match="within_ms"):
        await control(DRAIN)


async def test_a_drain_waits_for_readers_as_long_as_it_may(daemon, control, pool):
    keys = await filled(pool, 2)
    pin = daemon.clients.pool.pin(keys, reader=99, now_s=0.0, lease_s=1e9)
    assert (await control(DRAIN, within_ms=100)).pins_left == 1
    draining = asyncio.ensure_future(control(DRAIN, within_ms=20_000))
    daemon.clients.pool.unpin(pin.number, (), reader=99, now_s=0.0)
    assert (await draining).pins_left == 0


async def test_a_drain_moves_to_a_peer_what_only_this_node_has(tmp_path):
    async with (
        peer(tmp_path, "b") as (b, _),
        peer(tmp_path, "a", [("b", b.url)]) as (a, at_a),
    ):
        b.clients.remote.owners.update([*_endpoint("a", a.url)])
        keys = await filled(at_a, 6)
        await at_a.load(keys, targets(6), deadline_s=SOON_S)
        await knows(b, "a", 6)
        await knows(a, "b", 0)
        async with control_of(a.spec) as control:
            answer = await control(DRAIN, within_ms=20_000)
        assert {count.name: count.value for count in answer.blocks}["moved"] == 6
        assert answer.moved_bytes == 6 * BLOCK
        assert b.clients.pool.held(keys) == 6


def _endpoint(name, url):
    from kimi_runtime.spec.router import PoolEndpoint

    return [PoolEndpoint(name=name, url=url)]
