"""Group the (token, choice) slots of a mixture of experts by expert, in blocks of equal height.

A grouped GEMM gives every block of TILE_M rows one expert's weights. So the slots of an expert
are placed side by side and each expert is padded to whole blocks:

    sorted_slots[P]     slot of a row, or S (the number of slots) where the row is padding
    block_experts[P / TILE_M]      the expert of a block, or -1

It is plain torch without a host sync: sizes depend on shapes alone, so it can be captured in a
graph. Experts without tokens take no block. Slots whose id names no expert (a padded token, or an
expert of another rank) come last in blocks of expert -1: the GEMM writes zeros for them, because
rows left undefined become NaN and then wild expert ids further on (ATOM#1719).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kimi_runtime.kernels.lang import cdiv


class ExpertPlan(NamedTuple):
    """Which rows meet which expert."""

    expert_ids: Tensor  # [S] int32, as given; outside 0..E-1: no expert
    sorted_slots: Tensor  # [P] int32, P a multiple of tile_m
    block_experts: Tensor  # [P / tile_m] int32
    tile_m: int


def sort_experts(expert_ids: Tensor, experts: int, tile_m: int) -> ExpertPlan:
    """Plan for expert_ids [T, k] (any integer dtype) of `experts` experts; slot = token * k + j.

    Within an expert slots keep their order, so a plan is a function of its arguments alone.
    P is the most that any ids of this shape can need. Raises ValueError for a tile below 1 or
    for 2**31 slots.
    """
    slots = expert_ids.numel()
    if tile_m < 1 or experts < 1 or slots >= 2**31:
        raise ValueError(f"cannot sort {slots} slots of {experts} experts in tiles of {tile_m}")
    device = expert_ids.device
    ids = expert_ids.reshape(-1).to(torch.int32)
    # Bucket `experts` holds what names no expert.
    bucket = torch.where((ids >= 0) & (ids < experts), ids, experts).long()
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, bucket, torch.ones_like(bucket))
    padded = (counts + tile_m - 1) // tile_m * tile_m
    ends = padded.cumsum(0)  # [experts + 1], in rows
    order = bucket.argsort(stable=True)
    rank = torch.arange(slots, device=device) - (counts.cumsum(0) - counts)[bucket[order]]
    rows = (ends - padded)[bucket[order]] + rank
    blocks = cdiv(slots + min(slots, experts + 1) * (tile_m - 1), tile_m)
    sorted_slots = torch.full((blocks * tile_m,), slots, dtype=torch.int32, device=device)
    sorted_slots[rows] = order.to(torch.int32)
    starts = torch.arange(blocks, device=device) * tile_m
    owner = torch.searchsorted(ends, starts, right=True)
    block_experts = torch.where(owner < experts, owner, -1).to(torch.int32)
    return ExpertPlan(ids, sorted_slots, block_experts, tile_m)
