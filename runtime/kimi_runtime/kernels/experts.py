"""The routed experts of a layer: sort, two grouped GEMMs around the activation, weighted sum.

    out[t] = sum_j weight[t, j] * W2[e] @ act(W13[e] @ x[t])        e = expert_ids[t, j]

with act(gate, up) over the two halves of W13's rows (gate first, as checkpoints have them). Both
products are rounded to bf16, the activation and the sum are fp32, and the sum runs over j in
order: a token's result is the same in any batch that runs the same tiles.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from kimi_runtime.kernels.mxfp4 import Mxfp4, quantise_mxfp4, quantise_mxfp4_ref
from kimi_runtime.kernels.mxfp4_gemm import Activations, gemm_tiles, mxfp4_gemm, mxfp4_gemm_ref
from kimi_runtime.kernels.mxfp8 import quantise_mxfp8, quantise_mxfp8_ref
from kimi_runtime.kernels.sort_experts import sort_experts

ActivationFormat = Literal["bf16", "mxfp8", "mxfp4"]
"""What the inputs of both GEMMs are rounded to: as the checkpoint was trained or calibrated."""

GateUp = Callable[[Tensor, Tensor], Tensor]
"""(gate, up), both [S, F] fp32 -> [S, F] fp32."""


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up: the activation of the K2 family's experts (K3's is another)."""
    return torch.nn.functional.silu(gate) * up


def experts_ref(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    w13: Mxfp4,
    w2: Mxfp4,
    *,
    act: GateUp,
    activations: ActivationFormat = "bf16",
) -> Tensor:
    """The routed experts' sum for every token, by the references: for the CPU, and to check by.

    x [T, D] bf16; expert_ids [T, k] of any integer dtype; expert_weights [T, k] fp32; w13 codes
    [E, 2F, D / 2] and scales [E, 2F, D / 32]; w2 codes [E, D, F / 2] and scales [E, D, F / 32].
    Returns [T, D] bf16. A slot whose id is outside 0..E-1 (a padded token, another rank's expert)
    adds nothing, whatever x and its weight hold. Raises ValueError for shapes that do not fit.
    """
    plan = sort_experts(expert_ids, w13.codes.shape[0], tile_m=1)
    hidden = mxfp4_gemm_ref(_quantised_ref(x, activations), w13, plan)
    inner = _quantised_ref(_activated(hidden, act), activations)
    return _weighted_sum(mxfp4_gemm_ref(inner, w2, plan), expert_ids, expert_weights, w13)


def experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    w13: Mxfp4,
    w2: Mxfp4,
    *,
    act: GateUp,
    activations: ActivationFormat = "bf16",
) -> Tensor:
    """Same contract as `experts_ref`, on the GPU, no host sync."""
    count = w13.codes.shape[0]
    given = _quantised(x, activations)
    tile = gemm_tiles(given, x.device, expert_ids.numel(), count)
    plan = sort_experts(expert_ids, count, tile["TILE_M"])
    hidden = mxfp4_gemm(given, w13, plan)
    inner = _quantised(_activated(hidden, act), activations)
    return _weighted_sum(mxfp4_gemm(inner, w2, plan), expert_ids, expert_weights, w13)


def _quantised_ref(x: Tensor, activations: ActivationFormat) -> Activations:
    match activations:
        case "bf16":
            return x
        case "mxfp8":
            return quantise_mxfp8_ref(x)
        case "mxfp4":
            return quantise_mxfp4_ref(x)


def _quantised(x: Tensor, activations: ActivationFormat) -> Activations:
    match activations:
        case "bf16":
            return x
        case "mxfp8":
            return quantise_mxfp8(x)
        case "mxfp4":
            return quantise_mxfp4(x)


def _activated(hidden: Tensor, act: GateUp) -> Tensor:
    """[S, 2F] bf16 -> [S, F] bf16."""
    gate, up = hidden.float().chunk(2, dim=-1)
    return act(gate, up).to(torch.bfloat16)


def _weighted_sum(y: Tensor, expert_ids: Tensor, expert_weights: Tensor, w13: Mxfp4) -> Tensor:
    """y [T * k, D] -> [T, D] bf16, summed over a token's k slots in their order."""
    tokens, chosen = expert_ids.shape
    is_expert = (expert_ids >= 0) & (expert_ids < w13.codes.shape[0])
    weights = torch.where(is_expert, expert_weights.float(), 0.0)
    slots = y.view(tokens, chosen, -1)
    total = torch.zeros_like(slots[:, 0], dtype=torch.float32)
    for j in range(chosen):  # one order of additions, whatever the batch
        total += slots[:, j] * weights[:, j, None]
    return total.to(torch.bfloat16)
