"""A simulated deployment does what is asked of it, whatever the policy, and twice the same."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.errors import ConfigError
from kimi_runtime.router.cost.learn import Learning
from kimi_runtime.sim.cluster import ClusterEvent, ClusterSpec
from kimi_runtime.sim.features import Features
from kimi_runtime.sim.report import summary
from kimi_runtime.sim.sessions import Pause, Session, Turn, Workload
from kimi_runtime.sim.tasks import BASELINES, OURS, policy_of
from kimi_runtime.sim.workload import AgentMix, agents
from kimi_runtime.sim.world import World

SMALL = ClusterSpec(workers=2, hbm_tokens=400_000, pool="2GB")
PAIRS = ClusterSpec(workers=0, prefill=2, decode=2, hbm_tokens=400_000, pool="2GB")
MIX = AgentMix(turns=4, prefix_tokens=4_000, first_median=4_000.0, context_cap=60_000)
ALL = MIX.everything()
NOTHING = Features()
EVERYTHING = Features(
    admission=True,
    hints=True,
    expected_pauses=True,
    demote=True,
    prefetch=True,
    moves=True,
)


def ran(cluster, workload, policy=OURS, *, events=(), seed=1, features=NOTHING):
    """Run to the end, and see that nothing was lost on the way."""
    world = World(
        cluster, workload, policy_of(policy, cluster), seed=seed, events=events, features=features
    )
    run = world.run()
    assert run.finished
    for worker in run.cluster.workers.values():
        if not worker.failed:
            worker.check_integrity()
            assert not worker.work
            assert worker.blocks.available == worker.blocks.total
    for pool in run.cluster.pools.values():
        pool.pool.check_integrity()
        assert not pool.pool.open_pins
    assert not world.cluster.links.moving
    assert run.between.admission is None or not run.between.admission.queue.used_tokens
    assert not run.between.keeper.away
    assert not run.router.ledger.total_in_flight
    return run


@pytest.mark.parametrize("cluster", [SMALL, PAIRS], ids=["aggregated", "pairs"])
@pytest.mark.parametrize("policy", [OURS, *BASELINES])
def test_every_policy_serves_every_turn(policy, cluster):
    workload = agents(8, 1, ALL)
    run = ran(cluster, workload, policy)
    assert len(run.records) == workload.turns
    assert all(one.refused is None and one.ended_s is not None for one in run.records)
    for one in run.records:
        known = one.hbm_tokens + one.pool_tokens + one.peer_tokens + one.computed_tokens
        assert known == one.prompt_tokens
        assert one.prompt_tokens - one.computed_tokens <= one.cached_ideally + SMALL.block_tokens


def test_the_same_seed_gives_the_same_run_to_the_last_bit():
    first, again = (ran(SMALL, agents(8, 5, ALL), seed=5) for _ in range(2))
    assert first.records == again.records
    assert first.makespan_s == again.makespan_s


@pytest.mark.parametrize("cluster", [SMALL, PAIRS], ids=["aggregated", "pairs"])
def test_fast_forwarding_changes_no_record(cluster):
    slow = cluster.model_copy(update={"fast": False})
    fast, stepped = (ran(one, agents(6, 2, MIX), "dynamo").records for one in (cluster, slow))
    assert len(fast) == len(stepped)
    for ours, theirs in zip(fast, stepped, strict=True):
        assert ours.ended_s == pytest.approx(theirs.ended_s, abs=1e-6)
        assert ours.first_s == pytest.approx(theirs.first_s, abs=1e-6)
        assert (ours.hbm_tokens, ours.pool_tokens) == (theirs.hbm_tokens, theirs.pool_tokens)
        assert ours.workers == theirs.workers


def test_the_router_learns_answers_as_long_as_they_are(monkeypatch):
    learned = []
    finished = Learning.finished

    def noted(self, decided, output_tokens, *, cut=False):
        learned.append(output_tokens)
        finished(self, decided, output_tokens, cut=cut)

    monkeypatch.setattr(Learning, "finished", noted)
    run = ran(SMALL, agents(8, 1, ALL))
    assert sorted(learned) == sorted(record.output_tokens for record in run.records)


def test_no_first_token_comes_before_its_prompt_was_computed_or_read():
    run = ran(SMALL, agents(8, 1, MIX), "least_load")
    timing = run.cluster.timing
    for one in run.records:
        if one.computed_tokens > 1:
            least_s = 0.8 * timing.prefill_s(one.computed_tokens, 0) - timing.fixed_s
            assert one.ttft_s > least_s * 0.5


def test_a_worker_that_fails_costs_time_and_no_request():
    events = (
        ClusterEvent(at_s=20, kind="fail", target="w0"),
        ClusterEvent(at_s=60, kind="recover", target="w0"),
    )
    run = ran(SMALL, agents(12, 1, MIX), events=events)
    assert all(one.refused is None and one.ended_s is not None for one in run.records)
    during = [one for one in run.records if 20 < one.asked_s < 60]
    assert during
    assert {name for one in during for name in one.workers} == {"w1"}
    assert any("w0" in one.workers for one in run.records if one.asked_s > 61)


def test_a_worker_that_drains_gets_nothing_new_and_ends_what_it_has():
    events = (ClusterEvent(at_s=20, kind="drain", target="w0"),)
    run = ran(SMALL, agents(12, 1, MIX), events=events)
    assert all("w0" not in one.workers for one in run.records if one.asked_s > 20)


def test_a_worker_that_is_added_is_used_and_one_removed_is_missed_by_nobody():
    events = (
        ClusterEvent(at_s=10, kind="add", target="w7"),
        ClusterEvent(at_s=30, kind="remove", target="w0"),
    )
    run = ran(SMALL, agents(16, 1, MIX), "round_robin", events=events)
    assert any("w7" in one.workers for one in run.records)
    assert all(one.ended_s is not None for one in run.records)


def test_a_link_that_carries_nothing_stops_nobody_for_ever():
    events = tuple(
        ClusterEvent(at_s=5, kind="link", target=f"{name}/host", factor=0.0)
        for name in ("w0", "w1")
    )
    world = World(SMALL, agents(8, 1, MIX), policy_of("round_robin", SMALL), seed=1, events=events)
    run = world.run()
    assert run.finished
    assert all(one.ended_s is not None for one in run.records)


def test_an_event_for_a_worker_that_is_not_there_is_refused():
    event = ClusterEvent(at_s=1, kind="fail", target="w9")
    with pytest.raises(ConfigError, match="no worker 'w9'; there are w0, w1"):
        World(SMALL, agents(1, 1, MIX), policy_of(OURS, SMALL), seed=1, events=(event,))


def test_a_prompt_that_no_worker_can_hold_is_refused_with_the_reason():
    session = Session("s", 1 << 20, (Turn(500_000, 5, Pause.END),))
    run = ran(SMALL, Workload("w", (session,)))
    assert "context" in run.records[0].refused or "KV" in run.records[0].refused


def test_sessions_of_lanes_run_so_many_at_a_time():
    workload = dataclasses.replace(agents(9, 1, MIX), lanes=3)
    run = ran(SMALL, workload)
    moments = [start for start, _ in run.sessions_s.values()]
    for moment in moments:
        at_once = sum(start <= moment < end for start, end in run.sessions_s.values())
        assert at_once <= 3 + max(len(turn.children) for s in workload.sessions for turn in s.turns)


def test_hints_and_pools_bring_hits_that_engines_alone_do_not_have():
    tight = SMALL.model_copy(update={"hbm_tokens": 100_000, "pool": 20 * 10**9})
    alone = tight.model_copy(update={"pool": 0, "peers": False})
    workload = agents(12, 1, MIX)
    pooled = summary(
        ran(tight, workload, "least_load", features=Features(hints=True)), policy="", seed=1
    )
    without = summary(ran(alone, workload, "least_load"), policy="", seed=1)
    assert pooled.prompt_tokens.pool > 0
    assert pooled.prompt_tokens.computed < without.prompt_tokens.computed


@pytest.mark.parametrize(
    "features",
    [
        Features(admission=True, oversubscribe=0.7),
        Features(hints=True, expected_pauses=True, demote=True, prefetch=True),
        Features(moves=True),
        Features(moves=True, moves_keep_context=False),
        Features(siblings=False, replication=False),
        EVERYTHING,
    ],
    ids=["admission", "gaps", "moves", "moves that lose", "fewer", "everything"],
)
def test_every_part_of_the_router_can_be_left_out(features):
    tight = SMALL.model_copy(update={"workers": 3, "hbm_tokens": 80_000})
    workload = agents(10, 3, ALL)
    run = ran(tight, workload, features=features)
    assert len(run.records) == workload.turns
    assert all(one.refused is None and one.ended_s is not None for one in run.records)


def test_sessions_leave_a_draining_worker_with_their_context():
    events = (ClusterEvent(at_s=60, kind="drain", target="w0"),)
    cluster = SMALL.model_copy(update={"pool": 0, "peers": False})
    workload = agents(12, 1, MIX)
    kept, lost = (
        ran(cluster, workload, events=events, features=Features(moves=True, moves_keep_context=one))
        for one in (True, False)
    )
    assert kept.between.mover.done
    assert kept.between.copies.moved_bytes
    assert not lost.between.copies.moved_bytes

    def computed(run):
        return sum(one.computed_tokens for one in run.records)

    assert computed(kept) < computed(lost)


def test_what_a_worker_reads_from_another_node_is_found_in_its_own_pool():
    """Else the turns that it then computes would be ends of prompts whose fronts it lacks."""
    changed = {"tensor": 8, "hbm_tokens": 120_000, "pool": 20 * 10**9, "peers": False}
    mix = AgentMix(
        turns=5, prefix_tokens=8_000, first_median=15_000.0, context_cap=60_000, start_over_s=20
    )
    run = ran(SMALL.model_copy(update=changed), agents(14, 1, mix))
    later = [one for one in run.records if one.turn]
    ideal = [one.prompt_tokens - one.cached_ideally for one in later]
    again = sum(max(one.computed_tokens - new, 0) for one, new in zip(later, ideal, strict=True))
    assert again < 0.005 * sum(one.prompt_tokens for one in later)


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 1000),
    policy=st.sampled_from([OURS, "least_load", "dynamo"]),
    fails_s=st.floats(1, 80),
    pairs=st.booleans(),
    tight=st.booleans(),
    features=st.sampled_from([NOTHING, EVERYTHING]),
)
def test_whatever_fails_when_every_request_ends(seed, policy, fails_s, pairs, tight, features):
    cluster = PAIRS if pairs else SMALL
    if tight:
        cluster = cluster.model_copy(update={"hbm_tokens": 70_000})
    target = "d0" if pairs else "w0"
    events = (
        ClusterEvent(at_s=fails_s, kind="fail", target=target),
        ClusterEvent(at_s=fails_s + 7, kind="recover", target=target),
        ClusterEvent(at_s=fails_s + 9, kind="drain", target=target),
        ClusterEvent(at_s=fails_s + 20, kind="resume", target=target),
    )
    workload = agents(8, seed, ALL)
    run = ran(cluster, workload, policy, events=events, seed=seed, features=features)
    assert len(run.records) == workload.turns
    assert all(one.ended_s is not None for one in run.records)
