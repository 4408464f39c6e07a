"""Speeds, links, hit ratios, queues, space prices, calibration."""

import math
import random

import pytest

from kimi_runtime.router.estimate.calibration import Calibration
from kimi_runtime.router.estimate.models import Models
from kimi_runtime.router.estimate.price import SpacePrice
from kimi_runtime.router.estimate.rates import LinkRates
from kimi_runtime.router.estimate.ratios import HitRatios, QueueRatios
from kimi_runtime.router.estimate.speeds import Speeds
from kimi_runtime.router.estimate.usual import UsualWork
from kimi_runtime.spec.hardware import NIC_400G
from kimi_runtime.spec.speed import known_prior

K26 = known_prior("kimi-k2.6", "MI355X", tensor=4)


def test_a_cold_start_predicts_what_the_prior_says():
    curves = Speeds(K26).curves(now_s=0.0)
    assert curves.prefill_s(870, 71_000).mean == pytest.approx(K26.prefill_s(870, 71_000))
    assert curves.step_s(32, 250_000).mean == pytest.approx(K26.step_s(32, 250_000))
    assert curves.prefill_s(0, 71_000) == (0.0, 0.0)


def test_decode_steps_are_learned_by_batch_and_context():
    speeds, chance = Speeds(K26), random.Random(3)
    for number in range(400):
        rows = chance.choice([1, 4, 16, 64, 128])
        context = rows * chance.randint(1_000, 100_000)
        slow = 1.4 * K26.step_s(rows, context) * math.exp(chance.gauss(0, 0.03))
        speeds.stepped("w", rows, context, slow, now_s=float(number))
    curves = speeds.curves(now_s=400.0)
    for rows, context in ((1, 50_000), (32, 1_000_000), (128, 4_000_000)):
        expected = 1.4 * K26.step_s(rows, context)
        assert curves.step_s(rows, context).mean * speeds.bias("w") == pytest.approx(
            expected, rel=0.1
        )


def test_a_slow_worker_among_equals_is_slow_alone():
    speeds = Speeds(K26)
    for number in range(400):
        for worker, factor in (("slow", 2.0), ("a", 1.0), ("b", 1.0), ("c", 1.0)):
            seconds = factor * K26.prefill_s(8_000, 20_000)
            speeds.prefilled(worker, 8_000, 20_000, seconds, now_s=float(number))
    ratio = speeds.bias("slow") / speeds.bias("a")
    assert ratio == pytest.approx(2.0, rel=0.1)
    speeds.forget("slow")
    assert speeds.bias("slow") == 1.0


def test_a_worker_that_lies_about_its_speed_is_believed_within_bounds():
    speeds = Speeds(K26)
    for number in range(200):
        speeds.prefilled("liar", 8_000, 0, 1e-9, now_s=float(number))
        for honest in "abc":
            speeds.prefilled(honest, 8_000, 0, K26.prefill_s(8_000), now_s=float(number))
    assert speeds.bias("liar") >= 1 / 8
    mean = speeds.curves(now_s=200.0).prefill_s(8_000, 0).mean
    assert mean * speeds.bias("a") == pytest.approx(K26.prefill_s(8_000), rel=0.1)


def test_a_link_starts_at_a_share_of_its_data_sheet_and_learns():
    links = LinkRates()
    links.expect("nic", NIC_400G)
    assert 1e9 * links.of("nic", now_s=0.0).per_byte_s == pytest.approx(1 / 35, rel=0.01)
    for number in range(60):
        size = 10**8 + number * 10**7
        links.observe("nic", size, size / 20e9, sharing=1.0, now_s=0.1 * number)
    assert 1e9 * links.of("nic", now_s=6.0).per_byte_s == pytest.approx(1 / 20, rel=0.1)
    assert 1e9 * links.of("nic", now_s=2000.0).per_byte_s == pytest.approx(1 / 35, rel=0.02)


def test_a_shared_link_does_not_look_slow():
    links = LinkRates()
    links.expect("nic", NIC_400G)
    for number in range(60):
        size = 10**9
        links.observe("nic", size, 4 * size / 35e9, sharing=4.0, now_s=0.1 * number)
    assert 1e9 * links.of("nic", now_s=6.0).per_byte_s == pytest.approx(1 / 35, rel=0.05)


def test_an_unknown_link_cannot_be_used():
    links = LinkRates()
    assert links.of("nobody's", now_s=0.0) is None
    assert not links.observe("nobody's", 1, 1.0, sharing=1.0, now_s=0.0)


