"""What is learnt of how long a source takes."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.umbp.speed import MeasuredCost
from kimi_runtime.umbp.tiers.base import TierCost

PRIOR = TierCost(latency_s=1e-3, bytes_per_s=1e9)
MIB = 1 << 20


def test_before_anything_is_measured_it_is_the_prior():
    cost = MeasuredCost(PRIOR)
    for size in (1, MIB, 100 * MIB):
        assert abs(cost.seconds(size) / PRIOR.seconds(size) - 1) < 1e-6


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-5, 0.1), st.floats(1e6, 1e11), st.integers(0, 1 << 30))
def test_latency_and_rate_are_found_under_noise(latency_s, rate, seed):
    dice, cost = random.Random(seed), MeasuredCost(PRIOR)
    truth = TierCost(latency_s, rate)
    for _ in range(150):
        size = int(2 ** dice.uniform(14, 27))
        cost.observe(size, truth.seconds(size) * dice.uniform(0.9, 1.1))
    for size in (1 << 15, MIB, 64 * MIB):
        assert 0.5 < cost.seconds(size) / truth.seconds(size) < 2


def test_batches_of_one_size_give_the_right_time_for_that_size():
    cost = MeasuredCost(PRIOR)
    for _ in range(100):
        cost.observe(8 * MIB, 0.5)
    assert 0.45 < cost.seconds(8 * MIB) < 0.55
    assert cost.cost.latency_s >= 0
    assert cost.cost.bytes_per_s > 0


def test_a_source_that_becomes_slow_is_known_as_slow_soon():
    cost = MeasuredCost(PRIOR)
    for _ in range(50):
        cost.observe(8 * MIB, 0.01)
    for _ in range(20):
        cost.observe(8 * MIB, 0.1)
    assert cost.seconds(8 * MIB) > 0.05
