"""Feed-forward layers: dense, and a mixture of experts with a sigmoid router.

    p = sigmoid(x W^T) in fp32; the top_k of p + bias are chosen; w = p[chosen] / sum * scaling
    y = sum_e w_e E_e(x) + shared(x),  E(x) = down(silu(gate x) * up x)

The bias decides who is chosen and is in no weight (DeepSeek-V3, arXiv 2412.19437). It is fp32 from
its allocation on: in bf16 its steps are larger than the distances between experts (vllm#50761).
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kimi_runtime.models.linear import Linear, LinearFactory
from kimi_runtime.models.norm import sigmoid, silu_mul
from kimi_runtime.models.rows import padded_rows
from kimi_runtime.spec.model import MoeSpec

Ints = NDArray[np.int64]


class SwiGlu:
    """down(silu(gate x) * up x). `weights` has `{gate,up,down}_proj.weight` under `prefix`."""

    def __init__(self, weights: Mapping[str, Tensor], linears: LinearFactory, prefix: str) -> None:
        gate, up = (weights[f"{prefix}{part}_proj.weight"] for part in ("gate", "up"))
        self.gate_up: Linear = linears.linear(torch.cat((gate, up)))
        self.down: Linear = linears.linear(weights[f"{prefix}down_proj.weight"])

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return self.down(silu_mul(self.gate_up(x)))


class Router:
    """Chooses experts. `weight` [E, hidden] of any dtype is used in fp32; `bias` [E] must be."""

    def __init__(self, moe: MoeSpec, weight: Tensor, bias: Tensor, linears: LinearFactory) -> None:
        if bias.dtype != torch.float32:
            raise TypeError(
                f"the router bias must be fp32 from its allocation on, not {bias.dtype}"
            )
        self._moe, self._bias = moe, bias
        self._logits = linears.linear(weight.float())

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> experts [T, k] int64 and their weights [T, k] fp32.

        Experts come by falling `p + bias`; of equals the lower number is first.
        """
        moe = self._moe
        chances = sigmoid(self._logits(x.float()))
        ranked = chances + self._bias
        if moe.groups > 1:
            ranked = ranked.masked_fill(~self._eligible(ranked), -torch.inf)
        chosen = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : moe.top_k]
        weights = chances.gather(1, chosen)
        if moe.renormalise:
            weights = weights / (_sum_in_order(weights.unbind(1))[:, None] + 1e-20)
        return chosen, weights * moe.scaling

    def _eligible(self, ranked: Tensor) -> Tensor:
        """[T, E] bool: experts of the `top_groups` whose two best add up to most."""
        moe = self._moe
        by_group = ranked.view(len(ranked), moe.groups, -1)
        best = by_group.sort(dim=-1, descending=True).values[..., :2]
        merit = _sum_in_order(best.unbind(-1))
        groups = merit.sort(dim=-1, descending=True, stable=True).indices[:, : moe.top_groups]
        eligible = torch.zeros_like(merit, dtype=torch.bool).scatter_(1, groups, True)
        return eligible.repeat_interleave(by_group.shape[-1], dim=1)


class MixtureOfExperts:
    """One layer's experts. `weights` are the layer's `mlp.*`, without that prefix."""

    def __init__(self, moe: MoeSpec, weights: Mapping[str, Tensor], linears: LinearFactory) -> None:
        self._moe = moe
        self.router = Router(
            moe, weights["gate.weight"], weights["gate.e_score_correction_bias"], linears
        )
        self._experts = [SwiGlu(weights, linears, f"experts.{i}.") for i in range(moe.experts)]
        self._shared = SwiGlu(weights, linears, "shared_experts.") if moe.shared else None

    def __call__(self, x: Tensor, tokens: int) -> Tensor:
        """x [T, hidden] -> [T, hidden]; rows from `tokens` on are padding and reach no expert."""
        chosen, weights = self.router(x)
        routed = self._routed(x[:tokens], chosen[:tokens], weights[:tokens])
        if self._shared is None:
            shared = torch.zeros_like(x, dtype=torch.float32)
        else:
            shared = self._shared(x).float()
        shared[:tokens] += routed
        return shared.to(x.dtype)

    def _routed(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of the chosen experts' results, [tokens, hidden] fp32.

        Tokens are sorted by expert; each expert's share is padded to a row count of the ladder, so
        that its products run on whole tiles and one buffer holds all of them.
        """
        sizes, places = self._places(chosen.reshape(-1).cpu().numpy())
        place = torch.from_numpy(places).to(x.device)
        gathered = x.new_zeros((sum(sizes), x.shape[1]))
        gathered.index_copy_(0, place, x.repeat_interleave(self._moe.top_k, dim=0))
        used = [(self._experts[i], size) for i, size in enumerate(sizes) if size]
        shares = gathered.split_with_sizes([size for _, size in used])
        inner = torch.cat([e.gate_up(share) for (e, _), share in zip(used, shares, strict=True)])
        shares = silu_mul(inner).split_with_sizes([size for _, size in used])
        outer = torch.cat([e.down(share) for (e, _), share in zip(used, shares, strict=True)])
        results = outer[place].view(*chosen.shape, -1).float() * weights[..., None]
        return _sum_in_order(results.unbind(1))

    def _places(self, experts: Ints) -> tuple[list[int], Ints]:
        """Rows of each expert's share, and where each (token, choice) goes in the buffer."""
        counts = np.bincount(experts, minlength=self._moe.experts)
        sizes = [padded_rows(count) if count else 0 for count in counts.tolist()]
        order = experts.argsort(kind="stable")
        shift = np.cumsum(sizes) - sizes - (np.cumsum(counts) - counts)
        places = np.empty_like(order)
        places[order] = np.arange(len(order)) + np.repeat(shift, counts)
        return sizes, places


def _sum_in_order(terms: tuple[Tensor, ...]) -> Tensor:
    """Left to right: an order that a reduction over the axis would not promise."""
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total
