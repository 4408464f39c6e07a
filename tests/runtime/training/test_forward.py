"""What is trained is what is served: the same logits from the same weights."""

import pytest

torch = pytest.importorskip("torch")

from kimi_runtime.models.k2 import K2Model
from kimi_runtime.models.weights import load_weights, random_weights
from kimi_runtime.spec.config_file import load_config
from kimi_runtime.spec.model import KIMI_NANO
from kimi_runtime.training.autograd import rms_norm, swiglu
from kimi_runtime.training.export import write_model
from kimi_runtime.training.model import TrainingK2
from kimi_runtime.training.weights import gradients_of, leaves_of, masters_of, tensors_of
from tiny_k2 import all_logits, model_of, random_ids, tiny_spec

SPECS = {"tiny": tiny_spec(), "three layers, two dense": tiny_spec(layers=3, first_dense_layers=2)}


def training_logits(spec, masters, ids, *, dtype, quantise=False):
    model = TrainingK2(spec, positions=len(ids), dtype=dtype)
    leaves = leaves_of(masters, dtype, quantise=quantise)
    with torch.no_grad():
        hidden, _ = model.hidden(leaves, torch.tensor(ids)[None])
        return model.logits(leaves, hidden)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_fp32_logits_equal_the_engine_s(spec):
    engine, weights = model_of(spec, dtype=torch.float32)
    ids = random_ids(120, seed=1)
    got = training_logits(spec, masters_of(spec, weights), ids, dtype=torch.float32)
    torch.testing.assert_close(got, all_logits(engine, ids), atol=2e-3, rtol=1e-4)


def test_sequences_of_a_batch_do_not_see_each_other():
    spec = tiny_spec()
    _, weights = model_of(spec, dtype=torch.float32)
    masters = masters_of(spec, weights)
    model = TrainingK2(spec, positions=64, dtype=torch.float32)
    leaves = leaves_of(masters, torch.float32, quantise=False)
    rows = [random_ids(64, seed=seed) for seed in (1, 2, 3)]
    with torch.no_grad():
        together, _ = model.hidden(leaves, torch.tensor(rows))
        for row, hidden in zip(rows, together.view(3, 64, -1), strict=True):
            alone, _ = model.hidden(leaves, torch.tensor([row]))
            torch.testing.assert_close(alone, hidden, atol=1e-4, rtol=1e-4)


def test_what_was_saved_is_served_as_it_was_trained(tmp_path):
    masters = masters_of(KIMI_NANO, random_weights(KIMI_NANO, 4).tensors)
    folder = tmp_path / "kimi-nano"
    size = write_model(KIMI_NANO, masters, folder)
    assert size <= 12_000_000
    spec = load_config(folder)
    plain = spec.model_copy(update={"quantisation": None})
    assert plain == KIMI_NANO
    loaded = load_weights(spec, folder)
    engine = K2Model(spec, loaded.tensors)
    ids = random_ids(100, seed=2)
    served = all_logits(engine, ids)
    trained = training_logits(KIMI_NANO, masters, ids, dtype=torch.bfloat16, quantise=True)
    cosine = torch.nn.functional.cosine_similarity(served, trained)
    # where two experts are all but equal, the last bit decides which one a token goes to
    assert float((cosine > 0.99).float().mean()) > 0.9
    unquantised = training_logits(KIMI_NANO, masters, ids, dtype=torch.bfloat16)
    apart = torch.nn.functional.cosine_similarity(served, unquantised)
    assert float(cosine.mean()) > float(apart.mean())


def test_masters_and_checkpoint_are_two_forms_of_one_thing():
    tensors = random_weights(KIMI_NANO, 4).tensors
    again = tensors_of(KIMI_NANO, masters_of(KIMI_NANO, tensors))
    assert list(again) == list(tensors)
    assert all(torch.equal(again[name], tensors[name].float()) for name in tensors)


def test_each_master_gets_its_own_part_of_a_leaf_s_gradient():
    spec = tiny_spec()
    masters = masters_of(spec, random_weights(spec, 1).tensors)
    leaves = leaves_of(masters, torch.float32, quantise=False)
    for leaf in leaves.values():
        if leaf.requires_grad:
            (leaf.square() / 2).sum().backward()  # the gradient is the value itself
    gradients = gradients_of(masters, leaves)
    assert set(gradients) == {name for name in masters if not name.endswith("router_bias")}
    assert all(torch.equal(gradients[name], masters[name]) for name in gradients)


def test_derivatives_written_out_are_the_derivatives():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 8, generator=generator, dtype=torch.float32, requires_grad=True)
    weight = torch.randn(8, generator=generator, dtype=torch.float32, requires_grad=True)

    def plain_norm(x, weight):
        return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)

    def plain_swiglu(x):
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    for ours, plain, inputs in (
        (lambda x, w: rms_norm(x, w, 1e-5), plain_norm, (x, weight)),
        (swiglu, plain_swiglu, (x,)),
    ):
        seen = torch.randn(ours(*inputs).shape, generator=generator)
        got = torch.autograd.grad(ours(*inputs), inputs, seen)
        want = torch.autograd.grad(plain(*inputs), inputs, seen)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