def test_hits_that_do_not_come_true_lower_the_ratio_and_raise_an_alarm():
    hits = HitRatios()
    for _ in range(100):
        hits.observe("good", "hbm", predicted=1000, found=1200)
        hits.observe("bad", "hbm", predicted=1000, found=0)
    assert hits.ratio("good", "hbm") > 0.99
    assert hits.ratio("bad", "hbm") < 0.1
    assert list(hits.alarms()) == [("bad", "hbm")]
    hits.forget("bad")
    assert hits.alarms() == {}


def test_queues_that_are_longer_than_they_look_are_believed():
    queues = QueueRatios()
    for _ in range(60):
        queues.observe("w", expected_s=1.0, waited_s=2.0)
    assert queues.wait("w", 3.0).mean == pytest.approx(6.0, rel=0.1)
    assert queues.wait("other", 3.0).mean == 3.0
    assert queues.wait("w", 0.0) == (0.0, 0.0)


def test_long_queues_decide_what_queues_are_believed_to_be():
    queues = QueueRatios()
    for number in range(60):
        queues.observe("w", expected_s=0.02, waited_s=0.0)  # gone on arrival
        if not number % 6:
            queues.observe("w", expected_s=2.0, waited_s=2.0)
    assert queues.factor("w")[0] > 0.9


def test_a_usual_request_is_what_requests_were_like():
    usual = UsualWork(0.2)
    assert usual.mean_s == 0.2
    for _ in range(300):
        usual.observe(1.0)
    usual.observe(float("nan"))
    assert usual.mean_s == pytest.approx(1.0, rel=0.01)


def test_space_costs_what_evictions_were_regretted():
    price = SpacePrice(ghosts=100)
    price.evicted([bytes([n]) for n in range(100)], now_s=0.0)
    assert price.per_block_s(now_s=0.0) == 0.0
    missed = [bytes([n]) for n in range(20)] + [b"never held"]
    assert price.missed(missed, seconds_per_block=0.01, now_s=1.0) == 20
    assert price.per_block_s(now_s=1.0) == pytest.approx(0.2 / 100, rel=0.05)
    assert price.per_block_s(now_s=600.0) < 1e-6


def test_who_looks_at_a_price_of_space_does_not_change_it():
    looked_at, alone = SpacePrice(), SpacePrice()
    for price in (looked_at, alone):
        price.evicted([bytes([n]) for n in range(100)], now_s=0.0)
        price.missed([bytes([n]) for n in range(20)], seconds_per_block=0.01, now_s=1.0)
    for tenth in range(10, 100):
        looked_at.per_block_s(now_s=tenth / 10)
    assert looked_at.per_block_s(now_s=10.0) == alone.per_block_s(now_s=10.0) > 0


def test_a_block_is_regretted_once_and_ghosts_are_bounded():
    price = SpacePrice(ghosts=10)
    price.evicted([bytes([n]) for n in range(50)], now_s=0.0)
    assert price.missed([bytes([n]) for n in range(50)], seconds_per_block=1.0, now_s=0.0) == 10
    assert price.missed([bytes([n]) for n in range(50)], seconds_per_block=1.0, now_s=0.0) == 0


def test_stated_coverage_becomes_true():
    calibration, chance = Calibration(), random.Random(5)
    for _ in range(500):  # twice as uncertain as claimed, and late on average
        calibration.observe(expected_s=1.0, sd_s=0.1, actual_s=1.1 + chance.gauss(0, 0.2))
    z = calibration.z(0.8)
    covered = sum(1.1 + chance.gauss(0, 0.2) <= 1.0 + z * 0.1 for _ in range(4000)) / 4000
    assert covered == pytest.approx(0.8, abs=0.04)


def test_before_there_is_enough_to_tell_the_normal_quantile_holds():
    assert Calibration().z(0.8) == pytest.approx(0.8416, abs=1e-3)
    assert Calibration().z(0.5) == 0.0
    assert Calibration().coverage(0.0) is None


def test_models_forget_what_was_particular_to_a_worker():
    models = Models(K26)
    models.hits.observe("w", "hbm", predicted=10, found=0)
    models.queues.observe("w", expected_s=1.0, waited_s=8.0)
    models.speeds("any").prefilled("w", 1000, 0, 10.0, now_s=0.0)
    models.forget("w")
    fresh = Models(K26)
    assert models.hits.ratio("w", "hbm") == fresh.hits.ratio("w", "hbm")
    assert models.queues.wait("w", 1.0) == fresh.queues.wait("w", 1.0)
    assert models.speeds("any").bias("w") == 1.0
