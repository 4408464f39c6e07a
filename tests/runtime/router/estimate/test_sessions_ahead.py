"""What sessions will do: how long answers get, and when a tool returns."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.router.estimate.gaps import HUMAN, HUMAN_PRIOR, TOOL_PRIOR, Gaps
from kimi_runtime.router.estimate.outputs import Outputs, Phase

times = st.floats(0, 5_000)


def test_the_priors_are_the_published_shares():
    for seconds, share in ((1.0, 0.61), (10.0, 0.88), (60.0, 0.96)):
        assert 1 - TOOL_PRIOR.survival(seconds) == pytest.approx(share, abs=0.02)
    assert HUMAN_PRIOR.quantile(0.5) == pytest.approx(86, rel=0.1)
    assert HUMAN_PRIOR.quantile(0.9) == pytest.approx(1236, rel=0.15)


@settings(max_examples=50, deadline=None)
@given(times, times, st.floats(0.01, 0.99))
def test_survival_falls_and_the_quantile_inverts_it(since_s, more_s, q):
    for curve in (TOOL_PRIOR, HUMAN_PRIOR, TOOL_PRIOR.around(25.0)):
        assert 0 <= curve.survival(since_s + more_s, since_s=since_s) <= 1
        assert curve.survival(since_s + more_s) <= curve.survival(since_s)
        at_s = curve.quantile(q, since_s=since_s)
        assert curve.survival(at_s, since_s=since_s) == pytest.approx(1 - q, abs=1e-6)


@pytest.mark.parametrize("since_s", [0.0, 0.7, 12.0, 400.0])
def test_the_remaining_time_is_the_integral_of_survival(since_s):
    step_s, total = 1.0, 0.0
    for number in range(8_000):
        total += step_s * TOOL_PRIOR.survival(since_s + (number + 0.5) * step_s, since_s=since_s)
    assert TOOL_PRIOR.remaining_s(since_s) == pytest.approx(total, rel=0.02, abs=0.1)


def test_a_tool_is_learned_and_others_are_not_moved_much():
    gaps, chance = Gaps(), random.Random(1)
    for _ in range(300):
        gaps.observe("t", "tests", chance.expovariate(1 / 40), ended=True)
    assert gaps.curve("t", "tests").quantile(0.5) == pytest.approx(40 * math.log(2), rel=0.3)
    assert gaps.curve("other", HUMAN).quantile(0.5) == pytest.approx(86, rel=0.1)


def test_gaps_cut_off_by_a_limit_do_not_look_short():
    cut, ignorant, chance = Gaps(), Gaps(), random.Random(2)
    for _ in range(400):
        seconds = chance.expovariate(1 / 60)
        cut.observe("t", "build", min(seconds, 20.0), ended=seconds <= 20)
        ignorant.observe("t", "build", min(seconds, 20.0), ended=True)
    truth = math.exp(-20 / 60)
    assert cut.curve("t", "build").survival(20.0) == pytest.approx(truth, abs=0.06)
    assert ignorant.curve("t", "build").survival(20.0) < truth - 0.15


def test_a_hint_moves_the_median_of_one_call():
    gaps = Gaps()
    assert gaps.curve("t", "x", expected_s=30.0).quantile(0.5) == pytest.approx(30.0, rel=0.01)
    assert gaps.curve("t", "x").quantile(0.5) < 1.0


def test_hostile_gaps_are_passed_over_and_tools_are_bounded():
    gaps = Gaps(max_tools=3)
    for seconds in (math.nan, math.inf, -1.0):
        gaps.observe("t", "x", seconds, ended=True)
    for number in range(50):
        gaps.observe("t", f"tool {number}", 1.0, ended=True)
    assert len(gaps._tools) == 3


def test_lengths_start_at_the_published_median():
    length = Outputs().expect(b"s", Phase.TOOL, limit=10**6)
    assert length.quantile(0.5) == pytest.approx(220, rel=0.01)
    assert length.quantile(0.9) == pytest.approx(900, rel=0.1)


def test_a_talkative_session_is_known_by_its_own_answers():
    outputs = Outputs()
    for _ in range(40):
        outputs.observe(b"loud", Phase.TOOL, 2_000)
        outputs.observe(b"brief", Phase.TOOL, 50)
    loud = outputs.expect(b"loud", Phase.TOOL, limit=10**6)
    brief = outputs.expect(b"brief", Phase.TOOL, limit=10**6)
    assert loud.quantile(0.5) == pytest.approx(2_000, rel=0.35)
    assert brief.quantile(0.5) == pytest.approx(50, rel=0.35)
    outputs.forget(b"loud")
    assert outputs.expect(b"loud", Phase.TOOL, limit=10**6).quantile(0.5) < 700


def test_answers_cut_by_a_limit_count_as_longer():
    cut, whole = Outputs(), Outputs()
    for _ in range(200):
        cut.observe(b"s", Phase.FINAL, 512, cut=True)
        whole.observe(b"s", Phase.FINAL, 512)
    limit = 10**6
    longer = cut.expect(b"s", Phase.FINAL, limit=limit).quantile(0.5)
    assert longer > whole.expect(b"s", Phase.FINAL, limit=limit).quantile(0.5)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 100_000), st.integers(0, 200_000), st.floats(0.05, 0.95))
def test_no_length_passes_its_limit(limit, made, q):
    length = Outputs().expect(b"s", Phase.TOOL, limit=limit)
    assert 0 <= length.tokens.mean <= limit
    assert length.quantile(q) <= limit
    assert 0 <= length.remaining(made) <= max(limit - made, 0) + 1e-6


def test_sessions_are_bounded():
    outputs = Outputs(max_sessions=5)
    for number in range(100):
        outputs.observe(str(number).encode(), Phase.TOOL, 100)
    assert len(outputs._sessions) == 5
