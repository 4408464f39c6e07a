"""The simulated MI355X against what others measured on a real one."""

import pytest

from kimi_runtime.errors import ConfigError
from kimi_runtime.sim.calibration import compared, errors
from kimi_runtime.sim.fit import fitted_constants
from kimi_runtime.sim.published import published_figures
from kimi_runtime.sim.timing import operations, timing_of
from kimi_runtime.spec.published import K3, K26

K26_TP4 = timing_of("kimi-k2.6", "MI355X", tensor=4, constants=fitted_constants())
SERIES = {series.name: series for series in published_figures().series}


def test_every_series_states_its_source_and_whether_it_was_fitted():
    assert all(series.source and series.points for series in SERIES.values())
    assert {series.fitted for series in SERIES.values()} == {True, False}


def test_only_prefill_decode_series_are_fitted():
    assert all(series.prefill for series in SERIES.values() if series.fitted)


def test_constants_are_within_what_an_operation_can_take():
    constants = fitted_constants()
    assert 1e-6 < constants.launch_s < 1e-5
    assert 0 <= constants.row_s < 1e-4
    assert 0 <= constants.crowd_s < 1e-4
    assert 0 < constants.prompt_s < 0.15


def test_k3_has_more_operations_a_layer_than_k2():
    assert operations(K3) / K3.layers > 1.3 * operations(K26) / K26.layers


@pytest.mark.parametrize("rows", [1, 8, 64, 200])
def test_steps_take_longer_with_more_of_anything(rows):
    base = K26_TP4.step_s(rows, 1000 * rows)
    assert K26_TP4.step_s(rows + 1, 1000 * rows) >= base
    assert K26_TP4.step_s(rows, 1001 * rows) > base
    assert K26_TP4.step_s(rows, 1000 * rows, 512, 512 * 256) > base


def test_a_cached_front_makes_a_prefill_shorter_but_not_free():
    whole, rest = K26_TP4.prefill_s(70_000), K26_TP4.prefill_s(1_000, 69_000)
    assert rest < 0.1 * whole
    assert rest > K26_TP4.prefill_s(1_000)


def test_nothing_to_do_takes_no_time():
    assert K26_TP4.step_s(0, 0) == 0.0


def test_an_unknown_gpu_is_refused():
    with pytest.raises(ConfigError, match="no GPU 'B9'"):
        timing_of("kimi-k2.6", "B9", tensor=4, constants=fitted_constants())


@pytest.mark.parametrize("name", ["K2.7-Code aggregated 8k/1k", "K2.7-Code aggregated 1k/1k"])
def test_held_out_points_of_the_same_stack_are_within_15_percent(name):
    points = compared([SERIES[name]], most=32)
    assert {round(abs(one.error("tpot_s")), 3) <= 0.15 for one in points} == {True}
    found = errors(points)
    assert found is not None
    assert found.throughput < 0.15


def test_fitted_points_are_within_11_percent():
    found = errors(compared([one for one in SERIES.values() if one.fitted], most=32))
    assert found is not None
    assert found.worst_tpot < 0.11
