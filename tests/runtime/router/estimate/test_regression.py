"""Seconds as a sum of known shapes: what is learned, what is not believed, and what fades."""

import math
import random
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.router.estimate.regression import HUBER_SD, Regression

PRIOR = (0.01, 2e-5, 6e-10)


def shape(new, cached):
    return (1.0, float(new), new * (cached + new / 2))


def truth(x, factors=(1.0, 1.0, 1.0)):
    return sum(p * f * value for p, f, value in zip(PRIOR, factors, x, strict=True))


def prompts(seed):
    chance = random.Random(seed)
    while True:
        yield shape(chance.randint(64, 30_000), chance.choice([0, 2_000, 60_000, 120_000])), chance


def taught(factors, count, *, seed=1, noise=0.05, outliers=0.0, model=None, start_s=0.0):
    model = model or Regression(PRIOR, relative_sd=0.5)
    for number, (x, chance) in zip(range(count), prompts(seed), strict=False):
        seconds = truth(x, factors) * math.exp(chance.gauss(0, noise))
        if chance.random() < outliers:
            seconds *= 10
        model.observe(x, seconds, now_s=start_s + number)
    return model


TYPICAL = (shape(870, 71_000), shape(18_000, 0), shape(8_000, 120_000))


def off(model, factors, *, now_s):
    fit = model.fit(now_s=now_s)
    return max(abs(fit.at(x).mean / truth(x, factors) - 1) for x in TYPICAL)


def test_before_any_data_the_prior_speaks_with_its_own_doubt():
    estimate = Regression(PRIOR, relative_sd=0.5).fit(now_s=0.0).at(TYPICAL[0])
    assert estimate.mean == pytest.approx(truth(TYPICAL[0]))
    assert 0.2 < estimate.sd / estimate.mean < 0.6


@pytest.mark.parametrize("factors", [(1, 1, 1), (2, 2, 2), (0.4, 0.4, 0.4), (1.5, 0.6, 2.0)])
def test_the_truth_is_learned_from_a_wrong_prior(factors):
    assert off(taught(factors, 300), factors, now_s=300.0) < 0.08


def test_a_dozen_measurements_are_enough_to_be_near():
    assert off(taught((2, 2, 2), 12), (2, 2, 2), now_s=12.0) < 0.2


def test_doubt_shrinks_with_data_to_the_noise_there_is():
    estimate = taught((1, 1, 1), 300).fit(now_s=300.0).at(TYPICAL[0])
    assert 0.02 < estimate.sd / estimate.mean < 0.1


def test_one_measurement_in_ten_that_is_ten_times_too_long_hardly_counts():
    factors = (1.5, 1.5, 1.5)
    assert off(taught(factors, 400, outliers=0.1), factors, now_s=400.0) < 0.15


def test_without_data_it_goes_back_to_the_prior():
    model = taught((3, 3, 3), 200)
    assert off(model, (3, 3, 3), now_s=200.0) < 0.1
    assert off(model, (1, 1, 1), now_s=200.0 + 3600 * 3) < 0.01


def test_a_worker_that_becomes_slow_is_noticed_and_learned_anew():
    model = taught((1, 1, 1), 300)
    before = model.changes
    taught((2, 2, 2), 30, model=model, seed=2, start_s=300.0)
    assert model.changes == before + 1
    assert off(model, (2, 2, 2), now_s=330.0) < 0.15


def test_steady_noise_is_no_change():
    assert taught((1, 1, 1), 2000, noise=0.1).changes == 0


def test_what_nobody_excited_keeps_its_prior():
    model = Regression(PRIOR, relative_sd=0.5)
    for number in range(300):
        x = shape(2000 + number, 0)  # the pairs hardly matter here
        model.observe(x, truth(x, (2.0, 2.0, 1.0)), now_s=float(number))
    pair = model.fit(now_s=300.0).coefficients[2]
    assert PRIOR[2] * 0.5 < pair < PRIOR[2] * 2


def test_a_clock_that_jumps_back_is_harmless():
    model = taught((2, 2, 2), 50)
    model.observe(TYPICAL[0], truth(TYPICAL[0], (2, 2, 2)), now_s=-1e6)
    assert off(model, (2, 2, 2), now_s=-1e6) < 0.15


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 200_000),
            st.integers(0, 1_000_000),
            st.one_of(st.floats(0, 1e6), st.sampled_from([math.nan, math.inf, -1.0])),
            st.floats(-1e3, 1e6),
        ),
        max_size=40,
    )
)
def test_whatever_is_measured_predictions_are_finite_and_not_negative(measurements):
    model = Regression(PRIOR, relative_sd=0.5)
    now_s = 0.0
    for new, cached, seconds, now_s in measurements:
        model.observe(shape(new, cached), seconds, now_s=now_s)
    fit = model.fit(now_s=now_s)
    assert all(c >= 0 for c in fit.coefficients)
    for x in TYPICAL:
        estimate = fit.at(x)
        assert math.isfinite(estimate.mean)
        assert estimate.mean >= 0
        assert 0 <= estimate.var < math.inf


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 200_000), st.integers(1, 200_000), st.integers(0, 500_000))
def test_more_tokens_never_take_less_time(new, more, cached):
    fit = taught((1.5, 0.6, 2.0), 60).fit(now_s=60.0)
    assert fit.at(shape(new + more, cached)).mean >= fit.at(shape(new, cached)).mean
    assert fit.at(shape(new, cached + more)).mean >= fit.at(shape(new, cached)).mean


@settings(max_examples=50, deadline=None)
@given(
    factors=st.tuples(*[st.floats(0.3, 3)] * 3),
    count=st.integers(1, 40),
    unknowns=st.sampled_from([2, 3]),
)
def test_the_solution_is_that_of_the_normal_equations(factors, count, unknowns):
    prior = np.array(PRIOR[:unknowns])
    model = Regression(tuple(prior), relative_sd=0.5)
    information, moment = np.zeros((unknowns, unknowns)), np.zeros(unknowns)
    for x, _ in islice(prompts(1), count):
        shapes = x[:unknowns]
        before, seconds = model.fit(now_s=0.0), float(prior * factors[:unknowns] @ shapes)
        if model.observe(shapes, seconds, now_s=0.0):
            return  # a change was seen, and the data dropped
        expected = before.at(shapes)
        scale = max(expected.mean, prior @ shapes / model.farthest)
        off = abs(seconds - expected.mean) / math.hypot(expected.sd, 1e-6 * scale)
        weight = min(HUBER_SD / off, 1.0) if off else 1.0
        phi = prior * shapes / scale
        information = model.forgetting * information + weight * np.outer(phi, phi)
        moment = model.forgetting * moment + weight * phi * seconds / scale
    fit = model.fit(now_s=0.0)
    precision = information / fit.noise_var + np.eye(unknowns) / 0.5**2
    theta = np.linalg.solve(precision, moment / fit.noise_var + 1 / 0.5**2)
    if theta.min() > 0:  # else some of them are left out
        assert fit.coefficients == pytest.approx(theta * prior, rel=1e-6)
        covariance = np.linalg.inv(precision) * np.outer(prior, prior)
        assert np.array(fit.covariance) == pytest.approx(covariance, rel=1e-6)
