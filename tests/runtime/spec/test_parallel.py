import pytest
from pydantic import ValidationError

from kimi_runtime.errors import CapacityError, ConfigError
from kimi_runtime.spec.hardware import MI300X, MI355X
from kimi_runtime.spec.model import KIMI_NANO
from kimi_runtime.spec.parallel import (
    Sharding,
    check_divides,
    kv_room,
    kv_tokens,
    tensor_sizes,
    weights_per_gpu,
)
from kimi_runtime.spec.published import K3, K25, K26, QUARK_MXFP4, k2_0711
from kimi_runtime.spec.sizes import weight_bytes

TP4, TP8 = Sharding(tensor=4), Sharding(tensor=8)


def possible(model, gpu, **options):
    return [size.tensor for size in tensor_sizes(model, gpu, **options) if size.problem is None]


def test_one_rank_holds_the_checkpoint():
    for model in (KIMI_NANO, K26, K3):
        share = weights_per_gpu(model, Sharding())
        assert share.total == pytest.approx(weight_bytes(model), abs=4)


def test_k3_under_tp8_holds_an_eighth_of_the_checkpoint_and_what_is_replicated():
    # 195 GB is the published figure for the even share; ATOM's published 191.8 GB with and 190.98
    # without vision are in 2^30 bytes what replication makes of it.
    assert weight_bytes(K3) / 8 == pytest.approx(195e9, rel=0.001)
    share = weights_per_gpu(K3, TP8)
    assert share.total == pytest.approx(191.8 * 2**30, rel=0.001)
    blind = weights_per_gpu(K3.model_copy(update={"vision": None}), TP8)
    assert blind.total == pytest.approx(190.98 * 2**30, rel=0.001)
    latent = 92 * 2 * 7168 * 3584 * 2
    assert latent == pytest.approx(9.46e9, rel=0.001)
    assert share.replicated > latent


def test_k3_is_possible_on_eight_gpus_only():
    assert possible(K3, MI355X) == [8]
    by_size = {size.tensor: size.problem for size in tensor_sizes(K3, MI355X)}
    assert by_size[4] == (
        "kimi-k3 over 4 tensor and 1 expert ranks needs 399.5 GB of weights per GPU, but one "
        "MI355X has 259.2 GB (90% of 288 GB); use more GPUs per replica, or a checkpoint in a "
        "smaller format"
    )
    assert "hidden 7168 % 6 = 4" in by_size[6]


def test_k3_does_not_fit_eight_mi300x():
    with pytest.raises(CapacityError, match=r"205\.9 GB.*MI300X has 172\.8 GB"):
        kv_room(K3, MI300X, TP8)


def test_k26_fits_four_and_eight_gpus():
    assert possible(K26, MI355X) == [4, 8]
    assert possible(K25, MI355X, quantisation=QUARK_MXFP4) == [4, 8]
    assert possible(k2_0711(norm_eps=1e-6), MI300X) == [8]


def test_what_is_left_for_kv_is_what_was_published():
    assert kv_room(K26, MI355X, TP4) == pytest.approx(108e9, rel=0.005)
    assert kv_tokens(K26, MI355X, TP4, dtype="fp8") == pytest.approx(3.1e6, rel=0.01)
    assert kv_room(K3, MI355X, TP8) == pytest.approx(56e9, rel=0.06)


def test_live_states_take_kv_space():
    without = kv_tokens(K3, MI355X, TP8, dtype="fp8")
    with_64 = kv_tokens(K3, MI355X, TP8, dtype="fp8", sequences=64)
    assert (without - with_64) / 64 == pytest.approx(4_063, abs=2)
    assert kv_tokens(K3, MI355X, TP8, dtype="fp8", sequences=10_000) == 0


def test_spreading_experts_leaves_attention_with_its_tensor_ranks():
    wide = weights_per_gpu(K26, Sharding(tensor=1, expert=32))
    narrow = weights_per_gpu(K26, Sharding(tensor=8, expert=32))
    assert wide.replicated == narrow.replicated
    assert wide.divided > narrow.divided
    assert weights_per_gpu(K26, Sharding(tensor=8, expert=8)) == weights_per_gpu(K26, TP8)


@pytest.mark.parametrize(
    ("model", "sharding", "message"),
    [
        (K3, Sharding(tensor=6), r"hidden 7168 % 6 = 4"),
        (K26, Sharding(tensor=3), r"heads 64 % 3 = 1"),
        (K26, Sharding(tensor=1, expert=7), r"experts 384 % 7 = 6"),
        (K26, Sharding(tensor=128), r"heads 64 % 128 = 64"),
    ],
)
def test_what_does_not_divide_is_named_with_its_remainder(model, sharding, message):
    with pytest.raises(ConfigError, match=message):
        check_divides(model, sharding)


def test_a_rank_keeps_whole_scale_groups():
    narrow = K26.model_copy(update={"moe": K26.moe.model_copy(update={"ffn": 64}), "heads": 64})
    check_divides(narrow, Sharding(tensor=2))
    with pytest.raises(ConfigError, match=r"expert width 16 per rank .* scale group 32"):
        check_divides(narrow, TP4)
    check_divides(narrow, Sharding(tensor=4, expert=4))


def test_expert_ranks_are_whole_tensor_groups():
    with pytest.raises(ValidationError, match="12 expert ranks are no multiple of 8"):
        Sharding(tensor=8, expert=12)
