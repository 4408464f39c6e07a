import numpy as np
import pytest
import torch

from k2_reference import experts as reference_experts
from k2_reference import route as reference_route
from kimi_runtime.models.linear import LinearFactory
from kimi_runtime.models.moe import AllExperts, MixtureOfExperts, Router, SortedExperts
from kimi_runtime.models.weights import random_weights
from kimi_runtime.spec.model import MoeSpec
from tiny_k2 import tiny_spec

PLAIN = MoeSpec(experts=8, top_k=2, shared=1, ffn=64, scaling=2.827)
GROUPED = MoeSpec(experts=16, top_k=3, shared=1, ffn=64, scaling=2.5, groups=4, top_groups=2)
MOES = {
    "plain": PLAIN,
    "grouped": GROUPED,
    "no shared": PLAIN.model_copy(update={"shared": 0}),
    "weights as they are": PLAIN.model_copy(update={"renormalise": False}),
    "384 experts": MoeSpec(experts=384, top_k=8, shared=1, ffn=32, scaling=2.827),
    "896 experts": MoeSpec(experts=896, top_k=16, shared=2, ffn=32, scaling=1.0),
}


def layer_weights(moe, dtype=torch.float32):
    spec = tiny_spec(moe=moe)
    prefix = "model.layers.1.mlp."
    return spec, {
        name.removeprefix(prefix): value if name.endswith("bias") else value.to(dtype)
        for name, value in random_weights(spec, 0).tensors.items()
        if name.startswith(prefix)
    }


def tokens(count, seed=0):
    return torch.randn(count, 128, generator=torch.Generator().manual_seed(seed))


def as_reference(weights):
    return {f"mlp.{name}": value.double().numpy() for name, value in weights.items()}


@pytest.mark.parametrize("moe", MOES.values(), ids=MOES)
def test_experts_and_weights_are_those_of_an_independent_implementation(moe):
    spec, weights = layer_weights(moe)
    factory = LinearFactory(promise=True)
    bias = weights["gate.e_score_correction_bias"]
    chosen, shares = Router(moe, weights["gate.weight"], bias, factory)(tokens(40))
    for row, x in enumerate(tokens(40)):
        want, want_shares = reference_route(spec, as_reference(weights), x.double().numpy())
        assert chosen[row].tolist() == want
        np.testing.assert_allclose(shares[row].numpy(), want_shares, rtol=1e-5)


@pytest.mark.parametrize("moe", MOES.values(), ids=MOES)
def test_the_mixture_equals_an_independent_implementation(moe):
    spec, weights = layer_weights(moe)
    x = tokens(24, seed=1)
    got = MixtureOfExperts(moe, weights, LinearFactory(promise=False))(x, tokens=21)
    for row in range(21):
        want = reference_experts(spec, as_reference(weights), x[row].double().numpy())
        np.testing.assert_allclose(got[row].numpy(), want, atol=2e-5, rtol=1e-4)


def narrow_biases():
    """Biases near 1 that differ by less than a bf16 step (2**-7), all scores equal."""
    weight = torch.zeros(8, 128)
    bias = 1.0 + torch.tensor([0, 3, 1, 7, 2, 6, 5, 4], dtype=torch.float32) * 2.0**-12
    return weight, bias


def test_the_bias_orders_experts_by_less_than_a_bf16_step():
    weight, bias = narrow_biases()
    chosen, _ = Router(PLAIN, weight, bias, LinearFactory(promise=False))(tokens(3))
    assert chosen.tolist() == [[3, 5]] * 3


def test_a_bias_that_went_through_bf16_chooses_other_experts():
    weight, bias = narrow_biases()
    mutated = bias.bfloat16().float()
    chosen, _ = Router(PLAIN, weight, mutated, LinearFactory(promise=False))(tokens(3))
    assert chosen.tolist() == [[0, 1]] * 3  # all equal now: the lowest numbers


