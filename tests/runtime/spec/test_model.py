import math

import pytest
from pydantic import ValidationError

from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.model import KIMI_NANO, KdaSpec, ModelSpec, MoeSpec
from kimi_runtime.spec.published import (
    K3,
    K25,
    K26,
    K27_CODE,
    KIMI_LINEAR_48B,
    PUBLISHED,
    k2_0711,
    k2_0905,
    k31_pro,
    published,
)


def changed(model, **fields):
    return ModelSpec.model_validate(model.model_dump() | fields)


def test_k3_has_full_attention_on_every_fourth_layer_and_the_last():
    one_based = [layer + 1 for layer in K3.full_attention_layers]
    assert one_based == [*range(4, 93, 4), 93]
    assert len(K3.kda_layers) == 69


def test_kimi_linear_has_twenty_kda_layers_of_twenty_seven():
    assert [layer + 1 for layer in KIMI_LINEAR_48B.full_attention_layers] == [
        4,
        8,
        12,
        16,
        20,
        24,
        27,
    ]
    assert len(KIMI_LINEAR_48B.kda_layers) == 20


def test_k2_has_full_attention_everywhere():
    assert K26.full_attention_layers == tuple(range(61))
    assert K26.kda_layers == ()


def test_every_layer_has_exactly_one_kind_of_attention():
    for model in PUBLISHED.values():
        both = sorted(model.full_attention_layers + model.kda_layers)
        assert both == list(range(model.layers)), model.name


def test_k2_generations_differ_only_where_published():
    first, second = k2_0711(norm_eps=1e-6), k2_0905(norm_eps=1e-6)
    assert (first.max_positions, second.max_positions) == (131_072, 262_144)
    assert (first.rope.yarn.factor, second.rope.yarn.factor) == (32.0, 64.0)
    assert K25.model_copy(update={"name": "x"}) == K27_CODE.model_copy(update={"name": "x"})


def test_yarn_context_is_factor_times_original_positions():
    for model in (K26, k2_0711(norm_eps=1e-5), KIMI_NANO):
        yarn = model.rope.yarn
        assert model.max_positions == yarn.factor * yarn.original_positions


def test_the_attention_scale_has_yarns_factor():
    # m^2 = 2.00474 for factor 64, as Hugging Face's DeepSeek-V3 attention computes it.
    assert K26.attention_scale * math.sqrt(192) == pytest.approx(2.00474, abs=5e-6)
    assert K3.attention_scale == 192**-0.5


def test_nano_keeps_the_official_order_of_special_tokens():
    official, ours = K26, KIMI_NANO
    ranks, our_ranks = official.vocab_size - 256, ours.vocab_size - 256
    assert ours.bos_id - our_ranks == official.bos_id - ranks == 0
    assert ours.eos_ids[0] - our_ranks == official.eos_ids[0] - ranks == 2
    assert ours.pad_id - our_ranks == official.pad_id - ranks == 255


def test_k31_is_k3_with_an_indexer_on_exactly_the_full_layers():
    model = k31_pro(
        tied_embeddings=False,
        bos_id=163_584,
        eos_ids=(163_586,),
        pad_id=163_839,
        quantisation=None,
        vision=None,
    )
    assert model.dsa.layers == K3.full_attention_layers
    assert (model.dsa.heads, model.dsa.head_dim, model.dsa.top_k) == (32, 128, 2048)
    same = {"hidden", "layers", "heads", "moe", "kda", "attn_res_block", "mla_output_gate", "rope"}
    assert all(getattr(model, name) == getattr(K3, name) for name in same)


def test_an_unknown_name_is_answered_with_the_known_ones():
    assert published("kimi-k3") is K3
    with pytest.raises(ConfigError, match=r"kimi-k4.*kimi-k2\.6, .*kimi-k3"):
        published("kimi-k4")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"first_dense_layers": 5}, "first_dense_layers 5 of only 4"),
        ({"bos_id": 2304}, "bos_id .* outside the vocabulary of 2304"),
        ({"eos_ids": (1, 9999)}, "eos_ids"),
        ({"eos_ids": ()}, "eos_ids"),
        ({"activation": "situ"}, "situ_beta"),
        ({"situ_beta": 4.0, "situ_linear_beta": 25.0}, "situ"),
        ({"qk_rope_dim": 63}, "odd"),
        ({"hidden": 0}, "hidden"),
        ({"kda": K3.kda}, r"kda\.layers names a layer beyond the 4"),
    ],
)
def test_dimensions_that_contradict_each_other_are_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        changed(KIMI_NANO, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 9}, "top_k 9 of only 8"),
        ({"groups": 3}, "8 experts do not divide into 3"),
        ({"groups": 4, "top_groups": 5}, "top_groups 5 of only 4"),
        ({"groups": 4, "top_groups": 1, "top_k": 3}, "top_k 3 of only 2 eligible"),
        ({"latent_norm": True}, "latent_norm needs latent"),
    ],
)
def test_a_router_cannot_choose_more_than_there_is(fields, message):
    with pytest.raises(ValidationError, match=message):
        MoeSpec.model_validate(
            {"experts": 8, "top_k": 2, "shared": 1, "ffn": 4, "scaling": 1} | fields
        )


def test_a_bounded_forget_gate_needs_its_bound_and_no_other_has_one():
    base = {"layers": (0,), "heads": 1, "head_dim": 8, "full_rank_output_gate": False}
    with pytest.raises(ValidationError, match="gate_lower_bound"):
        KdaSpec.model_validate(base | {"forget_gate": "lower_bound"})
    with pytest.raises(ValidationError, match="gate_lower_bound"):
        KdaSpec.model_validate(base | {"forget_gate": "softplus", "gate_lower_bound": -5.0})
    with pytest.raises(ValidationError, match="ascend"):
        KdaSpec.model_validate(base | {"forget_gate": "softplus", "layers": (1, 0)})
