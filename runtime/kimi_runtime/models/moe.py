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
from kimi_runtime.models.rows import CALL_COST_ROWS, LADDER, padded_rows
from kimi_runtime.spec.model import MoeSpec

_ALL_BYTES = 2**23
"""Of a layer's experts that may be kept a second time, side by side, and read in every step."""

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
        self._sorted = SortedExperts(moe, weights, linears)
        self._all = AllExperts.of(moe, weights, linears)
        self._shared = SwiGlu(weights, linears, "shared_experts.") if moe.shared else None

    def __call__(self, x: Tensor, tokens: int) -> Tensor:
        """x [T, hidden] -> [T, hidden]; rows from `tokens` on are padding and get no expert's."""
        chosen, weights = self.router(x)
        if self._all is not None and tokens in self._all.cheaper_for:
            results = self._all(x, chosen[:tokens])
        else:
            results = self._sorted(x[:tokens], chosen[:tokens])
        routed = _sum_in_order((results.float() * weights[:tokens, :, None]).unbind(1))
        if self._shared is None:
            shared = torch.zeros_like(x, dtype=torch.float32)
        else:
            shared = self._shared(x).float()
        shared[:tokens] += routed
        return shared.to(x.dtype)


class SortedExperts:
    """The chosen experts' results, computed expert by expert.

    Tokens are sorted by expert; each expert's share is padded to a row count of the ladder, so that
    its products run on whole tiles and one buffer holds all of them.
    """

    def __init__(self, moe: MoeSpec, weights: Mapping[str, Tensor], linears: LinearFactory) -> None:
        self._moe = moe
        self._experts = [SwiGlu(weights, linears, f"experts.{i}.") for i in range(moe.experts)]

    def __call__(self, x: Tensor, chosen: Tensor) -> Tensor:
        """x [T, hidden] and experts [T, k] -> [T, k, hidden]."""
        sizes, places = self._places(chosen.reshape(-1).cpu().numpy())
        place = torch.from_numpy(places).to(x.device)
        gathered = x.new_zeros((sum(sizes), x.shape[1]))
        gathered.index_copy_(0, place, x.repeat_interleave(self._moe.top_k, dim=0))
        used = [(self._experts[i], size) for i, size in enumerate(sizes) if size]
        shares = gathered.split_with_sizes([size for _, size in used])
        inner = torch.cat([e.gate_up(share) for (e, _), share in zip(used, shares, strict=True)])
        shares = silu_mul(inner).split_with_sizes([size for _, size in used])
        outer = torch.cat([e.down(share) for (e, _), share in zip(used, shares, strict=True)])
        return outer[place].view(*chosen.shape, -1)

    def _places(self, experts: Ints) -> tuple[list[int], Ints]:
        """Rows of each expert's share, and where each (token, choice) goes in the buffer."""
        counts = np.bincount(experts, minlength=self._moe.experts)
        sizes = [padded_rows(count) if count else 0 for count in counts.tolist()]
        order = experts.argsort(kind="stable")
        shift = np.cumsum(sizes) - sizes - (np.cumsum(counts) - counts)
        places = np.empty_like(order)
        places[order] = np.arange(len(order)) + np.repeat(shift, counts)
        return sizes, places


class AllExperts:
    """Every expert's result for every token, of which the chosen ones are kept.

    Two products instead of two an expert, and no sorting: for few tokens and few experts the calls
    cost more than the results that are thrown away.
    """

    def __init__(self, moe: MoeSpec, gate_up: Linear, down: Linear, cheaper_for: range) -> None:
        self._experts, self._gate_up, self._down = moe.experts, gate_up, down
        self.cheaper_for = cheaper_for
        """From the fewest to the most tokens for which this is the cheaper way."""

    @classmethod
    def of(
        cls, moe: MoeSpec, weights: Mapping[str, Tensor], linears: LinearFactory
    ) -> "AllExperts | None":
        """None where it is never cheaper, or would change a token's bits."""
        cheaper_for = [tokens for tokens in range(1, LADDER[-1]) if _all_are_cheaper(moe, tokens)]
        share_bytes = 3 * weights["experts.0.down_proj.weight"].nbytes
        if not cheaper_for or moe.experts * share_bytes > _ALL_BYTES:
            return None
        gate, up, down = (
            [weights[f"experts.{i}.{part}_proj.weight"] for i in range(moe.experts)]
            for part in ("gate", "up", "down")
        )
        gate_up = linears.stacked([torch.cat(pair) for pair in zip(gate, up, strict=True)])
        abreast = linears.abreast(down)
        if gate_up is None or abreast is None:
            return None
        return cls(moe, gate_up, abreast, range(cheaper_for[0], cheaper_for[-1] + 1))

    def __call__(self, x: Tensor, chosen: Tensor) -> Tensor:
        """x [T, hidden] and experts [t, k] of its first t tokens -> [t, k, hidden]."""
        tokens, choices = chosen.shape
        inner = self._gate_up(x).view(len(x), self._experts, -1)
        outer = self._down(silu_mul(inner).transpose(0, 1).contiguous()).flatten(0, 1)
        place = chosen * len(x) + torch.arange(tokens, device=x.device)[:, None]
        return outer.index_select(0, place.flatten()).view(tokens, choices, -1)


def _all_are_cheaper(moe: MoeSpec, tokens: int) -> bool:
    """In rows computed and calls made, for as many tokens, against the chosen experts alone.

    The wide product of all experts reads all their weights, which takes as long as another call.
    """
    used = min(moe.experts, moe.top_k * tokens)
    chosen = max(moe.top_k * tokens, LADDER[0] * used) + CALL_COST_ROWS * used
    return moe.experts * padded_rows(tokens) + 2 * CALL_COST_ROWS <= chosen


def _sum_in_order(terms: tuple[Tensor, ...]) -> Tensor:
    """Left to right: an order that a reduction over the axis would not promise."""
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total
