"""Grouped GEMM of the experts with MXFP4 weights, by `dot_scaled`.

    out[s, :] = x[s // (S / rows), :] @ W[expert_ids[s]].T       0 where the slot has no expert

for slots s = token * k + choice: `x` has one row a token (S / k rows) before the first projection
and one row a slot before the second. Weights are MXFP4 (`mxfp4.py`), activations one of

- bf16: the weights are widened to bf16 in registers;
- MXFP8 (e4m3) or MXFP4 (e2m1): on gfx950 the matrix instruction takes codes and scales as they
  are (v_mfma_scale_*_f8f6f4) and multiplies them exactly into fp32; elsewhere Triton widens both.

Every slot is written by one program, without atomics, so a result depends on nothing that runs
beside it. Weight offsets are int64: the experts of one layer pass 2 GiB (aiter#4343).
"""

import torch
from torch import Tensor

from kimi_runtime.kernels.lang import cdiv, require_contiguous, require_device, tl, triton
from kimi_runtime.kernels.mxfp4 import GROUP, Mxfp4, dequantise_mxfp4
from kimi_runtime.kernels.mxfp8 import Mxfp8, dequantise_mxfp8
from kimi_runtime.kernels.sort_experts import ExpertPlan
from kimi_runtime.kernels.tuning import tiles

Activations = Tensor | Mxfp8 | Mxfp4


