"""Copies of hot blocks: when they pay, where they go, and that they don't go round in circles."""

import contextlib

from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_connect.wire import Outcome
from kimi_runtime import clock
from kimi_runtime.spec.peers import OfferedBlock, OfferRequest
from kimi_runtime.spec.router import PoolEndpoint
from kimi_runtime.umbp.remote.demand import Demand
from kimi_runtime.umbp.remote.replicas import REPLICA_SHARE
from kimi_runtime.umbp.remote.spread import MAX_COPIES, REST_S, Spread, copy_worth
from pool_daemon import blocks_of, keys_of, targets
from pool_peers import SOON_S, knows, peer, until

RATE = 1e9
PEERS = ("b", "c", "d", "e", "f")


def wanted(keys, times=10, readers=("b", "c"), now_s=0.0, demand=None):
    demand = demand or Demand()
    for n in range(times):
        demand.observe(keys, readers[n % len(readers)], now_s)
    return demand


def next_of(spread, holders=("b",), size=1000, now_s=0.0, peers=PEERS):
    return spread.next(peers, lambda k: holders, lambda k: size, bytes_per_s=RATE, now_s=now_s)


def test_a_hot_run_goes_as_a_whole_to_one_node_that_lacks_it():
    keys = keys_of(20)
    copies = next_of(Spread(wanted(keys)))
    assert list(copies.keys) == keys
    assert copies.peer in PEERS[1:]
    assert set(copies.worths) == {copy_worth(10 / 60, 4, RATE)}


def test_different_runs_go_to_different_nodes():
    chosen = {next_of(Spread(wanted(keys_of(1, 100 * n)))).peer for n in range(40)}
    assert chosen == set(PEERS[1:])


def test_what_one_node_alone_wants_or_few_want_or_many_have_is_not_copied():
    keys = keys_of(3)
    assert next_of(Spread(wanted(keys, readers=("b",)))) is None
    assert next_of(Spread(wanted(keys, times=2))) is not None
    assert next_of(Spread(wanted(keys, times=2)), now_s=300.0) is None
    assert next_of(Spread(wanted(keys)), holders=PEERS[: MAX_COPIES - 1]) is None
    assert next_of(Spread(wanted(keys)), holders=PEERS[:1], peers=PEERS[:1]) is None


def test_what_was_offered_rests():
    demand = wanted(keys_of(3))
    spread = Spread(demand)
    assert next_of(spread) is not None
    assert next_of(spread, now_s=1.0) is None
    wanted(keys_of(3), demand=demand, now_s=REST_S)
    assert next_of(spread, now_s=REST_S) is not None


def test_copies_take_a_share_of_the_link():
    keys = keys_of(5000)
    spread, moved = Spread(wanted(keys)), 0
    for second in range(10):
        for _ in range(20):
            copies = next_of(spread, size=10_000_000, now_s=float(second))
            moved += 0 if copies is None else 10_000_000 * len(copies.keys)
    assert 0.5 * RATE < moved < (2 + 9) / 8 * RATE + 10_000_000 * 10


@settings(max_examples=50, deadline=None)
@given(st.floats(0, 100), st.integers(1, 50), st.floats(1e6, 1e11))
def test_a_copy_is_worth_more_the_more_it_is_wanted_and_never_more_than_a_fetch(rate, nodes, link):
    worth = copy_worth(rate, nodes, link)
    assert 0 <= worth <= 1 / link
    assert worth <= copy_worth(2 * rate, nodes, link)
    assert copy_worth(rate, nodes + 1, link) <= worth


def test_demand_is_bounded_and_forgets_what_was_asked_for_longest_ago():
    demand = Demand(max_keys=4)
    keys = keys_of(6)
    demand.observe(keys, "b", 0.0)
    demand.observe(keys[2:3], "c", 0.0)
    assert list(demand) == [*keys[3:], keys[2]]
    assert demand.readers(keys[2]) == 2
    assert demand.per_s(keys[0], 0.0) == 0.0


@contextlib.asynccontextmanager
async def three(folder):
    async with (
        peer(folder, "b") as (b, at_b),
        peer(folder, "c") as (c, at_c),
        peer(folder, "a", [("b", b.url), ("c", c.url)]) as (a, at_a),
    ):
        for daemon in (b, c):
            daemon.clients.remote.owners.update([PoolEndpoint(name="a", url=a.url)])
            await knows(daemon, "a", 0)
        for name in "bc":
            await knows(a, name, 0)
        yield (a, at_a), (b, at_b), (c, at_c)


async def test_a_node_that_never_asked_gets_a_copy_of_what_others_want(tmp_path):
    async with three(tmp_path) as ((a, at_a), (b, at_b), (c, at_c)):
        keys, remote = keys_of(4), a.clients.remote
        assert await at_a.store(keys, blocks_of(keys), deadline_s=SOON_S) == 4
        await knows(b, "a", 4)
        await knows(c, "a", 4)
        assert await at_b.load(keys, targets(4), deadline_s=SOON_S) == (4, Outcome.HIT)
        await knows(a, "b", 4)
        assert remote.replicator.due() is None  # one reader is no crowd
        for _ in range(5):
            remote.lender.demand.observe(keys, "d", clock.now_s())
        await until(lambda: c.clients.pool.held(keys) == 4)
        await until(lambda: remote.replicator.fates["taken"] == 4)
        assert c.clients.remote.taker.fates["replica", "taken"] == 4
        into = targets(4)
        assert await at_c.load(keys, into, deadline_s=SOON_S) == (4, Outcome.HIT)
        assert into == blocks_of(keys)
        # the copy was made for its own sake: it is no demand
        assert remote.lender.demand.readers(keys[0]) == 2


def offer(owner, keys):
    epoch = owner.clients.arena.epoch
    blocks = tuple(
        OfferedBlock(key=key.hex(), size=10_000, worth=1.0, uses=1, idle_ms=0) for key in keys
    )
    return OfferRequest(owner="a", epoch=epoch, purpose="replica", blocks=blocks, within_ms=20_000)


async def test_who_evicted_a_copy_does_not_take_it_again(tmp_path):
    async with three(tmp_path) as ((a, at_a), _, (c, _at_c)):
        keys, taker = keys_of(4), c.clients.remote.taker
        assert await at_a.store(keys, blocks_of(keys), deadline_s=SOON_S) == 4
        assert (await taker.offer(offer(a, keys))).fates == ("taken",) * 4
        assert (await taker.offer(offer(a, keys))).fates == ("held",) * 4
        c.tier.evict(4)
        assert (await taker.offer(offer(a, keys))).fates == ("no_room",) * 4


async def test_copies_are_a_bounded_part_of_a_node_s_memory(tmp_path):
    async with three(tmp_path) as ((a, at_a), _, (c, _at_c)):
        keys, pool = keys_of(40), c.clients.pool
        assert await at_a.store(keys, blocks_of(keys), deadline_s=SOON_S) == 40
        most = pool.total_pages // REPLICA_SHARE // 3
        fates = (await c.clients.remote.taker.offer(offer(a, keys))).fates
        assert fates == ("taken",) * most + ("no_room",) * (40 - most)
        pool.use(keys[:2], clock.now_s())  # an engine here uses two: these are its own now
        fates = (await c.clients.remote.taker.offer(offer(a, keys))).fates
        assert fates.count("taken") == 2
