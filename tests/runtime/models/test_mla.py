import pytest
import torch

from k2_reference import attention as reference_attention
from kimi_runtime.models.rows import padded_rows
from tiny_k2 import Run, cache_of, model_of, tiny_spec

CASES = {
    "4 heads": tiny_spec(),
    "8 heads": tiny_spec(heads=8),
    "12 heads": tiny_spec(heads=12),
    "no low-rank queries": tiny_spec(q_lora_rank=None),
    "no rotation": tiny_spec(rope=None),
    "latent of 96": tiny_spec(kv_lora_rank=96),
}


def absorbed(model, x, *, start=0, cache=None):
    """The first layer's attention for tokens from `start` on, through the paged cache."""
    cache = cache_of(model, 16, fill=torch.nan) if cache is None else cache
    run = Run(start, (0,) * len(x), tuple(range(16)))
    step = model.step_builder(cache).build([run], padded_rows(len(x)))
    padded = torch.zeros(padded_rows(len(x)), x.shape[1], dtype=x.dtype)
    padded[: len(x)] = x
    layer = model.layers[0].attention
    return layer(padded, step, model.angles(step.positions), cache, 0)[: len(x)]


@pytest.mark.parametrize("spec", CASES.values(), ids=CASES)
def test_absorbed_equals_expanded_past_the_original_positions(spec):
    model, _ = model_of(spec, dtype=torch.float32)
    x = torch.randn(600, spec.hidden, generator=torch.Generator().manual_seed(1))
    want = model.layers[0].attention.expanded(x, model.angles(torch.arange(600)))
    got = absorbed(model, x)
    assert float(want.std()) > 0.05
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spec", CASES.values(), ids=CASES)
def test_attention_equals_an_independent_fp64_implementation(spec):
    model, weights = model_of(spec, dtype=torch.float32)
    x = torch.randn(70, spec.hidden, generator=torch.Generator().manual_seed(2))
    own = {
        name.removeprefix("model.layers.0."): value.double().numpy()
        for name, value in weights.items()
        if name.startswith("model.layers.0.")
    }
    want = torch.from_numpy(reference_attention(spec, own, x.double().numpy()))
    torch.testing.assert_close(absorbed(model, x).double(), want, atol=2e-5, rtol=1e-4)


def test_permuting_heads_in_every_projection_changes_nothing():
    spec = tiny_spec(heads=8)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    model, weights = model_of(spec, dtype=torch.float32)
    permuted = dict(weights)
    prefix = "model.layers.0.self_attn."
    for name in ("q_b_proj.weight", "kv_b_proj.weight"):
        matrix = weights[prefix + name]
        permuted[prefix + name] = matrix.view(8, -1, matrix.shape[1])[order].flatten(0, 1)
    out = weights[prefix + "o_proj.weight"].view(spec.hidden, 8, -1)
    permuted[prefix + "o_proj.weight"] = out[:, order].flatten(1)
    other = type(model)(spec, permuted)
    x = torch.randn(40, spec.hidden, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(absorbed(other, x), absorbed(model, x), atol=1e-5, rtol=1e-5)


def test_a_token_alone_attends_to_what_earlier_steps_cached():
    spec = tiny_spec()
    model, _ = model_of(spec, dtype=torch.float32)
    x = torch.randn(300, spec.hidden, generator=torch.Generator().manual_seed(5))
    want = model.layers[0].attention.expanded(x, model.angles(torch.arange(300)))
    cache = cache_of(model, 16, fill=torch.nan)
    parts = [absorbed(model, x[:290], cache=cache)]
    parts += [absorbed(model, x[i : i + 1], start=i, cache=cache) for i in range(290, 300)]
    torch.testing.assert_close(torch.cat(parts), want, atol=1e-5, rtol=1e-5)


def test_the_cached_row_is_the_normed_latent_and_the_rotated_key():
    spec = tiny_spec()
    model, weights = model_of(spec, dtype=torch.float32)
    cache = cache_of(model, 16)
    x = torch.randn(3, spec.hidden, generator=torch.Generator().manual_seed(6))
    absorbed(model, x, cache=cache)
    row = cache.read(0, torch.tensor([0]), 1)[0, 0]
    down = weights["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] @ x[0]
    assert row.shape == (576,)
    torch.testing.assert_close(row[512:], down[512:])  # position 0 is not turned
    normed = down[:512] / (down[:512].square().mean() + spec.latent_norm_eps).sqrt()
    gain = weights["model.layers.0.self_attn.kv_a_layernorm.weight"]
    torch.testing.assert_close(row[:512], normed * gain)
