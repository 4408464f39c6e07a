"""How a spec bears load, against what was measured and quoted for it."""

from itertools import pairwise

import pytest

from kimi_runtime.sim.capacity import capacity
from kimi_runtime.spec.capacity import CapacitySpec, Shape
from kimi_runtime.spec.worker import Role

FOUR = Shape(tensor=4)


@pytest.mark.parametrize("model", ["kimi-k2.5", "kimi-k2.7-code"])
def test_k2_under_tp4_at_128_is_within_a_tenth_of_the_quoted_throughput(model):
    (at,) = capacity(CapacitySpec(model=model, shapes=(FOUR,), concurrency=(128,))).loads
    assert at.total_tokens_per_s_per_gpu == pytest.approx(5369.6, rel=0.10)
    assert at.output_tokens_per_s_per_gpu == pytest.approx(
        at.total_tokens_per_s_per_gpu / 9, rel=0.01
    )


def test_more_load_is_more_throughput_and_longer_waits():
    loads = capacity(CapacitySpec(model="kimi-k2.6", shapes=(FOUR,), concurrency=(1, 8, 32))).loads
    for less, more in pairwise(loads):
        assert less.total_tokens_per_s_per_gpu < more.total_tokens_per_s_per_gpu
        assert less.itl_s < more.itl_s
        assert less.ttft_s < more.ttft_s


def test_prefill_and_decode_apart_count_all_their_gpus():
    shapes = (Shape(tensor=4, role=Role.PREFILL), Shape(tensor=4, role=Role.DECODE))
    apart = capacity(CapacitySpec(model="kimi-k2.5", shapes=shapes, concurrency=(8,)))
    # published: 6,043 tokens/s on 8 GPUs
    assert apart.loads[0].total_tokens_per_s_per_gpu == pytest.approx(6043 / 8, rel=0.15)


@pytest.mark.parametrize(
    ("spec", "note"),
    [
        (CapacitySpec(model="kimi-k3.1-pro", shapes=(Shape(tensor=8),)), "timed as K3"),
        (CapacitySpec(model="kimi-k2.6", shapes=(Shape(tensor=4, expert=8),)), "expert"),
        (CapacitySpec(model="kimi-k2.6", shapes=(FOUR, Shape(tensor=8))), "different tensor"),
    ],
)
def test_what_the_simulator_cannot_time_is_said(spec, note):
    found = capacity(spec.model_copy(update={"concurrency": (1,)}))
    assert any(note in one for one in found.notes)
    assert bool(found.loads) is (spec.model == "kimi-k3.1-pro")
