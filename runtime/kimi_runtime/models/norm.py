"""RMS normalisation and SiLU, computed so that an element's bits depend on its row alone."""

import torch
from torch import Tensor


class RmsNorm:
    """x [..., K] -> weight * x / rms(x), in fp32, rounded to x's dtype before the weight.

    The order of the last rounding is that of Hugging Face's modules.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        """Same shape and dtype as x."""
        wide = x.to(torch.float32, copy=True)
        scale = mean_square(wide).add_(self._eps).rsqrt_()
        return wide.mul_(scale).to(x.dtype).mul_(self._weight)


def mean_square(x: Tensor) -> Tensor:
    """x [..., K] in fp32 -> [..., 1]."""
    if x.device.type != "cpu":
        return folded_sum(x * x).div_(x.shape[-1])
    # one pass, in an order that follows from K as that of `row_sum` does
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1])


def row_sum(x: Tensor) -> Tensor:
    """x [..., K] -> [..., 1], added in an order that depends on K alone.

    The CPU's reduction over a contiguous last axis has such an order; a GPU's is chosen by the
    number of rows too, so there the halves are added instead.
    """
    return x.sum(dim=-1, keepdim=True) if x.device.type == "cpu" else folded_sum(x)


def folded_sum(x: Tensor) -> Tensor:
    """x [..., K] -> [..., 1], the second half added to the first until one element is left."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        if x.shape[-1] % 2:
            folded = torch.cat((folded, x[..., -1:]), dim=-1)
        x = folded
    return x


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) in x's dtype, for fp32.

    `torch.sigmoid` rounds the last elements of an array, and of a thread's share of one, otherwise
    than the rest; its `exp` does not.
    """
    return torch.neg(x).exp_().add_(1.0).reciprocal_()


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2 F] -> silu(gate) * up [..., F], in fp32, rounded once."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.float()
    return sigmoid(gate).mul_(gate).mul_(up).to(gate_up.dtype)
