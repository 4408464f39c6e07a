"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    c_q = norm(x W_qa);  q = c_q W_qb, per head [q_n | q_r]
    x W_kva = [c | k_r];  the cached row is [norm(c) | R(k_r)], shared by all heads
    absorbed:  score = s (q_n W_UK . c + R(q_r) . R(k_r)),  o = (sum p c) W_UV
    expanded:  k_n = W_UK c, v = W_UV c per head, then ordinary attention

W_UK and W_UV are the halves of `kv_b_proj` of each head. The engine always computes the absorbed
form, for prompts too: a token's bits may not depend on whether it came in a prompt or alone.
`expanded` is the definition it is tested against.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from kimi_runtime.models.attention import SpanAttention
from kimi_runtime.models.cache import KvCache
from kimi_runtime.models.linear import Linear, LinearFactory
from kimi_runtime.models.norm import RmsNorm
from kimi_runtime.models.rotary import rotate
from kimi_runtime.models.spans import StepInputs
from kimi_runtime.spec.model import ModelSpec

Angles = tuple[Tensor, Tensor]
"""cos and sin [T, 1, rope / 2] of the step's positions."""


class LatentAttention:
    """One layer's attention. `weights` are the layer's `self_attn.*`, without that prefix."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor],
        linears: LinearFactory,
        attention: SpanAttention,
    ) -> None:
        self._spec, self._attention = spec, attention
        eps = spec.latent_norm_eps
        self._q_a: Linear | None = None
        if spec.q_lora_rank is not None:
            self._q_a = linears.linear(weights["q_a_proj.weight"])
            self._q_norm = RmsNorm(weights["q_a_layernorm.weight"], eps)
            self._q = linears.linear(weights["q_b_proj.weight"])
        else:
            self._q = linears.linear(weights["q_proj.weight"])
        self._kv_a = linears.linear(weights["kv_a_proj_with_mqa.weight"])
        self._kv_norm = RmsNorm(weights["kv_a_layernorm.weight"], eps)
        self._o = linears.linear(weights["o_proj.weight"])
        per_head = weights["kv_b_proj.weight"].view(spec.heads, -1, spec.kv_lora_rank)
        up_k, up_v = per_head.split_with_sizes((spec.qk_nope_dim, spec.v_dim), dim=1)
        self._up_k, self._up_v = up_k, up_v
        self._absorb_k = linears.per_head(up_k)  # [H, nope, latent]
        self._absorb_v = linears.per_head(up_v.transpose(1, 2))  # [H, latent, v]

    def __call__(
        self, x: Tensor, step: StepInputs, angles: Angles | None, cache: KvCache, layer: int
    ) -> Tensor:
        """x [T, hidden] -> [T, hidden]; writes the step's rows to the cache first."""
        q_nope, q_rope = self._queries(x, angles)
        rows = self._rows(x, angles)
        cache.write(layer, step.slots, rows[: step.tokens])
        latent = self._absorb_k(q_nope.transpose(0, 1).contiguous()).transpose(0, 1)
        queries = torch.cat((latent, q_rope), dim=-1)
        out = queries.new_zeros((*queries.shape[:2], self._spec.kv_lora_rank))
        for group in step.groups:
            out[group.tokens] = self._attention(queries[group.tokens], cache, layer, group)
        heads = self._absorb_v(out.transpose(0, 1).contiguous())
        return self._o(heads.transpose(0, 1).reshape(len(x), -1))

    def expanded(self, x: Tensor, angles: Angles | None) -> Tensor:
        """The same for one request's tokens from position 0 on, by ordinary causal attention."""
        q_nope, q_rope = self._queries(x, angles)
        latent, k_rope = self._rows(x, angles).split_with_sizes(
            (self._spec.kv_lora_rank, self._spec.qk_rope_dim), dim=-1
        )
        keys = torch.einsum("hdc,tc->thd", self._up_k, latent)
        values = torch.einsum("hdc,tc->thd", self._up_v, latent)
        scores = torch.einsum("qhd,khd->hqk", q_nope, keys)
        scores = scores + torch.einsum("qhd,kd->hqk", q_rope, k_rope)
        future = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1)
        scaled = scores.float() * self._spec.attention_scale
        weights = scaled.masked_fill(future, -torch.inf).softmax(dim=-1).to(x.dtype)
        return self._o(torch.einsum("hqk,khd->qhd", weights, values).flatten(1))

    def _queries(self, x: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor]:
        """[T, H, nope] and [T, H, rope], the latter rotated."""
        spec = self._spec
        q = self._q(self._q_norm(self._q_a(x)) if self._q_a is not None else x)
        nope, rope = q.view(len(x), spec.heads, -1).split_with_sizes(
            (spec.qk_nope_dim, spec.qk_rope_dim), -1
        )
        return nope, rope if angles is None else rotate(rope, *angles)

    def _rows(self, x: Tensor, angles: Angles | None) -> Tensor:
        """What is cached of each token: [T, latent + rope]."""
        latent, rope = self._kv_a(x).split_with_sizes(
            (self._spec.kv_lora_rank, self._spec.qk_rope_dim), -1
        )
        if angles is not None:
            rope = rotate(rope[:, None], *angles)[:, 0]
        return torch.cat((self._kv_norm(latent), rope), dim=-1)
