import pytest
import torch

from k2_reference import reference_logits
from kimi_runtime.errors import ConfigError
from kimi_runtime.models.k2 import K2Model
from kimi_runtime.models.tensors import require_k2
from kimi_runtime.spec import published
from kimi_runtime.spec.model import MoeSpec
from tiny_k2 import all_logits, model_of, random_ids, tiny_spec

SPECS = {
    "tiny": tiny_spec(),
    "three layers, two dense": tiny_spec(layers=3, first_dense_layers=2),
    "12 heads, no low rank, no rotation": tiny_spec(heads=12, q_lora_rank=None, rope=None),
    "groups": tiny_spec(
        moe=MoeSpec(experts=8, top_k=2, shared=2, ffn=64, scaling=1.5, groups=4, top_groups=2)
    ),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_fp32_logits_equal_an_independent_fp64_implementation(spec):
    model, weights = model_of(spec, dtype=torch.float32)
    ids = random_ids(50, seed=1)
    numbers = {name: value.double().numpy() for name, value in weights.items()}
    want = torch.from_numpy(reference_logits(spec, numbers, ids))
    got = all_logits(model, ids).double()
    assert 1.0 < float(want.std()) < 6.0
    torch.testing.assert_close(got, want, atol=2e-3, rtol=1e-4)
    assert torch.equal(got.argmax(-1), want.argmax(-1))


def test_bf16_logits_stay_near_fp32():
    spec = tiny_spec()
    ids = random_ids(400, seed=2)
    wide = all_logits(model_of(spec, dtype=torch.float32)[0], ids)
    narrow = all_logits(model_of(spec)[0], ids)
    cosine = torch.nn.functional.cosine_similarity(wide, narrow)
    assert float(cosine.mean()) > 0.99


def test_a_token_far_back_changes_the_logits():
    model, _ = model_of(tiny_spec())
    ids = random_ids(500, seed=3)
    other = ((ids[0] + 1) % 320, *ids[1:])
    assert not torch.equal(all_logits(model, ids)[-1], all_logits(model, other)[-1])


def test_tied_embeddings_are_the_head():
    model, weights = model_of(tiny_spec(tied_embeddings=True), dtype=torch.float32)
    assert "lm_head.weight" not in weights
    untied = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    other = K2Model(tiny_spec(), untied)
    ids = random_ids(9, seed=4)
    torch.testing.assert_close(all_logits(model, ids), all_logits(other, ids))


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (published.K3, "kda"),
        (published.K26, "quantisation"),
        (published.KIMI_LINEAR_48B, "kimi_linear"),
    ],
)
def test_a_model_it_cannot_compute_is_refused_by_what_it_has(spec, names):
    with pytest.raises(ConfigError, match=names):
        require_k2(spec)
