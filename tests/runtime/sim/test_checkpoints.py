"""A model with linear attention goes on where a state was kept, on paper as in production."""

import pytest

from kimi_runtime.engine.checkpoint_policy import EVERY_TOKENS
from kimi_runtime.sim.cluster import ClusterSpec
from kimi_runtime.sim.pool import SimPool
from kimi_runtime.sim.sessions import Pause, Session, Turn, Workload
from kimi_runtime.sim.tasks import OURS, policy_of
from kimi_runtime.sim.workload import AgentMix, agents
from kimi_runtime.sim.world import World

K3 = ClusterSpec(model="kimi-k3", tensor=8, workers=2, hbm_tokens=400_000, pool="300GB")
PAIRS = K3.model_copy(update={"workers": 0, "prefill": 1, "decode": 1})
MIX = AgentMix(turns=4, prefix_tokens=4_000, first_median=4_000.0, context_cap=60_000)
BLOCK = K3.block_tokens


def ran(cluster, workload, policy=OURS):
    run = World(cluster, workload, policy_of(policy, cluster), seed=1).run()
    assert run.finished
    for worker in run.cluster.workers.values():
        worker.check_integrity()
        assert worker.blocks.available == worker.blocks.total
    for pool in run.cluster.pools.values():
        pool.pool.check_integrity()
        assert not pool.pool.open_pins
    return run


def keys(*numbers):
    return [number.to_bytes(16, "big") for number in numbers]


@pytest.mark.parametrize("cluster", [K3, PAIRS], ids=["aggregated", "pairs"])
@pytest.mark.parametrize("policy", [OURS, "llm_d"])
def test_every_turn_is_served_and_nothing_is_taken_from_a_workers_memory(policy, cluster):
    workload = agents(8, 1, MIX)
    run = ran(cluster, workload, policy)
    assert len(run.records) == workload.turns
    assert all(one.ended_s is not None for one in run.records)
    assert sum(one.pool_tokens for one in run.records)
    if cluster is K3:
        assert not any(one.hbm_tokens or one.peer_tokens for one in run.records)


def test_hits_end_at_turns_ends_and_multiples_of_the_distance_between_states():
    turns = (Turn(20_000, 300, Pause.TOOL, 1.0), Turn(1_000, 300, Pause.TOOL, 1.0), Turn(50, 50))
    records = ran(K3, Workload("w", (Session("s", 1 << 20, turns),))).records
    ends = [one.prompt_tokens + one.output_tokens - 1 for one in records]
    hits = [one.pool_tokens for one in records]
    assert hits == [0, ends[0] - ends[0] % BLOCK, ends[1] - ends[1] % BLOCK]


def test_who_shares_a_front_goes_on_from_the_deepest_state_within_it():
    first = Session("a", 1 << 20, (Turn(1_000, 10),), prefix=1 << 41, prefix_tokens=20_000)
    later = Session("b", 1 << 21, (Turn(1_000, 10),), prefix=1 << 41, prefix_tokens=20_000)
    workload = Workload("w", (first, later), lanes=1)
    assert ran(K3, workload).records[1].pool_tokens == 20_000 // EVERY_TOKENS * EVERY_TOKENS


def test_where_a_hit_was_refused_a_state_is_kept_for_the_next():
    sessions = tuple(
        Session(f"s{n}", (n + 1) << 20, (Turn(1_000, 10),), prefix=1 << 41, prefix_tokens=7_000)
        for n in range(3)
    )
    one_node = K3.model_copy(update={"workers": 1})
    hits = [one.pool_tokens for one in ran(one_node, Workload("w", sessions, lanes=1)).records]
    assert hits == [0, 0, 7_000 // BLOCK * BLOCK]


def test_a_state_is_not_kept_without_its_blocks_and_goes_with_them():
    pool = SimPool("n", "n", 8, 1 << 20, 1e-9, state_bytes=3 << 20)
    run = keys(1, 2, 3)
    assert not pool.keep_state(run, tenant="t", now_s=0.0)
    pool.store(run, tenant="t", now_s=0.0)
    assert pool.held(run) == 0
    assert pool.keep_state(run[:2], tenant="t", now_s=0.0)
    assert pool.held(run) == 2
    pool.store(keys(*range(10, 18)), tenant="t", now_s=1.0)
    assert pool.held(run) == 0
    pool.pool.check_integrity()
