"""The drive behind a simulated pool."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.sim.cluster import ClusterSpec
from kimi_runtime.sim.links import Links
from kimi_runtime.sim.pool import SimPool
from kimi_runtime.sim.ssd import READ, WRITE
from kimi_runtime.sim.tasks import policy_of
from kimi_runtime.sim.timeline import Timeline
from kimi_runtime.sim.workload import AgentMix, agents
from kimi_runtime.sim.world import World

BLOCK = 1 << 20
TIGHT = ClusterSpec(workers=2, hbm_tokens=300_000, pool=15 * 10**9)


def pool_of(blocks=8, on_ssd=64):
    timeline = Timeline()
    links = Links(timeline, {f"n/{READ}": 100.0 * BLOCK, f"n/{WRITE}": 10.0 * BLOCK})
    return timeline, SimPool("n", "n", blocks, BLOCK, 1e-9, on_ssd, links)


def key(number):
    return number.to_bytes(16, "big")


def keys(*numbers):
    return [key(number) for number in numbers]


def put(timeline, pool, run, *, uses):
    pool.store(run, tenant="t", now_s=timeline.now_s)
    for _ in range(uses - 1):
        pool.used(run, now_s=timeline.now_s)


def test_what_was_used_once_is_not_written():
    timeline, pool = pool_of()
    put(timeline, pool, keys(1, 2), uses=1)
    timeline.run()
    assert (pool.ssd.written, len(pool.ssd)) == (0, 0)


def test_writing_takes_the_drives_time_and_a_lost_block_comes_back_at_its_reading_rate():
    timeline, pool = pool_of()
    put(timeline, pool, keys(1, 2), uses=2)
    timeline.run()
    assert abs(timeline.now_s - 0.2) < 1e-9
    put(timeline, pool, keys(*range(10, 18)), uses=1)
    assert pool.held(keys(1, 2)) == 0
    came = []
    assert pool.bring(keys(1, 2), lambda: came.append(timeline.now_s), tenant="t")
    timeline.run()
    assert len(came) == 1
    assert abs(came[0] - 0.22) < 1e-9
    assert pool.held(keys(1, 2)) == 2


def test_a_block_on_its_way_is_read_once_for_all_who_want_it():
    timeline, pool = pool_of()
    put(timeline, pool, keys(1), uses=2)
    timeline.run()
    put(timeline, pool, keys(*range(10, 18)), uses=1)
    came = []
    for name in "ab":
        assert pool.bring(keys(1), lambda name=name: came.append(name), tenant="t")
    timeline.run()
    assert came == ["a", "b"]
    assert pool.ssd.brought == 1


def test_nothing_comes_of_what_the_drive_lacks():
    timeline, pool = pool_of()
    put(timeline, pool, keys(1), uses=1)
    assert not pool.bring(keys(1, 2), lambda: None, tenant="t")


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(1, 3)), max_size=12),
    st.integers(1, 12),
)
def test_the_feed_tells_what_either_tier_holds(runs, on_ssd):
    timeline, pool = pool_of(blocks=6, on_ssd=on_ssd)
    for first, count, uses in runs:
        put(timeline, pool, keys(*range(first, first + count)), uses=uses)
        timeline.run(timeline.now_s + 0.3)
        pool.bring(keys(*range(first, first + count)), lambda: None, tenant="t")
    timeline.run()
    pool.pool.check_integrity()
    assert len(pool.ssd) <= on_ssd
    told = {number for number in range(12) if key(number) in pool.feed}
    memory = {number for number in range(12) if pool.pool.block(key(number)) is not None}
    assert memory <= told
    assert len(told) <= len(memory) + len(pool.ssd)


def test_a_drive_behind_a_tight_pool_spares_computing():
    computed = {}
    for ssd in (0, 10**12):
        cluster = TIGHT.model_copy(update={"ssd": ssd})
        # of one seed alone, other decisions may cost as much as the drive spares
        computed[ssd] = sum(computed_tokens(cluster, seed) for seed in (3, 5, 6))
    assert computed[10**12] < computed[0]


def computed_tokens(cluster, seed):
    load = agents(12, seed, AgentMix(turns=8))
    run = World(cluster, load, policy_of("longest_prefix", cluster), seed=seed).run()
    assert run.finished
    for worker in run.cluster.workers.values():
        worker.check_integrity()
    for pool in run.cluster.pools.values():
        pool.pool.check_integrity()
    return sum(one.computed_tokens for one in run.records)
