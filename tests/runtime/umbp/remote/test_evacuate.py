"""A daemon that goes: what it alone holds moves to peers that have room for it."""

import contextlib
import random

import pytest

from kimi_connect.wire import Outcome
from kimi_runtime import clock
from kimi_runtime.spec.router import PoolEndpoint
from kimi_runtime.spec.ssd import SsdSpec
from kimi_runtime.transfer.chaos import Fault
from pool_daemon import blocks_of, keys_of, targets
from pool_peers import SOON_S, Faults, knows, owner_of, peer, until


@pytest.fixture
def faults(monkeypatch):
    return Faults(monkeypatch)


@contextlib.asynccontextmanager
async def pair(folder, *, a=None, b=None):
    """Two daemons that know each other, and a client of each."""
    async with (
        peer(folder, "b", **(b or {})) as (other, at_b),
        peer(folder, "a", [("b", other.url)], **(a or {})) as (leaving, at_a),
    ):
        other.clients.remote.owners.update([PoolEndpoint(name="a", url=leaving.url)])
        await knows(leaving, "b", 0)
        await knows(other, "a", 0)
        yield leaving, at_a, other, at_b


async def put(daemon, client, keys, known_by, uses=1):
    assert await client.store(keys, blocks_of(keys), deadline_s=SOON_S) == len(keys)
    for _ in range(uses - 1):
        daemon.clients.pool.use(keys, clock.now_s())
    name = daemon.spec.name
    await until(lambda: all(key_known(known_by, name, key) for key in keys))


def key_known(daemon, name, key):
    return daemon.clients.remote.owners.index.prefix_runs([key]).get(name, 0) == 1


def evacuated(daemon, deadline_s=SOON_S):
    return daemon.clients.remote.evacuate(deadline_s=deadline_s)


async def test_what_a_node_alone_holds_is_at_a_peer_when_it_goes(tmp_path):
    async with pair(tmp_path) as (a, at_a, b, at_b):
        keys, into = keys_of(12), targets(12)
        await put(a, at_a, keys, b, uses=3)
        report = await evacuated(a)
        assert (report.kept, report.bytes) == (12, 120_000)
        assert (report.refused, report.late, report.elsewhere, report.gone) == (0, 0, 0, 0)
        assert b.clients.pool.held(keys) == 12
        assert {b.clients.pool.block(key).uses for key in keys} == {3}
        assert await at_b.load(keys, into, deadline_s=SOON_S) == (12, Outcome.HIT)
        assert into == blocks_of(keys)
        assert b.clients.remote.taker.fates["drain", "taken"] == 12
        await until(lambda: a.clients.remote.lender.loans == 0)


async def test_what_a_peer_has_already_is_not_moved(tmp_path):
    async with pair(tmp_path) as (a, at_a, b, at_b):
        keys = keys_of(4)
        await put(a, at_a, keys, b)
        await put(b, at_b, keys[:3], a)
        report = await evacuated(a)
        assert (report.kept, report.elsewhere) == (1, 3)
        assert b.clients.pool.held(keys) == 4


async def test_a_peer_gives_up_only_what_is_worth_less(tmp_path):
    async with pair(tmp_path) as (a, at_a, b, at_b):
        room = b.clients.pool.total_pages // 3
        cold, dear = keys_of(4, 1000), keys_of(room - 4, 2000)
        await put(b, at_b, dear, a, uses=6)
        await put(b, at_b, cold, a)
        hot, once = keys_of(6), keys_of(6, 500)
        await put(a, at_a, hot, b, uses=4)
        await put(a, at_a, once, b)
        report = await evacuated(a)
        assert b.clients.pool.held(dear) == len(dear)
        assert b.clients.pool.held(hot) == 4  # in place of what was cold
        assert b.clients.pool.held(once) == 0
        assert (report.kept, report.refused) == (4, 8)