def mxfp4_gemm_ref(x: Activations, weight: Mxfp4, plan: ExpertPlan) -> Tensor:
    """The product of every slot with its expert's matrix, rounded once to bf16.

    x: bf16 [R, K], or MXFP8 or MXFP4 of that shape; weight: codes [E, N, K / 2] uint8, scales
    [E, N, K / 32] uint8; plan: expert_ids [S], S a multiple of R. Returns [S, N] bf16; a slot
    whose id is outside 0..E-1 gets zeros, whatever its row of x holds. Operands are exact in
    bf16 and products are summed in fp32; a group of NaN scale makes its outputs NaN.
    Raises ValueError for shapes that do not fit.
    """
    rows_per_row = _slots_per_row(x, weight, plan)
    dense = _dense(x)
    out = dense.new_zeros((plan.expert_ids.numel(), weight.codes.shape[1]))
    experts = weight.codes.shape[0]
    for expert in plan.expert_ids.unique().tolist():
        if 0 <= expert < experts:
            slots = (plan.expert_ids == expert).nonzero().squeeze(1)
            matrix = dequantise_mxfp4(Mxfp4(weight.codes[expert], weight.scales[expert]))
            out[slots] = dense[slots // rows_per_row] @ matrix.to(torch.bfloat16).T
    return out


@triton.jit
def _tile_of_program(blocks, tiles_n, XCDS: tl.constexpr):
    """The (row block, column tile) of this program.

    Blocks of one expert are neighbours and read the same weights; program ids are dealt out to
    the XCDs in turn, each with an L2 of its own. So an XCD gets a contiguous run of tiles.
    """
    program = tl.program_id(0)
    per_xcd = tl.cdiv(blocks * tiles_n, XCDS)
    tile = (program % XCDS) * per_xcd + program // XCDS
    return tile % blocks, tile // blocks


@triton.jit
def _store_slots(out_ptr, acc, slots, cols, n_slots, N):
    out = out_ptr + slots.to(tl.int64)[:, None] * N + cols[None, :]
    inside = (slots < n_slots)[:, None] & (cols < N)[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _mxfp4_gemm_bf16(
    x_ptr,
    w_ptr,
    w_scales_ptr,
    out_ptr,
    slots_ptr,
    experts_ptr,
    n_slots,
    slots_per_row,
    blocks,
    w_expert_stride,
    w_scales_expert_stride,
    N,
    K,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    XCDS: tl.constexpr,
):
    block, tile_n = _tile_of_program(blocks, tl.cdiv(N, TILE_N), XCDS)
    if tile_n * TILE_N >= N:
        return
    slots = tl.load(slots_ptr + block * TILE_M + tl.arange(0, TILE_M))  # [TILE_M]
    cols = tile_n * TILE_N + tl.arange(0, TILE_N)  # [TILE_N]
    expert = tl.load(experts_ptr + block).to(tl.int64)
    acc = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    if expert >= 0:
        is_slot = (slots < n_slots)[:, None]
        is_col = (cols < N)[:, None]
        x_rows = x_ptr + (slots // slots_per_row).to(tl.int64)[:, None] * K  # [TILE_M, 1]
        w_rows = w_ptr + expert * w_expert_stride + cols.to(tl.int64)[:, None] * (K // 2)
        s_rows = w_scales_ptr + expert * w_scales_expert_stride
        s_rows += cols.to(tl.int64)[:, None] * (K // 32)  # [TILE_N, 1]
        for k in range(0, K, TILE_K):
            ks = (k + tl.arange(0, TILE_K))[None, :]
            pairs = (k // 2 + tl.arange(0, TILE_K // 2))[None, :]
            groups = (k // 32 + tl.arange(0, TILE_K // 32))[None, :]
            x = tl.load(x_rows + ks, mask=is_slot & (ks < K), other=0.0)  # [TILE_M, TILE_K]
            w = tl.load(w_rows + pairs, mask=is_col & (pairs < K // 2), other=0)
            s = tl.load(s_rows + groups, mask=is_col & (groups < K // 32), other=0)
            acc = tl.dot_scaled(x, None, "bf16", tl.trans(w), s, "e2m1", acc)
    _store_slots(out_ptr, acc, slots, cols, n_slots, N)


@triton.jit
def _mxfp4_gemm_scaled(
    x_ptr,
    x_scales_ptr,
    w_ptr,
    w_scales_ptr,
    out_ptr,
    slots_ptr,
    experts_ptr,
    n_slots,
    slots_per_row,
    blocks,
    w_expert_stride,
    w_scales_expert_stride,
    N,
    K,
    X_FORMAT: tl.constexpr,
    X_PACK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    XCDS: tl.constexpr,
):
    # X_PACK: elements in a stored value of x, 2 for e2m1 and 1 for e4m3
    block, tile_n = _tile_of_program(blocks, tl.cdiv(N, TILE_N), XCDS)
    if tile_n * TILE_N >= N:
        return
    slots = tl.load(slots_ptr + block * TILE_M + tl.arange(0, TILE_M))  # [TILE_M]
    cols = tile_n * TILE_N + tl.arange(0, TILE_N)  # [TILE_N]
    expert = tl.load(experts_ptr + block).to(tl.int64)
    acc = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    if expert >= 0:
        is_slot = (slots < n_slots)[:, None]
        is_col = (cols < N)[:, None]
        row = (slots // slots_per_row).to(tl.int64)[:, None]  # [TILE_M, 1]
        x_rows = x_ptr + row * (K // X_PACK)
        xs_rows = x_scales_ptr + row * (K // 32)
        w_rows = w_ptr + expert * w_expert_stride + cols.to(tl.int64)[:, None] * (K // 2)
        s_rows = w_scales_ptr + expert * w_scales_expert_stride
        s_rows += cols.to(tl.int64)[:, None] * (K // 32)  # [TILE_N, 1]
        for k in range(0, K, TILE_K):
            packs = (k // X_PACK + tl.arange(0, TILE_K // X_PACK))[None, :]
            pairs = (k // 2 + tl.arange(0, TILE_K // 2))[None, :]
            groups = (k // 32 + tl.arange(0, TILE_K // 32))[None, :]
            is_group = groups < K // 32
            x = tl.load(x_rows + packs, mask=is_slot & (packs < K // X_PACK), other=0.0)
            xs = tl.load(xs_rows + groups, mask=is_slot & is_group, other=0)
            w = tl.load(w_rows + pairs, mask=is_col & (pairs < K // 2), other=0)
            s = tl.load(s_rows + groups, mask=is_col & is_group, other=0)
            acc = tl.dot_scaled(x, xs, X_FORMAT, tl.trans(w), s, "e2m1", acc)
    _store_slots(out_ptr, acc, slots, cols, n_slots, N)


def mxfp4_gemm(
    x: Activations, weight: Mxfp4, plan: ExpertPlan, *, out: Tensor | None = None
) -> Tensor:
    """Same contract as `mxfp4_gemm_ref`, one launch, no host sync; `out` is overwritten.

    The plan's `tile_m` must be that of `gemm_tiles` for these activations and sizes.
    """
    slots_per_row = _slots_per_row(x, weight, plan)
    parts = {f"x.{i}": part for i, part in enumerate(x if isinstance(x, tuple) else (x,))}
    slots, (experts, width, half) = plan.expert_ids.numel(), weight.codes.shape
    y = plan.expert_ids.new_empty((slots, width), dtype=torch.bfloat16) if out is None else out
    require_contiguous(**parts, out=y, w=weight.codes[0], w_scales=weight.scales[0])
    device = require_device(**parts, codes=weight.codes, slots=plan.sorted_slots, out=y)
    if not y.numel():
        return y
    tile = gemm_tiles(x, device, slots, experts)
    if tile["TILE_M"] != plan.tile_m:
        raise ValueError(f"the plan has blocks of {plan.tile_m} rows, not {tile['TILE_M']}")
    blocks = plan.block_experts.numel()
    grid = (cdiv(blocks * cdiv(width, tile["TILE_N"]), tile["XCDS"]) * tile["XCDS"],)
    sizes = (slots, slots_per_row, blocks, weight.codes.stride(0), weight.scales.stride(0))
    args = (*weight, y, plan.sorted_slots, plan.block_experts, *sizes, width, half * 2)
    if isinstance(x, Tensor):
        _mxfp4_gemm_bf16[grid](x, *args, **tile)
    elif isinstance(x, Mxfp8):
        _mxfp4_gemm_scaled[grid](*x, *args, X_FORMAT="e4m3", X_PACK=1, **tile)
    else:
        _mxfp4_gemm_scaled[grid](*x, *args, X_FORMAT="e2m1", X_PACK=2, **tile)
    return y


def gemm_tiles(x: Activations, device: torch.device, slots: int, experts: int) -> dict[str, int]:
    """Launch arguments for `slots` slots over `experts` experts, by slots an expert."""
    kind, _, _ = _format_of(x)
    return tiles(f"mxfp4_gemm/{kind}", device, cdiv(slots, experts))


def _format_of(x: Activations) -> tuple[str, torch.dtype, int]:
    """(name in the tuning data, dtype of the values, elements in a value)."""
    if isinstance(x, Mxfp4):
        return "mxfp4", torch.uint8, 2
    if isinstance(x, Mxfp8):
        return "mxfp8", torch.float8_e4m3fn, 1
    return "bf16", torch.bfloat16, 1


def _dense(x: Activations) -> Tensor:
    """x as bf16 [R, K]: what the codes mean, exact."""
    if isinstance(x, Mxfp4):
        return dequantise_mxfp4(x).to(torch.bfloat16)
    if isinstance(x, Mxfp8):
        return dequantise_mxfp8(x).to(torch.bfloat16)
    return x


def _slots_per_row(x: Activations, weight: Mxfp4, plan: ExpertPlan) -> int:
    """How many slots share a row of x (k, or 1), with every shape and dtype checked."""
    values = x if isinstance(x, Tensor) else x[0]
    _, dtype, pack = _format_of(x)
    rows, inner = values.shape
    slots = plan.expert_ids.numel()
    experts, width, half = weight.codes.shape
    if values.dtype != dtype:
        raise ValueError(f"activations have dtype {values.dtype}, but {dtype} is wanted")
    if inner * pack != half * 2 or weight.scales.shape != (experts, width, half * 2 // GROUP):
        raise ValueError(
            f"activations of {inner * pack} inputs meet weights {tuple(weight.codes.shape)} with "
            f"scales {tuple(weight.scales.shape)}: [E, N, K / 2] and [E, N, K / {GROUP}] are wanted"
        )
    if half * 2 % GROUP:
        raise ValueError(f"{half * 2} inputs do not divide into groups of {GROUP}")
    if slots % rows if rows else slots:
        raise ValueError(f"{slots} slots do not share {rows} rows of activations evenly")
    return slots // rows if slots else 1
