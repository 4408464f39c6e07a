"""The day-0 figures against what was published."""

import pytest

from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.hardware import NODES
from kimi_runtime.spec.published import QUARK_MXFP4, published
from kimi_runtime.spec.speed import NANO_ON_CPU, known_prior, speed_prior

MI355X = NODES["MI355X"]
K26 = speed_prior(published("kimi-k2.6"), MI355X, tensor=4, quantisation=QUARK_MXFP4)


@pytest.mark.parametrize(
    ("rows", "milliseconds"),
    [
        (3.7, 8.81),
        (7.4, 10.94),
        (14.6, 13.07),
        (29.1, 16.70),
        (57.4, 22.39),
        (102.4, 29.98),
        (118.2, 30.73),
        (234.4, 44.99),
    ],
)
def test_decode_steps_of_k2_at_tp4_are_those_of_the_published_series(rows, milliseconds):
    # ATOM's P/D series of K2.5 MXFP4, 8k in and 1k out: 7,834 tokens of KV a sequence on average
    assert K26.step_s(rows, rows * 7_834) * 1e3 == pytest.approx(milliseconds, rel=0.12)


def test_prefill_of_k2_at_tp4_is_the_published_rate():
    rate = 7_373 / K26.prefill_s(7_373) / 4
    assert rate == pytest.approx(11_250, rel=0.1)


def test_k3_at_tp8_is_between_its_published_day_and_its_roofline():
    k3 = known_prior("kimi-k3", "MI355X", tensor=8)
    assert 0.003 < k3.step_s(2, 16_000) < 0.02086
    assert 8 * 820 < 8_192 / k3.prefill_s(8_192) < 50_000
    assert k3.state_bytes > 414 * 2**20


def test_nano_is_what_was_measured():
    for cached, milliseconds in ((0, 106.7), (2048, 315.7), (8192, 920.7)):
        assert NANO_ON_CPU.prefill_s(512, cached) * 1e3 == pytest.approx(milliseconds, rel=0.05)
    for rows, context, milliseconds in ((1, 128, 11.6), (8, 512, 29.4), (64, 512, 95.7)):
        step_s = NANO_ON_CPU.step_s(rows, rows * context)
        assert step_s * 1e3 == pytest.approx(milliseconds, rel=0.07)


def test_nothing_to_compute_takes_no_time():
    assert K26.prefill_s(0, 100_000) == 0.0


def test_what_is_not_known_is_named():
    with pytest.raises(ConfigError, match="no GPU 'H100' is known"):
        known_prior("kimi-k2.6", "H100", tensor=4)
    with pytest.raises(ConfigError, match="kimi-k9"):
        known_prior("kimi-k9", "MI355X", tensor=4)