async def test_the_best_go_first_where_there_is_room_for_few(tmp_path):
    async with pair(tmp_path, b={"dram_bytes": "128KiB"}) as (a, at_a, b, _at_b):
        keys = keys_of(60)
        await put(a, at_a, keys, b)
        a.clients.pool.use(keys[20:26], clock.now_s())
        report = await evacuated(a)
        assert b.clients.pool.held(keys[20:26]) == 6
        assert 6 <= report.kept < 60
        assert report.kept + report.refused == 60


async def test_time_that_is_over_ends_it_and_the_report_says_so(tmp_path, faults):
    async with pair(tmp_path) as (a, at_a, b, _at_b):
        await put(a, at_a, keys_of(5), b)
        faults.fault = Fault.STALL
        report = await evacuated(a, deadline_s=0.3)
        assert (report.kept, report.late) == (0, 5)
        faults.fault = None
        await until(lambda: b.clients.pool.reservations(quarantined=False) == 0)


async def test_bytes_that_flip_on_the_way_are_not_taken(tmp_path, faults):
    async with pair(tmp_path) as (a, at_a, b, _at_b):
        await put(a, at_a, keys_of(5), b)
        faults.fault = Fault.CORRUPT
        report = await evacuated(a)
        assert report.kept == b.clients.pool.live_blocks < 5
        assert owner_of(b, "a").blocks["corrupt"] >= 1


async def test_one_that_goes_itself_takes_nothing(tmp_path):
    async with pair(tmp_path) as (a, at_a, b, at_b):
        await put(a, at_a, keys_of(5), b)
        await put(b, at_b, keys_of(5, 100), a)
        await evacuated(b)
        report = await evacuated(a)
        assert (report.kept, report.refused) == (0, 5)


async def test_alone_there_is_nobody_to_move_to(tmp_path):
    async with peer(tmp_path, "a") as (a, at_a):
        keys = keys_of(3)
        await at_a.store(keys, blocks_of(keys), deadline_s=SOON_S)
        report = await evacuated(a)
        assert (report.kept, report.refused) == (0, 3)


async def test_what_is_on_ssd_alone_moves_too(tmp_path):
    ssd = SsdSpec(folder=tmp_path / "ssd", capacity="8MiB", segment="1MiB")
    async with pair(tmp_path, a={"ssd": ssd}) as (a, at_a, b, _at_b):
        keys = keys_of(3)
        await put(a, at_a, keys, b)
        at_a.used(keys)
        await until(lambda: a.clients.second.tier.held(keys) == 3)
        await until(lambda: not a.clients.second.writer.queued)
        a.tier.evict(3)
        report = await evacuated(a)
        assert report.kept == 3
        assert b.clients.pool.held(keys) == 3


async def test_a_peer_that_is_gone_costs_no_more_than_the_time(tmp_path):
    async with pair(tmp_path) as (a, at_a, b, _at_b):
        await put(a, at_a, keys_of(4), b)
        owner_of(a, "b").calls.offer = unreachable
        report = await evacuated(a)
        assert (report.kept, report.refused) == (0, 4)


async def unreachable(asked, *, within_s):
    from kimi_runtime.errors import PeerGone

    raise PeerGone("b can't be reached")


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_happens_on_the_way_what_a_peer_has_is_what_was_there(
    tmp_path, faults, seed
):
    dice = random.Random(seed)
    kinds = [None, Fault.DELAY, Fault.CORRUPT, Fault.DUPLICATE, Fault.REHOME]
    faults.fault, faults.delay_s = (lambda _: dice.choice(kinds)), 0.01
    async with pair(tmp_path) as (a, at_a, b, at_b):
        keys = keys_of(40)
        await put(a, at_a, keys, b, uses=2)
        report = await evacuated(a, deadline_s=3.0)
        faults.fault = None
        held = [key for key in keys if b.clients.pool.block(key) is not None]
        assert report.kept <= len(held)
        assert report.kept + report.refused + report.late + report.gone == 40
        for key in held:
            (into,) = targets(1)
            assert await at_b.load([key], [into], deadline_s=SOON_S) == (1, Outcome.HIT)
            assert [into] == blocks_of([key])
