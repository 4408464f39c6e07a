"""What a daemon says a run would take, before anybody waits for it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_connect import payloads
from kimi_connect.wire import Outcome, Source, Stretch
from kimi_runtime.spec.ssd import SsdSpec
from kimi_runtime.umbp.client import open_pool
from pool_daemon import BLOCK, CALL_KEY, blocks_of, keys_of, targets
from pool_peers import SOON_S, peer, until


async def test_each_part_of_a_run_is_told_with_where_it_is_and_how_long_it_takes(tmp_path):
    ssd = SsdSpec(folder=tmp_path / "ssd", capacity="8MiB", segment="1MiB")
    async with (
        peer(tmp_path, "a") as (a, at_a),
        peer(tmp_path, "b", [("a", a.url)], ssd=ssd) as (b, at_b),
    ):
        here, on_ssd, there = keys_of(3), keys_of(3, 3), keys_of(3, 6)
        await at_b.store(on_ssd, blocks_of(on_ssd), deadline_s=SOON_S)
        at_b.used(on_ssd)
        await until(lambda: b.clients.second.tier.held(on_ssd) == 3)
        await until(lambda: not b.clients.second.writer.queued)
        b.tier.evict(3)
        await at_b.store(here, blocks_of(here), deadline_s=SOON_S)
        await at_a.store(there, blocks_of(there), deadline_s=SOON_S)
        await until(lambda: b.clients.remote.fetcher.run(there) == 3)
        quoted = await at_b.quote(keys_of(12), block_bytes=BLOCK, deadline_s=SOON_S)
        assert [(one.blocks, one.source) for one in quoted] == [
            (3, Source.MEMORY),
            (3, Source.SSD),
            (3, Source.PEER),
        ]
        assert quoted[0].seconds < quoted[1].seconds < quoted[2].seconds < 1.0
        assert await at_b.held(keys_of(12)) == 9
        # asking brought nothing and warmed nothing
        assert b.clients.pool.held(on_ssd) == b.clients.pool.held(there) == 0


async def test_a_peer_that_was_slow_is_quoted_as_slow(tmp_path):
    async with peer(tmp_path, "a") as (a, at_a), peer(tmp_path, "b", [("a", a.url)]) as (b, at_b):
        keys = keys_of(8)
        await at_a.store(keys, blocks_of(keys), deadline_s=SOON_S)
        await until(lambda: b.clients.remote.fetcher.run(keys) == 8)
        before = await at_b.quote(keys[4:], block_bytes=BLOCK, deadline_s=SOON_S)
        assert await at_b.load(keys[:4], targets(4), deadline_s=SOON_S) == (4, Outcome.HIT)
        (owner,) = b.clients.remote.owners
        assert owner.speed.measured == 1
        for _ in range(30):
            owner.speed.observe(4 * BLOCK, 1.0)
        after = await at_b.quote(keys[4:], block_bytes=BLOCK, deadline_s=SOON_S)
        assert after[0].seconds > 0.5 > before[0].seconds


async def test_without_a_daemon_there_is_nothing_to_fetch(tmp_path):
    client = await open_pool(tmp_path / "none.sock", CALL_KEY)
    assert await client.quote(keys_of(3), block_bytes=BLOCK, deadline_s=0.2) == []
    await client.aclose()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.builds(Stretch, st.integers(0, 2**32 - 1), st.sampled_from(Source), st.floats(0, 1e9))
    )
)
def test_a_quote_comes_over_the_wire_as_it_was_given(stretches):
    assert payloads.unpack_quoted(payloads.pack_quoted(stretches)) == stretches
