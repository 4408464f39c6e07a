import mmap

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="kernels need Triton: pip install kimistack[kernels]")

from kimi_runtime.kernels.mxfp4 import Mxfp4, dequantise_mxfp4, quantise_mxfp4_ref
from kimi_runtime.kernels.mxfp4_gemm import gemm_tiles, mxfp4_gemm, mxfp4_gemm_ref
from kimi_runtime.kernels.mxfp8 import dequantise_mxfp8, quantise_mxfp8_ref
from kimi_runtime.kernels.sort_experts import sort_experts
from kimi_runtime.kernels.tolerance import mismatch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXPERTS, N, K, CHOSEN = 6, 80, 160, 2  # neither N nor K is a multiple of a tile

FORMATS = {"bf16": lambda x: x, "mxfp8": quantise_mxfp8_ref, "mxfp4": quantise_mxfp4_ref}
ROUTES = {
    "spread": lambda tokens: torch.arange(tokens * CHOSEN).view(tokens, CHOSEN) % EXPERTS,
    "all to one expert": lambda tokens: torch.full((tokens, CHOSEN), 4),
    "experts without tokens": lambda tokens: torch.arange(tokens * CHOSEN).view(-1, CHOSEN) % 2 * 5,
    "padded tokens": lambda tokens: torch.arange(tokens)[:, None].expand(-1, CHOSEN) % 3 - 1,
}


def weights(experts: int = EXPERTS) -> Mxfp4:
    generator = torch.Generator().manual_seed(1)
    made = quantise_mxfp4_ref(torch.randn(experts, N, K, generator=generator) / K**0.5)
    return Mxfp4(made.codes.to(DEVICE), made.scales.to(DEVICE))


def tokens_of(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, K, generator=generator).bfloat16().to(DEVICE)


def plan_for(x, ids: torch.Tensor, experts: int = EXPERTS):
    tile_m = gemm_tiles(x, DEVICE, ids.numel(), experts)["TILE_M"]
    return sort_experts(ids.to(DEVICE), experts, tile_m)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("tokens", "route"),
    [*((tokens, "spread") for tokens in (1, 3, 4, 17, 64)), *((5, route) for route in ROUTES)],
)
def test_the_kernel_is_the_reference(tokens, kind, route):
    x = FORMATS[kind](tokens_of(tokens))
    plan = plan_for(x, ROUTES[route](tokens))
    out = torch.full((tokens * CHOSEN, N), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    assert mxfp4_gemm(x, weights(), plan, out=out) is out
    assert mismatch(out, mxfp4_gemm_ref(x, weights(), plan)) is None


@pytest.mark.parametrize("kind", FORMATS)
def test_the_reference_is_the_formula_in_fp64(kind):
    x = FORMATS[kind](tokens_of(9))
    exact = {"mxfp8": dequantise_mxfp8, "mxfp4": dequantise_mxfp4}.get(kind, lambda x: x)(x)
    ids = ROUTES["spread"](9)
    dense = dequantise_mxfp4(weights()).double()
    expected = torch.stack(
        [dense[e] @ exact[t].double() for t in range(9) for e in ids[t].tolist()]
    )
    got = mxfp4_gemm_ref(x, weights(), plan_for(x, ids))
    assert mismatch(got, expected.bfloat16()) is None


def test_one_row_a_slot_is_the_second_projection():
    ids = ROUTES["spread"](5)
    x = tokens_of(5 * CHOSEN)
    plan = plan_for(x, ids)
    y = mxfp4_gemm(x, weights(), plan)
    assert mismatch(y, mxfp4_gemm_ref(x, weights(), plan)) is None
    alone = mxfp4_gemm_ref(x[3:4], weights(), plan_for(x[3:4], ids.view(-1, 1)[3:4]))
    assert torch.equal(mxfp4_gemm_ref(x, weights(), plan)[3:4], alone)


@pytest.mark.parametrize("kind", FORMATS)
def test_nan_stays_in_its_row_and_padded_tokens_are_zero(kind):
    dense = tokens_of(4)
    dense[1], dense[2] = torch.nan, torch.nan
    ids = torch.tensor([[0, 1], [-1, EXPERTS], [1, 0], [0, 1]])
    x = FORMATS[kind](dense)
    for gemm in (mxfp4_gemm, mxfp4_gemm_ref):
        per_token = gemm(x, weights(), plan_for(x, ids)).view(4, CHOSEN, N)
        assert (per_token[1] == 0).all()
        assert per_token[2].isnan().all()
        assert per_token[[0, 3]].isfinite().all()


def test_a_nan_scale_of_a_weight_makes_its_output_nan():
    w = weights()
    w.scales[2, 7, 1] = 0xFF
    for kind, quantise in FORMATS.items():
        x = quantise(tokens_of(2))
        plan = plan_for(x, torch.tensor([[2], [1]]))
        y = mxfp4_gemm(x, w, plan)
        assert y.isnan().nonzero().tolist() == [[0, 7]], kind


def test_more_than_512_experts_are_told_apart():
    experts = 896
    w = weights(1)
    many = Mxfp4(*(part.expand(experts, -1, -1).contiguous() for part in w))
    many.scales[895] += 1  # twice the others
    x = tokens_of(1)
    plan = plan_for(x, torch.tensor([[513, 895]]), experts)
    y = mxfp4_gemm(x, many, plan)
    assert mismatch(y, mxfp4_gemm_ref(x, many, plan)) is None
    assert torch.equal(y[0] * 2, y[1])


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the memory is only reserved, not held")
def test_an_expert_past_two_gib_is_found():
    near, stride = weights(3), 2**30 + 2**20
    memory = mmap.mmap(-1, 2 * stride + N * K // 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    far = torch.frombuffer(memory, dtype=torch.uint8).as_strided(
        near.codes.shape, (stride, K // 2, 1)
    )
    far[2].copy_(near.codes[2])
    assert 2 * stride > 2**31
    x = tokens_of(3)
    plan = plan_for(x, torch.full((3, 1), 2), 3)
    y = mxfp4_gemm(x, Mxfp4(far, near.scales), plan)
    assert mismatch(y, mxfp4_gemm_ref(x, near, plan)) is None


def test_no_tokens_give_no_rows():
    x = tokens_of(0)
    plan = plan_for(x, torch.empty(0, CHOSEN, dtype=torch.int64))
    assert mxfp4_gemm(x, weights(), plan).shape == (0, N)
    assert mxfp4_gemm_ref(x, weights(), plan).shape == (0, N)


def test_shapes_that_do_not_meet_are_refused():
    ids = ROUTES["spread"](3)
    x, w = tokens_of(3), weights()
    plan = plan_for(x, ids)
    wrong = [
        (x.float(), w, plan, "dtype"),
        (x[:, :128].contiguous(), w, plan, "128 inputs meet weights"),
        (x, Mxfp4(w.codes, w.scales[:, :, :-1]), plan, "are wanted"),
        (tokens_of(4), w, plan, "6 slots do not share 4 rows"),
    ]
    for x_, w_, plan_, message in wrong:
        for gemm in (mxfp4_gemm, mxfp4_gemm_ref):
            with pytest.raises(ValueError, match=message):
                gemm(x_, w_, plan_)
    with pytest.raises(ValueError, match="blocks of 1 rows"):
        mxfp4_gemm(x, w, sort_experts(ids.to(DEVICE), EXPERTS, tile_m=1))
