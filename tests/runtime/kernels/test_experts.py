import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="kernels need Triton: pip install kimistack[kernels]")

from kimi_runtime.kernels.experts import experts, experts_ref, silu_mul
from kimi_runtime.kernels.mxfp4 import Mxfp4, dequantise_mxfp4, quantise_mxfp4_ref
from kimi_runtime.kernels.tolerance import mismatch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Where the first product lands on the neighbouring bf16 value (Triton's interpreter cuts fp32 to
# bf16 instead of rounding, so half of them do), its activation may round to the neighbouring code.
QUANTUM = {"bf16": 2**-6, "mxfp8": 2**-5, "mxfp4": 2**-4}
EXPERTS, HIDDEN, INNER, CHOSEN = 5, 96, 64, 3


def layer() -> tuple[Mxfp4, Mxfp4]:
    generator = torch.Generator().manual_seed(2)

    def matrix(rows: int, columns: int) -> Mxfp4:
        dense = torch.randn(EXPERTS, rows, columns, generator=generator) / columns**0.5
        made = quantise_mxfp4_ref(dense)
        return Mxfp4(made.codes.to(DEVICE), made.scales.to(DEVICE))

    return matrix(2 * INNER, HIDDEN), matrix(HIDDEN, INNER)


def routed(tokens: int):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(dim=1)[:, :CHOSEN]
    scores = torch.rand(tokens, CHOSEN, generator=generator)
    return x.to(DEVICE), ids.to(DEVICE), scores.to(DEVICE)


@pytest.mark.parametrize("activations", ["bf16", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 17])
def test_the_kernels_give_what_the_references_say(tokens, activations):
    x, ids, scores = routed(tokens)
    w13, w2 = layer()
    chosen = {"act": silu_mul, "activations": activations}
    expected = experts_ref(x, ids, scores, w13, w2, **chosen)
    got = experts(x, ids, scores, w13, w2, **chosen)
    error = (got.float() - expected.float()).norm() / expected.float().norm()
    assert error < QUANTUM[activations]


def test_the_reference_is_the_formula():
    x, ids, scores = routed(7)
    w13, w2 = layer()
    up_gate, down = dequantise_mxfp4(w13).double(), dequantise_mxfp4(w2).double()
    expected = torch.zeros(7, HIDDEN, dtype=torch.float64, device=DEVICE)
    for token in range(7):
        for expert, score in zip(ids[token].tolist(), scores[token].tolist(), strict=True):
            gate, up = (up_gate[expert] @ x[token].double()).chunk(2)
            expected[token] += score * (down[expert] @ silu_mul(gate, up))
    got = experts_ref(x, ids, scores, w13, w2, act=silu_mul)
    assert (got.double() - expected).norm() < 0.01 * expected.norm()


def test_a_tokens_result_is_bitwise_the_same_in_any_batch():
    x, ids, scores = routed(24)
    w13, w2 = layer()
    together = experts_ref(x, ids, scores, w13, w2, act=silu_mul)
    for first, last in ((0, 1), (5, 6), (3, 20)):
        part = slice(first, last)
        apart = experts_ref(x[part], ids[part], scores[part], w13, w2, act=silu_mul)
        assert torch.equal(apart, together[part])


def test_slots_without_an_expert_add_nothing():
    x, ids, scores = routed(4)
    w13, w2 = layer()
    x[2], ids[2], scores[2] = torch.nan, -1, torch.nan  # a padded token
    ids[1, 0] = EXPERTS  # an expert of another rank
    for run in (experts, experts_ref):
        out = run(x, ids, scores, w13, w2, act=silu_mul)
        assert (out[2] == 0).all()
        assert out.isfinite().all()
    two = experts_ref(x[1:2], ids[1:2, 1:], scores[1:2, 1:], w13, w2, act=silu_mul)
    assert mismatch(experts_ref(x, ids, scores, w13, w2, act=silu_mul)[1:2], two) is None


def test_the_activation_is_the_callers():
    x, ids, scores = routed(3)
    w13, w2 = layer()
    swiglu = experts_ref(x, ids, scores, w13, w2, act=silu_mul)
    other = experts_ref(x, ids, scores, w13, w2, act=lambda gate, up: torch.tanh(gate) * up)
    assert not torch.equal(swiglu, other)
