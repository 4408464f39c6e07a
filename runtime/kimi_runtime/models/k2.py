"""The K2 family's decoder: dense layers first, then mixtures of experts, MLA in all of them."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from kimi_runtime.models.attention import SpanAttention, open_kernel
from kimi_runtime.models.cache import KvCache
from kimi_runtime.models.linear import LinearFactory
from kimi_runtime.models.mla import LatentAttention
from kimi_runtime.models.moe import MixtureOfExperts, SwiGlu
from kimi_runtime.models.norm import RmsNorm
from kimi_runtime.models.rotary import Angles, Rotary
from kimi_runtime.models.rows import padded_rows
from kimi_runtime.models.spans import StepBuilder, StepInputs, TokenRun
from kimi_runtime.models.tensors import require_k2
from kimi_runtime.spec.model import ModelSpec


class K2Model:
    """Logits of token runs over a paged cache.

    In bf16 a run's logits are bitwise the same whatever else is in the step and however its tokens
    are divided into steps; in fp32 they are not (the matrix products' order then follows the
    batch). The promise holds per device and number of threads.
    """

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Tensor]) -> None:
        require_k2(spec)
        self.spec = spec
        self._embedding = weights["model.embed_tokens.weight"]
        self.dtype, self.device = self._embedding.dtype, self._embedding.device
        linears = LinearFactory(promise=self.dtype == torch.bfloat16)
        attention = SpanAttention(
            open_kernel(
                heads=spec.heads,
                row_dim=spec.kv_row_dim,
                scale=spec.attention_scale,
                like=self._embedding,
                promise=linears.promise,
            )
        )
        self.geometry = attention.geometry
        self.measured = linears.measured
        self.layers = [
            DecoderLayer(spec, index, weights, linears, attention) for index in range(spec.layers)
        ]
        self._norm = RmsNorm(weights["model.norm.weight"], spec.norm_eps)
        head = "model.embed_tokens.weight" if spec.tied_embeddings else "lm_head.weight"
        self._head = linears.linear(weights[head])
        self._rotary = (
            Rotary(spec.rope, spec.qk_rope_dim, spec.max_positions, self.device)
            if spec.rope is not None
            else None
        )

    def angles(self, positions: Tensor) -> Angles | None:
        """For positions [T]; None for a model that does not rotate."""
        return None if self._rotary is None else self._rotary.at(positions)

    def step_builder(self, cache: KvCache) -> StepBuilder:
        """What turns runs into this model's inputs."""
        return StepBuilder(cache, self.geometry, self.spec.heads, self.device)

    @torch.inference_mode()
    def forward(
        self,
        step: StepInputs,
        cache: KvCache,
        after_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Logits [S, vocab_size] fp32 of the step's sampled tokens; fills the cache.

        `after_layer` is called with each layer's index once that layer's work is queued, which on
        a CPU means done.
        """
        x = functional.embedding(step.ids, self._embedding)
        angles = self.angles(step.positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, step, angles, cache, index)
            if after_layer is not None:
                after_layer(index)
        if not len(step.sampled):
            return x.new_zeros((0, self.spec.vocab_size), dtype=torch.float32)
        return self._head(self._norm(x[step.sampled])).float()

    def logits(self, runs: list[TokenRun], cache: KvCache) -> Tensor:
        """`forward` of the runs as one step."""
        tokens = sum(len(run.ids) for run in runs)
        return self.forward(self.step_builder(cache).build(runs, padded_rows(tokens)), cache)


class DecoderLayer:
    """x + attention(norm x), then x + feed_forward(norm x)."""

    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        weights: Mapping[str, Tensor],
        linears: LinearFactory,
        attention: SpanAttention,
    ) -> None:
        own = _under(weights, f"model.layers.{index}.")
        self._norm = RmsNorm(own["input_layernorm.weight"], spec.norm_eps)
        self.attention = LatentAttention(spec, _under(own, "self_attn."), linears, attention)
        self._ffn_norm = RmsNorm(own["post_attention_layernorm.weight"], spec.norm_eps)
        mlp = _under(own, "mlp.")
        self.experts: MixtureOfExperts | None = None
        if index < spec.first_dense_layers:
            self._dense = SwiGlu(mlp, linears, "")
        else:
            self.experts = MixtureOfExperts(spec.moe, mlp, linears)

    def __call__(
        self, x: Tensor, step: StepInputs, angles: Angles | None, cache: KvCache, index: int
    ) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        x = x + self.attention(self._norm(x), step, angles, cache, index)
        normed = self._ffn_norm(x)
        if self.experts is None:
            return x + self._dense(normed)
        return x + self.experts(normed, step.tokens)


def _under(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those whose names begin so, without it. By names alone: asking for a value may read it."""
    return {name.removeprefix(prefix): weights[name] for name in weights if name.startswith(prefix)}