def test_a_bias_allocated_in_bf16_is_refused():
    weight, bias = narrow_biases()
    with pytest.raises(TypeError, match="fp32 from its allocation on"):
        Router(PLAIN, weight, bias.bfloat16(), LinearFactory(promise=False))


def test_the_bias_chooses_but_is_in_no_weight():
    weight = torch.zeros(8, 128)
    bias = torch.zeros(8)
    bias[6], bias[2] = 5.0, 3.0
    chosen, shares = Router(PLAIN, weight, bias, LinearFactory(promise=False))(tokens(1))
    assert chosen.tolist() == [[6, 2]]
    assert shares[0].tolist() == pytest.approx([2.827 / 2] * 2)


@pytest.mark.parametrize("step", [0.0, 2.0**-25, 2.0**-24, 2.0**-20])
def test_near_ties_are_decided_in_fp32_and_ties_by_the_lower_number(step):
    weight = torch.zeros(8, 128)
    bias = torch.zeros(8)
    bias[5] = step
    for dtype in (torch.float32, torch.bfloat16):
        router = Router(PLAIN, weight.to(dtype), bias, LinearFactory(promise=False))
        # 0.5 + 2**-25 rounds to 0.5 in fp32: a tie again
        assert router(tokens(1).to(dtype))[0].tolist() == [[5, 0] if step >= 2**-24 else [0, 1]]


def test_groups_mask_experts_that_would_have_been_chosen():
    weight = torch.zeros(16, 128)
    bias = torch.zeros(16)
    bias[0] = 1.0  # the best expert, alone in its group
    bias[[5, 6]] = 0.8
    bias[[9, 10]] = 0.7
    chosen, _ = Router(GROUPED, weight, bias, LinearFactory(promise=False))(tokens(1))
    assert chosen.tolist() == [[5, 6, 9]]


@pytest.mark.parametrize("count", [1, 2, 3, 17, 64])
def test_experts_without_tokens_are_left_out(count):
    _, weights = layer_weights(PLAIN, torch.bfloat16)
    weights["gate.e_score_correction_bias"][:] = 0
    weights["gate.e_score_correction_bias"][[1, 4]] = 10.0  # everyone goes to these two
    mixture = MixtureOfExperts(PLAIN, weights, LinearFactory(promise=True))
    x = tokens(count, seed=2).bfloat16()
    chosen, _ = mixture.router(x)
    assert chosen.unique().tolist() == [1, 4]
    got = mixture(x, count)
    alone = torch.cat([mixture(x[i : i + 1], 1) for i in range(count)])
    assert torch.equal(got, alone)


def test_a_row_is_bitwise_the_same_whoever_shares_its_experts():
    _, weights = layer_weights(PLAIN, torch.bfloat16)
    mixture = MixtureOfExperts(PLAIN, weights, LinearFactory(promise=True))
    x = tokens(192, seed=3).bfloat16()
    full = mixture(x, 192)
    for rows in (1, 5, 40, 100):
        order = torch.randperm(192, generator=torch.Generator().manual_seed(rows))[:rows]
        assert torch.equal(mixture(x[order], rows), full[order])


@pytest.mark.parametrize("rows", [8, 24, 64])
def test_all_experts_at_once_give_the_bits_of_each_alone(rows):
    _, weights = layer_weights(PLAIN, torch.bfloat16)
    factory = LinearFactory(promise=True)
    at_once = AllExperts.of(PLAIN, weights, factory)
    assert at_once is not None
    x = tokens(rows, seed=4).bfloat16()
    chosen = torch.randint(8, (rows, 2), generator=torch.Generator().manual_seed(rows))
    assert torch.equal(at_once(x, chosen), SortedExperts(PLAIN, weights, factory)(x, chosen))


def test_experts_too_large_to_be_kept_twice_are_computed_one_by_one():
    moe = MOES["384 experts"]
    _, weights = layer_weights(moe, torch.bfloat16)
    assert AllExperts.of(moe, weights, LinearFactory(promise=True)) is None
