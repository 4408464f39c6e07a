"""Elementwise layers with their derivatives written out: a third of the passes over memory.

On a CPU a small model's time goes into such passes, not into products.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kimi_runtime.kernels.mxfp4 import dequantise_mxfp4, quantise_mxfp4_ref


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.rsqrt(size.square() / x.shape[-1] + eps)
        normed = (x * scale).to(x.dtype)
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        wide = (grads[0] * weight).float()
        along = (wide * normed).mean(-1, keepdim=True)
        grad = (wide - normed * along) * scale
        return grad.to(normed.dtype), (grads[0] * normed).flatten(0, -2).sum(0), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / rms(x) over the last axis, rounded to x's dtype before the weight."""
    result: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return result


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        ctx.save_for_backward(gate_up)
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_up)
        ahead, behind = result.chunk(2, dim=-1)
        ahead.copy_(torch.ops.aten.silu_backward(grads[0] * up, gate))
        torch.mul(grads[0], functional.silu(gate), out=behind)
        return result


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2 F] -> silu(first half) * second half [..., F]."""
    result: Tensor = _SwiGlu.apply(gate_up)  # type: ignore[no-untyped-call]
    return result


def through_mxfp4(weight: Tensor) -> Tensor:
    """weight [..., K] fp32, K a multiple of 32 -> the value it has once saved as MXFP4, fp32.

    The caller gives the gradient at the result to the weight as it is: the straight-through
    estimator (Bengio et al., arXiv 1308.3432).
    """
    return dequantise_mxfp4(quantise_mxfp4_ref(weight))
