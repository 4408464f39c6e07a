"""Step times that were measured."""

import pytest

from kimi_runtime.errors import ConfigError
from kimi_runtime.sim.cluster import ClusterSpec
from kimi_runtime.sim.measured import MeasuredStep, measured_timing
from kimi_runtime.sim.sessions import Session, Turn, Workload
from kimi_runtime.sim.tasks import policy_of
from kimi_runtime.sim.world import World

STEP = MeasuredStep(fixed_s=0.01, row_s=0.002, token_s=0.001, kv_token_s=1e-6, pair_s=1e-7)
NANO = ClusterSpec(
    model="kimi-nano",
    gpu="cpu",
    tensor=1,
    workers=2,
    workers_per_node=2,
    block_tokens=64,
    hbm_tokens=8192,
    step_tokens=512,
    max_context_tokens=4096,
    pool=0,
    measured=STEP,
    speed_spread=0.0,
)


def test_a_step_is_the_sum_of_its_parts():
    timing = measured_timing("kimi-nano", "cpu", tensor=1, step=STEP)
    assert timing.step_s(0, 0.0) == 0.0
    assert timing.step_s(2, 1000.0) == pytest.approx(0.01 + 2 * 0.002 + 1000 * 1e-6)
    assert timing.step_s(0, 0.0, 100, 5000.0) == pytest.approx(0.01 + 100 * 0.001 + 5000 * 1e-7)


def test_a_lone_request_takes_what_its_steps_take():
    load = Workload("one", (Session("s", 1, (Turn(300, 5),)),))
    run = World(NANO, load, policy_of("longest_prefix", NANO), seed=1).run()
    (record,) = run.records
    assert record.ttft_s == pytest.approx(0.01 + 300 * 0.001 + 300 * 150 * 1e-7)
    decode_s = sum(0.01 + 0.002 + held * 1e-6 for held in range(300, 304))
    assert record.e2e_s == pytest.approx(record.ttft_s + decode_s)


def test_workers_of_one_node_share_its_pool():
    cluster = NANO.model_copy(update={"pool": 1 << 30})
    world = World(cluster, Workload("none", ()), policy_of("longest_prefix", cluster), seed=1)
    assert list(world.cluster.pools) == ["n0"]


def test_an_unknown_machine_is_named_with_those_there_are():
    with pytest.raises(ConfigError, match="no GPU 'TPU' is known; use one of"):
        measured_timing("kimi-nano", "TPU", tensor=1, step=STEP)
