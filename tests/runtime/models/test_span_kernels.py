"""Both ways of computing a span: the same values, and rows that do not feel each other."""

import pytest
import torch

from kimi_runtime.models import fused_spans
from kimi_runtime.models.attention import open_kernel
from kimi_runtime.models.fused_spans import FusedSpans
from kimi_runtime.models.tiled_spans import TiledSpans

HEADS, ROW_DIM, SCALE = 4, 576, 0.1


def fused(like, promise):
    kernel = FusedSpans.of(HEADS, ROW_DIM, SCALE, like=like, promise=promise)
    assert kernel is not None
    return kernel


def tiled(like, promise):
    return TiledSpans(heads=HEADS, row_dim=ROW_DIM, scale=SCALE, like=like, promise=promise)


KERNELS = pytest.mark.parametrize("make", [fused, tiled])


def operands(groups, queries, width, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(groups, queries, ROW_DIM, generator=generator).to(dtype)
    rows = torch.randn(groups, width, ROW_DIM, generator=generator).to(dtype)
    bias = torch.zeros(1, queries, width)
    bias.masked_fill_(torch.rand(bias.shape, generator=generator) < 0.3, -torch.inf)
    bias[..., 0] = 0
    return q, rows, bias.to(dtype)


@KERNELS
@pytest.mark.parametrize("groups", [1, 3])
def test_means_and_log_sums_are_those_of_fp64(make, groups):
    q, rows, bias = operands(groups, 20, 192, torch.float32)
    kernel = make(q, False)
    scores = SCALE * q.double() @ rows.double().mT + bias.double()
    mean, log_sum = kernel(q, rows, bias)
    torch.testing.assert_close(mean.double(), scores.softmax(-1) @ rows.double(), atol=1e-5, rtol=0)
    want = scores.logsumexp(-1, keepdim=True)
    torch.testing.assert_close(log_sum.double(), want, atol=1e-5, rtol=0)


@KERNELS
def test_a_history_beside_others_and_in_any_width_gives_the_same_bits(make):
    like = torch.zeros(1, dtype=torch.bfloat16)
    kernel = make(like, True)
    full = kernel.geometry.tokens
    q, rows, _ = operands(3, HEADS, full, torch.bfloat16)
    for width in kernel.geometry.widths:
        bias = torch.zeros(3, 1, full, dtype=torch.bfloat16)
        bias[..., width:] = -torch.inf
        want = kernel(q, rows, bias)
        narrow = kernel(q, rows[:, :width].contiguous(), None)
        alone = kernel(q[1:2], rows[1:2], bias[1:2])
        for one, other, third in zip(want, narrow, alone, strict=True):
            assert torch.equal(one, other), width
            assert torch.equal(one[1:2], third), width


@KERNELS
def test_a_query_among_many_of_its_history_gives_the_same_bits(make):
    like = torch.zeros(1, dtype=torch.bfloat16)
    kernel = make(like, True)
    q, rows, bias = operands(1, 40 * HEADS, kernel.geometry.tokens, torch.bfloat16)
    want = kernel(q, rows, bias)
    for first, last in ((0, 1), (5, 8), (7, 40)):
        part = slice(first * HEADS, last * HEADS)
        got = kernel(q[:, part], rows, bias[:, part])
        assert all(torch.equal(a, b[:, part]) for a, b in zip(got, want, strict=True))


def test_a_library_without_the_function_computes_products(monkeypatch):
    monkeypatch.setattr(fused_spans, "_KERNEL", "no_such_operator")
    like = torch.zeros(1, dtype=torch.bfloat16)
    kernel = open_kernel(heads=HEADS, row_dim=ROW_DIM, scale=SCALE, like=like, promise=False)
    assert isinstance(kernel, TiledSpans)
