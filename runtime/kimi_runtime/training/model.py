"""The K2 decoder as a differentiable function, for training a small one.

The formulas of `models.mla`, `models.moe` and `models.k2` over whole sequences from position 0,
with gradients: attention is expanded instead of absorbed, nothing is cached and nothing promises
equal bits for equal rows. Weights come as a mapping of *leaves* (`training.weights`), in the dtype
that products run in.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from kimi_runtime.models.rotary import Rotary
from kimi_runtime.models.rows import padded_rows
from kimi_runtime.spec.model import ModelSpec, MoeSpec
from kimi_runtime.training.autograd import rms_norm, swiglu

Weights = Mapping[str, Tensor]


class TrainingK2:
    """Hidden states and logits of token sequences [B, S], S up to `positions`."""

    def __init__(self, spec: ModelSpec, *, positions: int, dtype: torch.dtype) -> None:
        if spec.rope is None or spec.q_lora_rank is None:
            raise ValueError(f"{spec.name}: K2 has rotary positions and low-rank queries")
        moe = spec.moe
        if moe.groups > 1 or not moe.renormalise or not moe.shared:
            raise ValueError(f"{spec.name}: K2's experts are one group, renormalised, with shared")
        self.spec = spec
        rotary = Rotary(spec.rope, spec.qk_rope_dim, positions, torch.device("cpu"))
        turns = rotary.at(torch.arange(positions))[:, 0]
        self._cos = turns.real.repeat_interleave(2, dim=1)
        self._sin = torch.stack((-turns.imag, turns.imag), dim=-1).flatten(1)
        future = torch.full((positions, positions), -torch.inf).triu_(1)
        self._mask = future.to(dtype)
        # a product swaps the elements of each pair faster than indexing does, and as exactly
        pairs = torch.eye(spec.qk_rope_dim, dtype=dtype).view(-1, 2, spec.qk_rope_dim)
        self._swap = pairs.flip(1).flatten(0, 1)

    def hidden(self, weights: Weights, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids [B, S] -> normed hidden states [B * S, hidden], and how many tokens chose each
        expert [MoE layers, experts].
        """
        spec = self.spec
        x = functional.embedding(ids.flatten(), weights["embedding"])
        loads = []
        for index in range(spec.layers):
            own = _under(weights, f"{index}.")
            x = x + self._attention(own, rms_norm(x, own["norm"], spec.norm_eps), ids.shape[1])
            normed = rms_norm(x, own["ffn_norm"], spec.norm_eps)
            if index < spec.first_dense_layers:
                x = x + _feed_forward(normed, own["gate_up"], own["down"])
            else:
                out, load = _experts(spec.moe, own, normed)
                x = x + out
                loads.append(load)
        return rms_norm(x, weights["norm"], spec.norm_eps), torch.stack(loads)

    @staticmethod
    def logits(weights: Weights, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, vocab], fp32."""
        return functional.linear(hidden, weights["head"]).float()

    def _attention(self, own: Weights, x: Tensor, length: int) -> Tensor:
        """x [B * S, hidden] -> the same shape; each query sees its sequence up to itself."""
        spec = self.spec
        down = functional.linear(x, own["down_qkv"])
        ranks = (own["q_norm"].shape[0], spec.kv_lora_rank, spec.qk_rope_dim)
        q, latent, k_rope = down.split_with_sizes(ranks, -1)
        q = functional.linear(rms_norm(q, own["q_norm"], spec.latent_norm_eps), own["q_up"])
        latent = rms_norm(latent, own["kv_norm"], spec.latent_norm_eps)
        kv = functional.linear(latent, own["kv_up"])
        kv = kv.view(-1, length, spec.heads, spec.qk_nope_dim + spec.v_dim)
        q = q.view(-1, length, spec.heads, spec.qk_dim)
        q_nope, q_rope = q.split_with_sizes((spec.qk_nope_dim, spec.qk_rope_dim), -1)
        k_nope, v = kv.split_with_sizes((spec.qk_nope_dim, spec.v_dim), -1)
        ropes = torch.cat((q_rope, k_rope.view(-1, length, 1, spec.qk_rope_dim)), 2)
        ropes = self._rotate(ropes, length)
        q = torch.cat((q_nope, ropes[:, :, :-1]), -1)
        k = torch.cat((k_nope, ropes[:, :, -1:].expand(-1, -1, spec.heads, -1)), -1)
        q, k, v = (_by_head(part) for part in (q, k, v))
        mask = self._mask[:length, :length].expand(len(q), -1, -1)
        scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=spec.attention_scale)
        out = torch.bmm(scores.softmax(-1), v).view(-1, spec.heads, length, spec.v_dim)
        return functional.linear(out.transpose(1, 2).reshape(len(x), -1), own["o"])

    def _rotate(self, x: Tensor, length: int) -> Tensor:
        """x [B, S, H, rope] -> the same, interleaved pairs turned by their position, in fp32."""
        cos, sin = self._cos[:length, None], self._sin[:length, None]
        return (x * cos + functional.linear(x, self._swap) * sin).to(x.dtype)


def _under(weights: Weights, prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in weights.items()
        if name.startswith(prefix)
    }


def _by_head(x: Tensor) -> Tensor:
    """[B, S, H, D] -> [B * H, S, D]."""
    return x.transpose(1, 2).flatten(0, 1)


def _feed_forward(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return functional.linear(swiglu(functional.linear(x, gate_up)), down)


def _experts(moe: MoeSpec, own: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, hidden] -> routed and shared experts' sum, and the load [experts]."""
    chances = functional.linear(x.float(), own["router"].float()).sigmoid()
    chosen = (chances.detach() + own["router_bias"]).topk(moe.top_k, dim=-1).indices
    weights = chances.gather(1, chosen)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * moe.scaling
    load = torch.bincount(chosen.flatten(), minlength=moe.experts)
    sizes, place = _places(chosen.flatten(), load)
    rows = x.new_zeros(sum(sizes), x.shape[1])
    rows = rows.index_copy(0, place, x.repeat_interleave(moe.top_k, dim=0))
    inner = swiglu(_each(rows, sizes, own["gate_up"]))
    outer = _each(inner, sizes, own["down"])[place].view(len(x), moe.top_k, -1)
    routed = torch.bmm(weights.to(x.dtype)[:, None], outer)[:, 0]
    shared = _feed_forward(x, own["shared_gate_up"], own["shared_down"])
    return routed + shared, load.float()


def _places(chosen: Tensor, load: Tensor) -> tuple[list[int], Tensor]:
    """Rows of each expert's share, and where each choice goes among all shares.

    Shares are padded to a few row counts: a matrix library prepares a kernel for each it meets.
    """
    sizes = [padded_rows(count) if count else 0 for count in load.tolist()]
    order = chosen.argsort(stable=True)
    starts = torch.tensor([0, *sizes[:-1]]).cumsum(0)
    shift = starts - (load.cumsum(0) - load)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order)) + shift.repeat_interleave(load)
    return sizes, place


def _each(rows: Tensor, sizes: list[int], weights: Tensor) -> Tensor:
    """Every expert's product with its share, one below the other."""
    shares = zip(rows.split_with_sizes(sizes), weights.unbind(0), strict=True)
    return torch.cat([functional.linear(share, weight) for share, weight in shares])
