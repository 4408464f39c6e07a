"""Rotary positions with YaRN.

Source of the formulas: Peng et al., "YaRN" (arXiv 2309.00071), as DeepSeek-V2's and Kimi's
published configurations parameterise it.
"""

import math

import torch
from torch import Tensor

from kimi_runtime.spec.model import RopeSpec, YarnSpec


def frequencies(rope: RopeSpec, dim: int) -> Tensor:
    """Radians per position of each of the `dim / 2` pairs, fp64.

    Without YaRN theta^(-2i/dim). With it, pairs that turn more than `beta_fast` times within the
    original positions keep that; those that turn less than `beta_slow` times are slowed down by
    `factor`; between the two the share changes linearly with the pair's index.
    """
    base = rope.theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    yarn = rope.yarn
    if yarn is None:
        return base
    low = max(math.floor(_pair_turning(yarn.beta_fast, yarn, rope.theta, dim)), 0)
    high = min(math.ceil(_pair_turning(yarn.beta_slow, yarn, rope.theta, dim)), dim - 1)
    width = high - low or 0.001
    slowed = ((torch.arange(dim // 2, dtype=torch.float64) - low) / width).clamp(0.0, 1.0)
    return base * (1.0 - slowed) + base / yarn.factor * slowed


def _pair_turning(turns: float, yarn: YarnSpec, theta: float, dim: int) -> float:
    """The (fractional) pair that turns `turns` times within the original positions."""
    return dim * math.log(yarn.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))


def amplitude(yarn: YarnSpec | None) -> float:
    """What cos and sin are multiplied by: mscale(factor, mscale) / mscale(factor, all_dim)."""
    if yarn is None:
        return 1.0
    grown = 0.1 * math.log(yarn.factor)
    return (grown * yarn.mscale + 1.0) / (grown * yarn.mscale_all_dim + 1.0)


Angles = Tensor
"""[T, 1, dim / 2] complex64: what each pair (x0, x1), as x0 + i x1, is multiplied by."""


_SHARED_PAIRS = 2**15
"""From so many on, the library's threads share a product, and a share may end within a row. What is
left of a row there is rounded otherwise: complex numbers one by one are multiplied and added at
once, whole vectors of them are not.
"""


class Rotary:
    """Rotates interleaved pairs (x0, x1), (x2, x3), ... by position."""

    def __init__(self, rope: RopeSpec, dim: int, positions: int, device: torch.device) -> None:
        angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies(rope, dim))
        scale = amplitude(rope.yarn)
        turns = torch.stack((angles.cos() * scale, angles.sin() * scale), dim=-1).float()
        self._turns = torch.view_as_complex(turns).to(device)

    def at(self, positions: Tensor) -> Angles:
        """For positions [T] int64."""
        return self._turns[positions][:, None]


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """x [T, H, dim] -> the same, rotated; fp32 inside, x's dtype outside."""
    wide = torch.empty(x.shape, dtype=torch.float32, device=x.device).copy_(x)
    pairs = torch.view_as_complex(wide.view(*x.shape[:-1], -1, 2))
    if x.device.type != "cpu" or pairs.numel() < _SHARED_PAIRS:
        pairs.mul_(angles)
    else:
        tokens = max(1, (_SHARED_PAIRS - 1) // pairs[0].numel())
        for some, turns in zip(
            torch.split(pairs, tokens), torch.split(angles, tokens), strict=True
        ):
            some.mul_(turns)
    return wide.to(x.dtype)
