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
from torch.nn import functional

from kimi_runtime.models.attention import SpanAttention
from kimi_runtime.models.cache import KvCache
from kimi_runtime.models.linear import LinearFactory
from kimi_runtime.models.norm import RmsNorm
from kimi_runtime.models.rotary import Angles, rotate
from kimi_runtime.models.spans import StepInputs
from kimi_runtime.spec.model import ModelSpec


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
        down = weights["kv_a_proj_with_mqa.weight"]
        if spec.q_lora_rank is not None:  # both read x: one product instead of two
            down = torch.cat((weights["q_a_proj.weight"], down))
            self._q_norm = RmsNorm(weights["q_a_layernorm.weight"], eps)
        self._down = linears.linear(down)
        self._kv_norm = RmsNorm(weights["kv_a_layernorm.weight"], eps)
        self._q = linears.linear(
            weights["q_proj.weight" if spec.q_lora_rank is None else "q_b_proj.weight"]
        )
        self._o = linears.linear(weights["o_proj.weight"])
        per_head = weights["kv_b_proj.weight"].view(spec.heads, -1, spec.kv_lora_rank)
        up_k, up_v = per_head.split_with_sizes((spec.qk_nope_dim, spec.v_dim), dim=1)
        self._up_k, self._up_v = up_k, up_v
        self._absorb_k = linears.per_head(up_k)  # [H, nope, latent]
        # attention's results are as wide as its rows; what the keys' rotated part gives is no value
        whole_rows = functional.pad(up_v.transpose(1, 2), (0, 0, 0, spec.qk_rope_dim))
        self._absorb_v = linears.per_head(whole_rows)  # [H, row_dim, v]

    def __call__(
        self, x: Tensor, step: StepInputs, angles: Angles | None, cache: KvCache, layer: int
    ) -> Tensor:
        """x [T, hidden] -> [T, hidden]; writes the step's rows to the cache first."""
        q_nope, q_rope, latent, k_rope = self._project(x, angles)
        cache.write(layer, step.slots, torch.cat((latent, k_rope), dim=-1)[: step.tokens])
        # head by head, as the absorbing products want it, and group by group: what lies between
        # them is as wide as all heads' latents, and of more tokens it would not stay in cache
        q_nope, q_rope = (part.transpose(0, 1).contiguous() for part in (q_nope, q_rope))
        parts = []
        for group in step.groups:
            absorbed = self._absorb_k(q_nope[:, group.tokens])
            queries = torch.cat((absorbed, q_rope[:, group.tokens]), dim=-1)
            mixed = self._attention(queries, cache, layer, group)
            parts.append(self._absorb_v(mixed).transpose(0, 1).flatten(1))
        padding = len(x) - step.tokens
        if padding:
            parts.append(x.new_zeros((padding, parts[0].shape[1])))
        return self._o(torch.cat(parts) if len(parts) > 1 else parts[0])

    def expanded(self, x: Tensor, angles: Angles | None) -> Tensor:
        """The same for one request's tokens from position 0 on, by ordinary causal attention."""
        q_nope, q_rope, latent, k_rope = self._project(x, angles)
        keys = torch.einsum("hdc,tc->thd", self._up_k, latent)
        values = torch.einsum("hdc,tc->thd", self._up_v, latent)
        scores = torch.einsum("qhd,khd->hqk", q_nope, keys)
        scores = scores + torch.einsum("qhd,kd->hqk", q_rope, k_rope)
        future = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1)
        scaled = scores.float() * self._spec.attention_scale
        weights = scaled.masked_fill(future, -torch.inf).softmax(dim=-1).to(x.dtype)
        return self._o(torch.einsum("hqk,khd->qhd", weights, values).flatten(1))

    def _project(self, x: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q_n [T, H, nope], R(q_r) [T, H, rope], norm(c) [T, latent] and R(k_r) [T, rope]."""
        spec = self._spec
        down = self._down(x)
        latent, k_rope = down[:, -spec.kv_row_dim :].split_with_sizes(
            (spec.kv_lora_rank, spec.qk_rope_dim), -1
        )
        q = self._q(x if spec.q_lora_rank is None else self._q_norm(down[:, : spec.q_lora_rank]))
        q_nope, q_rope = q.view(len(x), spec.heads, -1).split_with_sizes(
            (spec.qk_nope_dim, spec.qk_rope_dim), -1
        )
        if angles is not None:
            turned = rotate(torch.cat((q_rope, k_rope[:, None]), dim=1), angles)
            q_rope, k_rope = turned[:, :-1], turned[:, -1]
        return q_nope, q_rope, self._kv_norm(latent), k_rope
