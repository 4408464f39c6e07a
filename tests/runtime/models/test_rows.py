import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from kimi_runtime.models.linear import LinearFactory
from kimi_runtime.models.norm import RmsNorm, folded_sum, row_sum, sigmoid, silu_mul
from kimi_runtime.models.rows import (
    LADDER,
    NotInvariant,
    Tiles,
    cancelling,
    measure_tiles,
    padded_rows,
)


@given(st.integers(1, 5000), st.sets(st.sampled_from(LADDER), min_size=1))
@settings(max_examples=50, deadline=None)
def test_tiles_cover_the_rows_and_waste_less_than_the_smallest_tile_per_call(rows, sizes):
    tiles = Tiles(tuple(sorted(sizes)))
    cut = tiles.cut(rows)
    assert set(cut) <= sizes
    assert rows <= sum(cut)
    assert sum(cut) - min(cut) < rows


@given(st.integers(1, 3000))
@settings(max_examples=50, deadline=None)
def test_padding_reaches_the_next_row_count_of_the_ladder(rows):
    padded = padded_rows(rows)
    assert padded >= rows
    assert padded in LADDER or padded % LADDER[-1] == 0
    assert padded_rows(padded) == padded


def test_cancelling_operands_leave_nothing_but_rounding():
    x, w = cancelling(16, 512, 64)
    assert torch.equal(x, x.bfloat16().float())
    assert torch.equal(x.double() @ w.double().T, torch.zeros(16, 64, dtype=torch.float64))
    # bf16 products, fp32 sums: the residue is the order of additions, visible in most places
    assert (functional.linear(x.bfloat16(), w.bfloat16()) != 0).double().mean() > 0.7


def test_the_self_test_drops_a_row_count_that_adds_in_another_order():
    x, w = cancelling(LADDER[-1], 256, 32)

    def product(rows):
        if len(rows) >= 64:  # as a library that splits the inputs for many rows
            return rows[:, :100] @ w[:, :100].T + rows[:, 100:] @ w[:, 100:].T
        return torch.stack([row @ w.T for row in rows])

    assert max(measure_tiles(product, x, "a product").sizes) < 64


def test_a_product_whose_rows_feel_their_position_is_refused():
    x, w = cancelling(LADDER[-1], 256, 32)

    def product(rows):
        split = rows[:, :100] @ w[:, :100].T + rows[:, 100:] @ w[:, 100:].T
        return torch.cat((split[:1], torch.stack([row @ w.T for row in rows[1:]])))

    with pytest.raises(NotInvariant, match=r"a product on cpu .* differ by their position"):
        measure_tiles(product, x, "a product")


@pytest.fixture(params=[True, False], ids=["amx", "no amx"])
def amx(request, monkeypatch):
    """What the processor is taken for: bf16 products are computed otherwise on each."""
    able = {**torch.cpu.get_capabilities(), "architecture": "x86_64", "amx_bf16": request.param}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    return request.param


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((512, 96), torch.bfloat16),
        ((64, 512), torch.bfloat16),
        ((96, 640), torch.bfloat16),
        ((8, 128), torch.float32),
        ((6, 100), torch.float32),
    ],
    ids=str,
)
def test_a_linear_row_is_the_same_for_any_number_of_rows(shape, dtype, threads, amx):
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(7)
        weight = torch.randn(shape, generator=generator).to(dtype)
        x = torch.randn(520, shape[1], generator=generator).to(dtype)
        layer = LinearFactory(promise=True).linear(weight)
        full = layer(x)
        for rows in (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 40, 64, 65, 100, 200, 511, 513):
            assert torch.equal(layer(x[:rows].contiguous()), full[:rows]), rows
            assert torch.equal(layer(x[-rows:].contiguous()), full[-rows:]), rows
        assert torch.allclose(full.double(), x.double() @ weight.double().T, atol=0.5, rtol=0.05)
    finally:
        torch.set_num_threads(1)


class Multiplied(TorchDispatchMode):
    """Dtypes in which matrices are multiplied."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.bmm, torch.ops.mkldnn._linear_pointwise):
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_bf16_is_multiplied_in_fp32_on_a_processor_without_amx(amx):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(2, 96, 64, generator=generator).bfloat16()
    x = torch.randn(2, 24, 64, generator=generator).bfloat16()
    linears = LinearFactory(promise=False)
    linear, per_head = linears.linear(weight[0]), linears.per_head(weight.mT)
    with Multiplied() as multiplied:
        results = torch.stack((linear(x[0]), per_head(x)[1]))
    assert multiplied.dtypes == {torch.bfloat16 if amx else torch.float32}
    want = x.double() @ weight.double().mT
    torch.testing.assert_close(results.double(), want, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("width", [8, 96, 250, 512])
def test_elementwise_steps_round_alike_wherever_a_row_lies(width, threads):
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(300, width, generator=generator) * 4
        norm = RmsNorm(torch.ones(width), 1e-5)
        pairs = torch.cat((x, x.flip(1)), dim=1).bfloat16()
        for function, values in ((sigmoid, x), (row_sum, x), (norm, x), (silu_mul, pairs)):
            full = function(values)
            for first, last in ((0, 1), (5, 8), (17, 30), (100, 164), (299, 300)):
                assert torch.equal(function(values[first:last].contiguous()), full[first:last])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("width", [1, 2, 37, 64, 250])
def test_folding_adds_every_element_once(width):
    x = torch.arange(1.0, width + 1)[None].expand(3, -1)
    assert torch.equal(folded_sum(x), torch.full((3, 1), width * (width + 1) / 2))
