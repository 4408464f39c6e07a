import pytest

from kimi_runtime.spec.model import KIMI_NANO, ModelSpec
from kimi_runtime.spec.published import (
    K3,
    K25,
    K26,
    KIMI_LINEAR_48B,
    MOONVIT_K3,
    MXFP4_EXPERTS,
    QUARK_MXFP4,
    k2_0711,
    k31_pro,
)
from kimi_runtime.spec.sizes import (
    active_parameters,
    bytes_per_weight,
    conv_state_bytes,
    kda_state_bytes,
    kv_bytes_per_token,
    parameters,
    state_bytes,
    weight_bytes,
    weight_bytes_by_part,
)

K31 = k31_pro(
    tied_embeddings=False,
    bos_id=163_584,
    eos_ids=(163_586,),
    pad_id=163_839,
    quantisation=MXFP4_EXPERTS,
    vision=MOONVIT_K3,
)


@pytest.mark.parametrize(
    ("model", "bf16", "fp8"),
    [
        (K26, 70_272, 35_136),
        (K3, 27_648, 13_824),
        (KIMI_LINEAR_48B, 8_064, 4_032),
        (KIMI_NANO, 4 * 576 * 2, 4 * 576),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_kv_bytes_per_token_are_the_published_ones(model, bf16, fp8):
    assert kv_bytes_per_token(model, "bf16") == bf16
    assert kv_bytes_per_token(model, "fp8") == fp8


def test_k31_caches_index_keys_beside_its_rows():
    assert kv_bytes_per_token(K31, "fp8") == 16_992
    assert kv_bytes_per_token(K31, "fp8", index="fp4") == 15_456
    assert kv_bytes_per_token(K31, "bf16", index="bf16") == 24 * (576 + 128) * 2


def test_state_is_what_was_published_at_any_length():
    assert kda_state_bytes(K3) == 414 * 2**20
    assert kda_state_bytes(KIMI_LINEAR_48B) == 40 * 2**20
    assert conv_state_bytes(K3) == pytest.approx(14.6 * 2**20, rel=0.01)
    assert state_bytes(K3) == pytest.approx(428.6 * 2**20, rel=0.0005)
    assert state_bytes(K26) == 0


@pytest.mark.parametrize(("drafts", "mib"), [(0, 53.57), (2, 54.78), (7, 57.81)])
def test_a_tp8_rank_of_k3_holds_an_eighth_of_the_state(drafts, mib):
    assert state_bytes(K3, drafts=drafts) / 8 / 2**20 == pytest.approx(mib, abs=0.01)


def test_k3s_state_weighs_as_much_as_the_kv_of_31_thousand_tokens():
    assert kda_state_bytes(K3) // kv_bytes_per_token(K3, "fp8") == pytest.approx(31_000, rel=0.02)


@pytest.mark.parametrize(
    ("model", "total", "active"),
    [(K26, 1.04e12, 32e9), (K3, 2.78e12, 104e9), (KIMI_LINEAR_48B, 48e9, 3e9)],
    ids=["k2.6", "k3", "kimi-linear"],
)
def test_parameters_are_the_published_ones(model, total, active):
    assert parameters(model).total == pytest.approx(total, rel=0.025)
    assert active_parameters(model) == pytest.approx(active, rel=0.04)


def test_k2s_parts_are_those_of_a_published_prefill_budget():
    counts = parameters(K26)
    chosen = counts.routed_experts // 384 * 8
    figures = (counts.attention + counts.attention_down, chosen, counts.shared_experts)
    assert figures == pytest.approx((6.17e9, 21.1e9, 2.64e9), rel=0.003)
    assert (counts.router, counts.dense_ffn) == pytest.approx((0.165e9, 0.396e9), rel=0.003)


def test_k3s_count_equals_its_checkpoints_tensor_list_to_the_element():
    # The published index: 1,503,647,073,024 elements, where routed weights are packed two to a
    # byte with a scale byte per 32, and A_log has 128 entries for 96 heads on 69 layers.
    counts = parameters(K3)
    packed = counts.routed_experts // 2 + counts.routed_experts // 32
    padding = 69 * (128 - 96)
    assert counts.total - counts.routed_experts + packed + padding == 1_503_647_073_024


def test_the_vision_tower_has_400_million_parameters_and_a_projector():
    assert parameters(K25).vision == pytest.approx(0.47e9, rel=0.01)
    assert parameters(K3).vision * 2 == pytest.approx(0.9e9, rel=0.01)  # bytes in bf16
    assert parameters(KIMI_LINEAR_48B).vision == 0


def test_k31_adds_only_indexers():
    k3, k31 = parameters(K3), parameters(K31)
    assert k31.total - k3.total == k31.indexer
    one = 1536 * 32 * 128 + 7168 * 128 + 7168 * 32 + 2 * 128
    assert k31.indexer == 24 * one


def test_checkpoints_have_their_published_size():
    assert weight_bytes(K3) == pytest.approx(1453.66 * 2**30, rel=1e-4)  # "1453.66 GB" of 2^30
    assert weight_bytes(K26) == pytest.approx(595e9, rel=0.001)
    assert weight_bytes(k2_0711(norm_eps=1e-6)) == pytest.approx(1.03e12, rel=0.005)


def test_mxfp4_checkpoints_of_k25_have_their_published_size():
    amd = sum(weight_bytes_by_part(K25, QUARK_MXFP4).values())
    assert amd == pytest.approx(521 * 2**30, rel=0.001)  # published as "521 GB" in 2^30
    experts_only = sum(weight_bytes_by_part(K25, MXFP4_EXPERTS).values())
    assert experts_only == pytest.approx(562e9, rel=0.003)


def test_scales_are_part_of_a_weights_bytes():
    assert bytes_per_weight("int4", 32) == 0.5625
    assert bytes_per_weight("mxfp4", 32) == 0.53125
    assert bytes_per_weight("fp8_block", 128) == 1 + 4 / 16_384
    assert bytes_per_weight("fp8_channel", 1) == 1.0
    assert bytes_per_weight("bf16", 1) == 2.0


def test_one_routed_expert_of_k2_and_k3_has_its_published_bytes():
    per_expert = weight_bytes_by_part(K26, MXFP4_EXPERTS)["routed_experts"] / (60 * 384)
    assert per_expert == pytest.approx(23.396e6, rel=1e-4)
    per_expert = weight_bytes_by_part(K3, MXFP4_EXPERTS)["routed_experts"] / (92 * 896)
    assert per_expert == pytest.approx(17.55e6, rel=1e-3)


def test_attention_can_have_a_format_of_its_own():
    fp8 = QUARK_MXFP4.model_copy(update={"attention_format": "fp8_channel"})
    plain = weight_bytes_by_part(K25, QUARK_MXFP4)
    mixed = weight_bytes_by_part(K25, fp8)
    assert mixed["attention"] * 2 == plain["attention"]
    assert mixed["routed_experts"] == plain["routed_experts"]


def test_a_tied_head_is_counted_once():
    tied = ModelSpec.model_validate(KIMI_NANO.model_dump() | {"tied_embeddings": True})
    assert parameters(KIMI_NANO).total - parameters(tied).total == 2304 * 256
    assert active_parameters(tied) == active_parameters(KIMI_NANO)
