"""Decisions from commit to end: nothing leaks, whatever is told and in whatever order they end."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.router.decisions import Decisions
from kimi_runtime.router.insight import Insight, fronts_of
from kimi_runtime.router.policies.cost import CostPolicy
from kimi_runtime.router.policies.longest_prefix import LongestPrefixPolicy
from kimi_runtime.router.sessions import Geometry
from kimi_runtime.router.view import KvSource
from kimi_runtime.spec.request import FinishReason, GenerateChunk, KvUsage, Timing
from kimi_runtime.spec.router import Cost
from kimi_runtime.spec.worker import LoadReport, Role
from worker_views import turn, worker

POOL = KvSource("pool-n1", "n1", "dram", 60_000)
PREFILL, DECODE = (
    worker("p", role=Role.PREFILL, node="n0"),
    worker("d", role=Role.DECODE, node="n1"),
)
WHOLE = worker("w", node="n1", max_running=8)
FLEETS = st.sampled_from([[PREFILL, DECODE], [WHOLE], [PREFILL, DECODE, WHOLE]])
USAGE = st.builds(
    KvUsage,
    hbm_tokens=st.integers(0, 70_000),
    pool_tokens=st.integers(0, 70_000),
    computed_tokens=st.integers(0, 70_000),
    hand_off_bytes=st.integers(0, 10**9),
)
SECONDS = st.floats(0, 1e4)
TIMING = st.builds(Timing, prepared_s=SECONDS, queued_s=SECONDS, prefill_s=SECONDS)
CHUNK = st.builds(
    GenerateChunk,
    ids=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    finish=st.none() | st.sampled_from(FinishReason),
    usage=st.none() | USAGE,
    timing=st.none() | TIMING,
)
ENDS = st.sampled_from([None, RuntimeError("broke"), GeneratorExit(), KeyboardInterrupt()])
STEP = st.tuples(st.floats(0, 3), FLEETS, st.lists(CHUNK, max_size=4), ENDS, st.integers(0, 3))


def test_what_a_plan_reads_nobody_has_to_compute():
    planner = CostPolicy(Cost(model="kimi-k2.6", gpu="MI355X", tensor=4)).planner
    decisions = Decisions(CostPolicy(Cost()), Insight(planner, load_interval_s=0.2))
    asked = turn(sources=(POOL,))
    decision = decisions.decide("r", asked, [WHOLE], now_s=0.0)
    assert decision.plan.fetches[0].end == 60_000 - 60_000 % WHOLE.block_tokens
    assert decision.new_tokens == asked.prompt_tokens - decision.plan.fetches[0].end
    untaught = Decisions(LongestPrefixPolicy(), Insight(None, load_interval_s=0.2))
    decision = untaught.decide("r", asked, [WHOLE], now_s=0.0)
    assert decision.new_tokens == asked.prompt_tokens


@settings(max_examples=50, deadline=None)
@given(steps=st.lists(STEP, max_size=8))
def test_what_was_committed_is_taken_back_when_a_course_ends(steps):
    told = []
    planner = CostPolicy(Cost(model="kimi-k2.6", gpu="MI355X", tensor=4)).planner
    insight = Insight(planner, load_interval_s=0.2)
    decisions = Decisions(CostPolicy(Cost()), insight, lambda *one: told.append(one))
    now_s, opened = 0.0, []
    for number, (passed_s, fleet, chunks, end, ended_early) in enumerate(steps):
        now_s += passed_s
        asked = turn(sources=(POOL,), session=bytes([number]))
        decision = decisions.decide("r", asked, fleet, now_s=now_s, fronts=((64, b"front"),))
        course = decisions.course(f"r.{number}", decision, lambda now_s=now_s: now_s)
        opened.append((course, end))
        one = course.__enter__()
        for chunk in chunks:
            one.prefilled(chunk)
            one.came(chunk, now_s=now_s)
        for _ in range(min(ended_early, len(opened))):
            close(*opened.pop(0))
    assert len(planner.flows) <= 2 * len(opened)
    for course, end in opened:
        close(course, end)
    assert len(planner.flows) == 0
    assert len(insight.answers) == 0
    assert len(told) == len(steps)


def close(course, end):
    swallowed = course.__exit__(None if end is None else type(end), end, None)
    assert not swallowed


def test_transfers_share_links_from_the_moment_of_the_decision():
    planner = CostPolicy(Cost(model="kimi-k2.6", gpu="MI355X", tensor=4)).planner
    insight = Insight(planner, load_interval_s=0.2)
    decisions = Decisions(CostPolicy(Cost()), insight)
    first = decisions.decide("a", turn(), [PREFILL, DECODE], now_s=0.0)
    with decisions.course("a.1", first, lambda: 0.0):
        second = decisions.decide("b", turn(), [PREFILL, DECODE], now_s=0.0)
        assert second.decided.explanation.chosen.terms.e_link > 0
    third = decisions.decide("c", turn(), [PREFILL, DECODE], now_s=0.0)
    assert third.decided.explanation.chosen.terms.e_link == 0


def report(seq, **fields):
    usual = {"waiting": 0, "running": 2, "queued_tokens": 0, "free_blocks": 60, "total_blocks": 100}
    return LoadReport(epoch=1, seq=seq, **{"steps": 10 * seq, **usual, **fields})


def test_reports_tell_steps_only_while_nothing_but_the_same_answers_ran():
    from kimi_runtime.router.reports import Reports

    reports = Reports()
    seq = itertools.count(1)

    def take(now_s, **fields):
        return reports.take("w", report(next(seq), **fields), block_tokens=16, now_s=now_s)

    assert take(0.0) is None
    steps = take(0.2)
    assert (steps.rows, steps.kv_tokens) == (2, 40 * 16)
    assert steps.seconds == pytest.approx(0.02)
    assert take(0.4, queued_tokens=9) is None
    assert take(0.6) is None
    assert take(0.8, last_request={"router-0": "r-2"}) is None
    assert take(9.0, last_request={"router-0": "r-2"}) is None
    assert reports.utilisation("w") == pytest.approx(1 / 45, abs=0.03)


def test_prompts_that_wait_take_no_time_from_those_that_answer():
    from kimi_runtime.router.reports import Reports

    reports = Reports()
    for seq in range(100):
        told = report(seq, queued_tokens=9_000, waiting=3)
        reports.take("w", told, block_tokens=16, now_s=0.2 * seq, step_s=0.02)
    assert reports.utilisation("w") == pytest.approx(0.0, abs=1e-6), "10 steps in 0.2 s"
    for seq in range(100, 1_000):
        told = report(seq, queued_tokens=9_000, steps=1_000 + 5 * (seq - 100))
        reports.take("w", told, block_tokens=16, now_s=0.2 * seq, step_s=0.02)
    assert reports.utilisation("w") == pytest.approx(0.5, abs=0.02), "a step every 0.04 s"


def test_fronts_are_whole_blocks_before_the_ends_of_messages():
    geometry = Geometry("m", "l", 16)
    keys = {geometry: [bytes([number]) for number in range(10)]}
    assert fronts_of([5, 40, 47, 100, 400], keys) == ((32, b"\x01"), (96, b"\x05"))
    assert fronts_of([40], {}) == ()
