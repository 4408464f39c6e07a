"""MXFP4: four-bit floats in groups of 32 along the last axis with one scale of powers of two.

    x ~ 2^(s - 127) * e2m1(code)          s = clamp(e(max|group|) - 2 + 127, 0, 254)

`code` is one of 0 .5 1 1.5 2 3 4 6 (bits 0-2) with a sign (bit 3), two to a byte, the low nibble
first; s is an e8m0 byte, 255 = NaN (OCP Microscaling Formats 1.0, 5.3-5.4, 6.3). `e` is the
exponent of the group's largest magnitude under one of two rules:

- `ocp_floor`: floor(log2 max), the specification's own (6.3). Up to a quarter of the largest
  element is lost where max lies in (6, 8) of its group's scale.
- `compressed_tensors`: the same after adding a quarter to the mantissa, so that max >= 1.75 * 2^e
  takes the next exponent: the rule of the checkpoints that compressed-tensors writes, and of
  AMD's "even" rounding. Nothing that would round beyond 6 is left in the group.

Elements then round to the nearest code, ties to the even one, and saturate at 6. A group with an
infinity or a NaN becomes NaN as a whole, so that it cannot pass as a number.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kimi_runtime.kernels.device import e2m1_codes, group_scales
from kimi_runtime.kernels.lang import cdiv, require_contiguous, require_device, tl, triton
from kimi_runtime.kernels.tuning import tiles

GROUP = 32
"""Elements that share a scale."""
NAN_SCALE = 0xFF
"""The e8m0 byte that makes a whole group NaN."""

Rounding = Literal["compressed_tensors", "ocp_floor"]

MANTISSA_BUMP: dict[Rounding, int] = {"compressed_tensors": 1 << 21, "ocp_floor": 0}
"""What each rule adds to the fp32 bits of the largest magnitude before taking its exponent."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_EMAX = 2  # 6 = 1.5 * 2^2


class Mxfp4(NamedTuple):
    """A tensor [..., K] in MXFP4."""

    codes: Tensor  # [..., K / 2] uint8, element 2i in the low nibble of byte i
    scales: Tensor  # [..., K / 32] uint8, e8m0


def pack_e2m1(codes: Tensor) -> Tensor:
    """Codes [..., K] uint8 in 0..15 -> [..., K / 2] uint8, the even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """The inverse of `pack_e2m1`: [..., K / 2] uint8 -> [..., K] uint8."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def encode_e2m1(values: Tensor) -> Tensor:
    """fp32 values of any shape -> the nearest e2m1 codes (uint8): ties to even, saturated at 6."""
    size = values.abs()
    # A threshold is the midpoint of two neighbours; the tie goes to the even code, so the
    # comparison is strict where the lower code is even.
    code = (size > 0.25).to(torch.uint8)
    code += size >= 0.75
    code += size > 1.25
    code += size >= 1.75
    code += size > 2.5
    code += size >= 3.5
    code += size > 5.0
    return code | (values.signbit().to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor) -> Tensor:
    """e2m1 codes (uint8) -> fp32, exact."""
    size = torch.tensor(_E2M1, device=codes.device)[(codes & 7).long()]
    return torch.where(codes >= 8, -size, size)


def decode_e8m0(scales: Tensor) -> Tensor:
    """e8m0 bytes (uint8) -> fp32 powers of two, exact; 255 -> NaN."""
    exponent = scales.to(torch.int32)
    bits = torch.where(exponent == 0, 1 << 22, exponent << 23)  # 2^-127 is subnormal in fp32
    return bits.view(torch.float32).masked_fill(scales == NAN_SCALE, torch.nan)


def in_groups(x: Tensor) -> Tensor:
    """[..., K] -> [..., K / 32, 32], a view."""
    return x.view(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)


def encode_group_scales(x: Tensor, emax: int, rounding: Rounding) -> Tensor:
    """e8m0 bytes [..., K / 32] uint8 for `x` [..., K] whose elements reach 2^emax * (1..2).

    The exponent is clamped to the byte's range; a group of zeros has byte 0, and one with an
    infinity or a NaN has 255.
    """
    largest = in_groups(x.float().contiguous()).abs().amax(dim=-1)
    exponent = (largest.view(torch.int32) + MANTISSA_BUMP[rounding]) >> 23
    scales = (exponent - emax).clamp(0, 254).to(torch.uint8)
    return scales.masked_fill(~largest.isfinite(), NAN_SCALE)


