"""Ratios of paired arms: what is equal is 1, what is twice as fast is 2, and doubt is shown."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.errors import ConfigError
from kimi_runtime.sim.stats import METRICS, RESAMPLES, Slo, best, level, ratio, sample_of

SLO = Slo(ttft_s=1.0, tpot_s=0.1)


def request(session="s0", asked_s=0.0, ttft_s=0.5, tokens=11, **changes):
    """A request whose tokens come every 50 ms."""
    made = {
        "session": session,
        "child": False,
        "asked_s": asked_s,
        "first_s": asked_s + ttft_s,
        "ended_s": asked_s + ttft_s + 0.05 * (tokens - 1),
        "output_tokens": tokens,
    }
    return made | changes


def run(slow=1.0, *, seed=1, sessions=20, turns=5):
    """Sessions whose first tokens take different times, all `slow` times as long."""
    return sample_of(
        [
            request(f"s{n}", 10.0 * turn, slow * (0.1 + 0.01 * ((7 * n + 3 * turn) % 30)))
            for n in range(sessions)
            for turn in range(turns)
        ],
        seed=seed,
        slo=SLO,
    )


@pytest.mark.parametrize("metric", METRICS)
def test_an_arm_is_exactly_as_good_as_itself(metric):
    found = ratio([run(seed=s) for s in (1, 2)], [run(seed=s) for s in (1, 2)], metric)
    assert (found.mean, found.low, found.high, found.seeds) == (1.0, 1.0, 1.0, 2)


def test_twice_as_fast_is_2_however_sessions_are_drawn():
    found = ratio([run(1.0)], [run(2.0)], "ttft_p99")
    assert (found.mean, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_an_interval_holds_its_mean_and_shows_that_few_sessions_say_little():
    def one(extra_s, sessions):
        return sample_of(
            [request(f"s{n}", 0.0, 1.0 + extra_s * (n % 3)) for n in range(sessions)],
            seed=1,
            slo=SLO,
        )

    few, many = (ratio([one(0.0, n)], [one(1.0, n)], "ttft_p50") for n in (6, 300))
    assert few.low <= few.mean <= few.high
    assert few.high - few.low > many.high - many.low


def test_only_seeds_that_both_arms_have_are_pairs():
    assert ratio([run(seed=1), run(seed=2)], [run(seed=2), run(seed=3)], "e2e_p90").seeds == 1
    with pytest.raises(ConfigError, match=r"no seed in common.*\[1\] and \[2\]"):
        ratio([run(seed=1)], [run(seed=2)], "e2e_p90")


def test_arms_of_different_sessions_are_no_pair():
    with pytest.raises(ConfigError, match="ran different sessions"):
        ratio([run(sessions=4)], [run(sessions=5)], "e2e_p90")


def test_refusing_does_not_look_fast():
    kept = [request(f"s{n}", 100.0 * n) for n in range(10)]
    lost = [
        *kept[1:],
        request("s0", first_s=None, ended_s=None, output_tokens=0),
    ]
    ours, theirs = (sample_of(one, seed=1, slo=SLO) for one in (lost, kept))
    assert ours.figure("ttft_p99") > 900
    assert ours.figure("goodput") < theirs.figure("goodput")


def test_goodput_counts_what_keeps_both_bounds():
    requests = [
        request("s0"),
        request("s1", ttft_s=2.0),
        request("s2", ended_s=9.0),
    ]
    sample = sample_of(requests, seed=1, slo=SLO)
    assert sample.figure("goodput") == pytest.approx(1 / 9.0)


def test_steady_throughput_leaves_out_a_lonely_last_session():
    busy = [request(f"s{n}", 1.0 * n, tokens=101) for n in range(100)]
    alone = [*busy, request("s100", 5_000.0, tokens=101)]
    ours, theirs = (sample_of(one, seed=1, slo=SLO) for one in (busy, alone))
    assert theirs.figure("throughput") < 0.1 * ours.figure("throughput")
    assert theirs.figure("steady_throughput") == pytest.approx(
        ours.figure("steady_throughput"), rel=0.05
    )


def test_subagents_are_drawn_with_the_session_that_started_them():
    sample = sample_of(
        [request("s0"), request("s0.3.1", child=True), request("s1")], seed=1, slo=SLO
    )
    assert sample.names == ("s0", "s1")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=60), st.integers(0, 5))
def test_quantiles_are_of_the_values_and_in_order(values, seed):
    requests = [request(f"s{n % 7}", 0.0, value) for n, value in enumerate(values)]
    sample = sample_of(requests, seed=seed, slo=SLO)
    figures = [sample.resamples(name) for name in ("ttft_p50", "ttft_p90", "ttft_p99")]
    assert all(len(one) == RESAMPLES + 1 for one in figures)
    assert (figures[0] <= figures[1]).all()
    assert (figures[1] <= figures[2]).all()
    assert {round(float(v), 9) for one in figures for v in one} <= {round(v, 9) for v in values}


def test_the_best_arm_depends_on_which_way_a_metric_is_better():
    arms = {"quick": [run(1.0)], "slow": [run(3.0)]}
    assert best(arms, "ttft_p90") == "quick"
    assert best(arms, "goodput") == "quick"
    assert level(arms["slow"], "ttft_p50") == pytest.approx(3 * level(arms["quick"], "ttft_p50"))
