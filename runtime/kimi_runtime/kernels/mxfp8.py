"""MXFP8 (e4m3): eight-bit floats in groups of 32 along the last axis with one power of two.

    x ~ 2^(s - 127) * e4m3(value)         s = clamp(e(max|group|) - 8 + 127, 0, 254)

The activations that Kimi K3's experts were trained with (OCP Microscaling Formats 1.0, 5.2, 6.3).
`e` follows one of the two rules of `mxfp4.py`; under `compressed_tensors` nothing saturates, since
448 = 1.75 * 2^8 is where the exponent is bumped. `value` is e4m3fn, the OCP format of gfx950 (not
the FNUZ one of gfx942): it rounds to nearest even and saturates at 448. A group with an infinity
or a NaN becomes NaN as a whole.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kimi_runtime.kernels.device import group_scales, round_to_e4m3
from kimi_runtime.kernels.lang import cdiv, require_contiguous, require_device, tl, triton
from kimi_runtime.kernels.mxfp4 import (
    GROUP,
    MANTISSA_BUMP,
    Rounding,
    decode_e8m0,
    divide_by_scales,
    encode_group_scales,
    in_groups,
    require_groups,
)
from kimi_runtime.kernels.tuning import tiles

E4M3_MAX = 448.0  # 1.75 * 2^8
_E4M3_EMAX = 8


class Mxfp8(NamedTuple):
    """A tensor [..., K] in MXFP8."""

    values: Tensor  # [..., K] float8_e4m3fn
    scales: Tensor  # [..., K / 32] uint8, e8m0


def dequantise_mxfp8(x: Mxfp8) -> Tensor:
    """values [..., K], scales [..., K / 32] -> fp32 [..., K], exact."""
    values = in_groups(x.values.float().contiguous())
    return (values * decode_e8m0(x.scales).unsqueeze(-1)).flatten(-2)


def quantise_mxfp8_ref(x: Tensor, rounding: Rounding = "compressed_tensors") -> Mxfp8:
    """x [..., K] of a float dtype, K a multiple of 32 -> values [..., K], scales [..., K / 32].

    Raises ValueError for another K.
    """
    require_groups(x)
    scales = encode_group_scales(x, _E4M3_EMAX, rounding)
    scaled = divide_by_scales(x, scales).clamp(-E4M3_MAX, E4M3_MAX)
    return Mxfp8(scaled.to(torch.float8_e4m3fn), scales)


@triton.jit
def _quantise_mxfp8(x_ptr, values_ptr, scales_ptr, groups, bump, TILE_GROUPS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
    inside = group < groups  # [TILE_GROUPS]
    lanes = group[:, None] * 32 + tl.arange(0, 32)[None, :]  # [TILE_GROUPS, 32]
    x = tl.load(x_ptr + lanes, mask=inside[:, None], other=0.0).to(tl.float32)
    scales, scaled = group_scales(x, bump, 8)
    values = round_to_e4m3(scaled).to(tl.float8e4nv)
    tl.store(scales_ptr + group, scales.to(tl.uint8), mask=inside)
    tl.store(values_ptr + lanes, values, mask=inside[:, None])


def quantise_mxfp8(x: Tensor, rounding: Rounding = "compressed_tensors") -> Mxfp8:
    """Same contract as `quantise_mxfp8_ref`, one pass over memory; x must be contiguous."""
    require_groups(x)
    require_contiguous(x=x)
    device = require_device(x=x)
    *lead, width = x.shape
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty((*lead, width // GROUP), dtype=torch.uint8, device=device)
    groups = scales.numel()
    if groups:
        tile = tiles("quantise_mxfp8", device, groups)
        _quantise_mxfp8[(cdiv(groups, tile["TILE_GROUPS"]),)](
            x, values, scales, groups, MANTISSA_BUMP[rounding], **tile
        )
    return Mxfp8(values, scales)