def divide_by_scales(x: Tensor, scales: Tensor) -> Tensor:
    """x [..., K] over its group's scale, in fp32, exact; 0 throughout a NaN group."""
    inverse = decode_e8m0((254 - scales.to(torch.int32)).clamp(0, 254).to(torch.uint8))
    groups = in_groups(x.float().contiguous()) * inverse.unsqueeze(-1)
    return groups.masked_fill((scales == NAN_SCALE).unsqueeze(-1), 0.0).flatten(-2)


def dequantise_mxfp4(x: Mxfp4) -> Tensor:
    """codes [..., K / 2], scales [..., K / 32] -> fp32 [..., K], exact.

    The result is exact in bf16 too, but for codes whose value passes bf16's (and fp32's) largest.
    """
    # Two codes a look-up: a CPU that serves MXFP4 experts spends its time here.
    all_bytes = torch.arange(256, dtype=torch.uint8, device=x.codes.device).unsqueeze(1)
    pairs = decode_e2m1(unpack_e2m1(all_bytes))  # [256, 2]
    values = pairs.index_select(0, x.codes.reshape(-1).to(torch.int32))
    groups = in_groups(values.view(*x.codes.shape[:-1], 2 * x.codes.shape[-1]))
    return groups.mul_(decode_e8m0(x.scales).unsqueeze(-1)).flatten(-2)


def quantise_mxfp4_ref(x: Tensor, rounding: Rounding = "compressed_tensors") -> Mxfp4:
    """x [..., K] of a float dtype, K a multiple of 32 -> codes [..., K / 2], scales [..., K / 32].

    The formula and the rules are the module's. Raises ValueError for another K.
    """
    require_groups(x)
    scales = encode_group_scales(x, _E2M1_EMAX, rounding)
    return Mxfp4(pack_e2m1(encode_e2m1(divide_by_scales(x, scales))), scales)


@triton.jit
def _quantise_mxfp4(x_ptr, codes_ptr, scales_ptr, groups, bump, TILE_GROUPS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
    inside = group < groups  # [TILE_GROUPS]
    lanes = group[:, None] * 32 + tl.arange(0, 32)[None, :]  # [TILE_GROUPS, 32]
    x = tl.load(x_ptr + lanes, mask=inside[:, None], other=0.0).to(tl.float32)
    scales, scaled = group_scales(x, bump, 2)
    low, high = tl.split(tl.reshape(e2m1_codes(scaled), (TILE_GROUPS, 16, 2)))
    packed = low | (high << 4)  # [TILE_GROUPS, 16]
    tl.store(scales_ptr + group, scales.to(tl.uint8), mask=inside)
    pairs = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(codes_ptr + pairs, packed.to(tl.uint8), mask=inside[:, None])


def quantise_mxfp4(x: Tensor, rounding: Rounding = "compressed_tensors") -> Mxfp4:
    """Same contract as `quantise_mxfp4_ref`, one pass over memory; x must be contiguous."""
    require_groups(x)
    require_contiguous(x=x)
    device = require_device(x=x)
    *lead, width = x.shape
    codes = torch.empty((*lead, width // 2), dtype=torch.uint8, device=device)
    scales = torch.empty((*lead, width // GROUP), dtype=torch.uint8, device=device)
    groups = scales.numel()
    if groups:
        tile = tiles("quantise_mxfp4", device, groups)
        _quantise_mxfp4[(cdiv(groups, tile["TILE_GROUPS"]),)](
            x, codes, scales, groups, MANTISSA_BUMP[rounding], **tile
        )
    return Mxfp4(codes, scales)


def require_groups(x: Tensor) -> None:
    """ValueError unless the last axis divides into groups of 32."""
    if x.dim() < 1 or x.shape[-1] % GROUP or not x.is_floating_point():
        raise ValueError(
            f"groups of {GROUP} along the last axis of a float tensor are quantised, "
            f"not {x.dtype} of shape {tuple(x.shape)}; pad the axis with zeros"
        )
