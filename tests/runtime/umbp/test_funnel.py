"""Every block that is looked up is found somewhere or lost for a reason, once."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_connect.wire import Gap, Outcome
from kimi_runtime.spec.ssd import SsdSpec
from kimi_runtime.umbp.client import open_pool
from kimi_runtime.umbp.funnel import MAX_BROUGHT, Funnel, Lost, Where, why_lost
from pool_daemon import BLOCK, CALL_KEY, blocks_of, keys_of, targets
from pool_peers import SOON_S, knows, owner_of, peer, until

KEYS = keys_of(8)
some_keys = st.lists(st.sampled_from(KEYS), max_size=5, unique=True)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("brought"), some_keys, st.sampled_from(Where)),
        st.tuples(st.just("served"), some_keys),
        st.tuples(st.just("pinned"), st.integers(1, 6), st.integers(0, 2), some_keys),
        st.tuples(st.just("missed"), st.lists(st.sampled_from(Lost), max_size=4)),
        st.tuples(st.just("read"), st.integers(1, 6), st.integers(0, 9), st.sampled_from(Lost)),
        st.tuples(st.just("unreachable"), st.integers(0, 4)),
        st.tuples(st.just("gone"), st.integers(0, 2)),
        st.tuples(st.just("sweep"), st.sets(st.integers(1, 6))),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(steps)
def test_whatever_happens_every_block_is_in_one_place_and_no_total_falls(history):
    funnel, before, pins = Funnel(), 0, set()
    for name, *given_ in history:
        if name == "pinned":
            if given_[0] in pins:  # pins have numbers of their own
                continue
            pins.add(given_[0])
        if name == "sweep":
            given_ = [given_[0].__contains__]
        getattr(funnel, name)(*given_)
        funnel.check()
        assert funnel.looked_up == funnel.hits.total() + funnel.lost.total() >= before
        before = funnel.looked_up


def test_a_block_counts_for_where_it_came_from_once_and_then_for_memory():
    funnel = Funnel()
    funnel.brought(KEYS[:2], Where.SSD)
    funnel.pinned(1, 7, KEYS[:3])
    funnel.read(1, 3, Lost.LATE)
    funnel.served(KEYS[:3])
    assert funnel.hits == {Where.SSD: 2, Where.MEMORY: 4}


def test_what_is_remembered_to_have_been_brought_is_bounded():
    funnel, keys = Funnel(), keys_of(MAX_BROUGHT + 1)
    funnel.brought(keys, Where.PEER)
    funnel.served([keys[0], keys[-1]])
    assert funnel.hits == {Where.MEMORY: 1, Where.PEER: 1}


def test_a_connection_that_broke_tells_by_itself_what_it_lost():
    funnel = Funnel()
    funnel.pinned(1, 7, KEYS[:3])
    funnel.gone(7)
    funnel.unreachable(3)
    assert (funnel.looked_up, funnel.lost) == (3, {Lost.UNAVAILABLE: 3})


@pytest.mark.parametrize(
    ("gap", "here", "elsewhere", "evicted", "reasons"),
    [
        (Gap.MISS, "", "", "", [Lost.NOT_COMPUTED] * 3),
        (Gap.EVICTED, "", "", "ab", [Lost.EVICTED, Lost.EVICTED, Lost.NOT_COMPUTED]),
        (Gap.EVICTED, "b", "", "a", [Lost.EVICTED, Lost.EVICTED, Lost.NOT_COMPUTED]),
        (Gap.MISS, "", "ab", "a", [Lost.UNAVAILABLE, Lost.UNAVAILABLE, Lost.NOT_COMPUTED]),
        (Gap.LATE, "", "ab", "c", [Lost.LATE, Lost.LATE, Lost.EVICTED]),
        (Gap.CORRUPT, "c", "a", "b", [Lost.CORRUPT, Lost.EVICTED, Lost.CORRUPT]),
    ],
)
def test_each_block_of_a_run_s_rest_is_lost_for_its_own_reason(
    gap, here, elsewhere, evicted, reasons
):
    said = {"here": here.__contains__, "elsewhere": elsewhere.__contains__}
    assert why_lost(["a", "b", "c"], gap, **said, evicted=evicted.__contains__) == reasons
    assert why_lost([], gap, **said, evicted=evicted.__contains__) == []


async def test_what_clients_got_and_lost_is_what_the_daemon_counts(tmp_path):
    """Over memory, SSD and a peer, with evictions, damage and a peer that dies."""
    ssd = SsdSpec(folder=tmp_path / "ssd", capacity="16MiB", segment="1MiB")
    async with (
        peer(tmp_path, "a") as (a, at_a),
        peer(tmp_path, "b", [("a", a.url)], ssd=ssd, ssd_after_uses=1) as (b, at_b),
    ):
        funnel, pool = b.clients.pool.funnel, b.clients.pool
        here, there, never = keys_of(12), keys_of(6, 100), keys_of(4, 200)
        await at_b.store(here, blocks_of(here), deadline_s=SOON_S)
        await at_a.store(there, blocks_of(there), deadline_s=SOON_S)
        await knows(b, "a", 6)
        clients = [at_b, *[await open_pool(b.spec.socket, CALL_KEY) for _ in range(3)]]
        asked = 0

        async def load(client, keys):
            nonlocal asked
            asked += len(keys)
            return await client.load(keys, targets(len(keys)), deadline_s=SOON_S)

        await asyncio.gather(*(load(client, [*here, *never]) for client in clients))
        at_b.used(here)
        second = b.clients.second
        await until(lambda: second.tier.held(here) == 12 and not pool.open_pins)
        assert pool.forget(here[:9])[0] == 9
        second.tier.forget(here[6:])
        await asyncio.gather(*(load(client, here) for client in clients))
        await asyncio.gather(*(load(client, [*there, *never]) for client in clients))
        block = pool.block(there[2])
        next(b.clients.arena.parts(block.extents, block.size))[3] ^= 1
        assert (await load(at_b, there)).outcome in (Outcome.CORRUPT, Outcome.HIT)
        await until(lambda: not pool.open_pins)
        pool.forget(there)
        second.clear()
        for _ in range(8):  # until it counts as one to be left alone
            owner_of(b, "a").health.failed(0.0)
        owner_of(b, "a").health._until_s = float("inf")
        assert (await load(clients[1], there)).outcome is Outcome.MISS
        for client in clients:
            await client.held(here)  # answered after what was told
        funnel.check()
        assert (funnel.open, funnel.withdrawn) == (0, 0)
        outcomes = sum((client.blocks for client in clients), start=type(at_b.blocks)())
        assert funnel.looked_up == asked == outcomes.total()
        assert funnel.hits.total() == outcomes[Outcome.HIT]
        assert set(funnel.hits) == set(Where), funnel.hits
        assert funnel.lost[Lost.EVICTED] == 4 * 3 + 4 * 3
        assert funnel.lost[Lost.UNAVAILABLE] == 6
        for client in clients[1:]:
            await client.aclose()


async def test_what_a_quote_says_is_not_there_is_counted_though_nobody_asks_for_it(tmp_path):
    """As engines look up: a quote of the whole prompt, then a load of what is there."""
    async with peer(tmp_path, "a") as (a, at_a):
        pool, keys = a.clients.pool, keys_of(10)
        await at_a.store(keys[:8], blocks_of(keys[:8]), deadline_s=SOON_S)
        a.tier.evict(2)
        held = pool.held(keys)
        assert held == await at_a.held(keys) == 6  # which looks nothing up
        assert pool.funnel.looked_up == 0
        quoted = await at_a.quote(keys, block_bytes=BLOCK, deadline_s=SOON_S)
        assert sum(stretch.blocks for stretch in quoted) == held
        assert await at_a.load(keys[:6], targets(6), deadline_s=SOON_S) == (6, Outcome.HIT)
        await at_a.held(keys)  # answered after what was told
        assert pool.funnel.lost == {Lost.EVICTED: 2, Lost.NOT_COMPUTED: 2}
        assert (pool.funnel.hits, pool.funnel.looked_up) == ({Where.MEMORY: 6}, 10)
        assert pool.ghosts.asked_blocks == 10
        assert max(pool.ghosts.more_hits.values()) == 2
