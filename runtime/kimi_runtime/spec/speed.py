"""How fast one worker computes before anybody measured it: the day-0 figures of every estimate.

A worker is one tensor-parallel group. Its prefill of n tokens after m cached ones takes
`fixed + token * n + pair * n * (m + n/2)` seconds, its decode step of B sequences with K tokens of
KV together `fixed + row * B + experts * (1 - (1 - share)^B) + kv_token * K`: an expert is read once
however many tokens it gets, so the experts' part saturates once all of them are awake.
"""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.base import SpecModel
from kimi_runtime.spec.hardware import NODES, NodeSpec
from kimi_runtime.spec.model import KIMI_NANO, ModelSpec, QuantSpec
from kimi_runtime.spec.parallel import Sharding, weights_per_gpu
from kimi_runtime.spec.published import published
from kimi_runtime.spec.sizes import (
    KvDtype,
    active_parameters,
    kda_state_bytes,
    kv_bytes_per_token,
    state_bytes,
    weight_bytes_by_part,
)

LAYER_S = 100e-6
"""One layer of one decode step on the MI355X besides weights, experts, communication and KV.

Fitted to ATOM's published decode series of K2.5 MXFP4 at TP4: 6.28 ms for 61 layers, less the
0.18 ms that its 1.17 GB of other weights take to be read.
"""
LINEAR_FLOPS_SHARE = 0.31
"""Of bf16's dense rate, what a whole prefill sustains in its matrix products, all overheads in.

K2.7-Code at TP4 prefills 11.25k tokens a second and GPU (70 GFLOP each): 790 TFLOP/s of 2,520. The
P/D series of K2.5, another build, sustains 496; K3's day-0 figure, with its queueing, is 175.
"""
PREFILL_CHUNK_TOKENS = 8192


class SpeedPrior(SpecModel):
    """Seconds of prefill and decode of one kind of worker; formulas in this module's docstring."""

    prefill_fixed_s: NonNegativeFloat
    prefill_token_s: PositiveFloat
    prefill_pair_s: NonNegativeFloat = Field(
        description="Per (new token, token it attends to); full-attention layers only."
    )
    chunk_tokens: PositiveInt = Field(description="Prompt tokens of one step at most.")
    step_fixed_s: PositiveFloat
    step_row_s: NonNegativeFloat
    step_experts_s: NonNegativeFloat = Field(description="With every expert awake.")
    expert_share: Annotated[float, Field(ge=0, le=1)] = Field(
        description="Of all routed experts, those that one token wakes."
    )
    step_kv_token_s: NonNegativeFloat
    kv_token_bytes: PositiveInt
    state_bytes: NonNegativeInt = Field(
        description="Of a state checkpoint that a hit needs besides KV; 0 without linear attention."
    )
    relative_sd: PositiveFloat = Field(description="How far off these figures may be, as a share.")

    def prefill_s(self, new_tokens: float, cached_tokens: float = 0.0) -> float:
        """Seconds to compute `new_tokens` after `cached_tokens`, alone on the worker."""
        pairs = new_tokens * (cached_tokens + new_tokens / 2)
        linear = self.prefill_fixed_s + self.prefill_token_s * new_tokens
        return linear + self.prefill_pair_s * pairs if new_tokens > 0 else 0.0

    def step_s(self, rows: float, kv_tokens: float) -> float:
        """Seconds of one decode step of `rows` sequences that hold `kv_tokens` together."""
        awake = 1 - float((1 - self.expert_share) ** rows)
        return (
            self.step_fixed_s
            + self.step_row_s * rows
            + self.step_experts_s * awake
            + self.step_kv_token_s * kv_tokens
        )


NANO_ON_CPU = SpeedPrior(
    # Fitted by hand to processor seconds of `benchmarks/engine.py --seconds 1`, one thread of a
    # 2-core Xeon virtual machine with AMX, torch 2.13: prefills of 512 tokens after 0, 2048 and
    # 8192 take 107, 316 and 921 ms; decode steps of 1 x 128, 8 x 512, 32 x 512, 64 x 512 and
    # 32 x 2048 (rows x context) take 11.6, 29.4, 60.2, 95.7 and 157 ms.
    prefill_fixed_s=0.008,
    prefill_token_s=1.43e-4,
    prefill_pair_s=1.95e-7,
    chunk_tokens=512,
    step_fixed_s=0.0076,
    step_row_s=1e-4,
    step_experts_s=0.0144,
    expert_share=0.25,
    step_kv_token_s=1.96e-6,
    kv_token_bytes=kv_bytes_per_token(KIMI_NANO, "bf16"),
    state_bytes=0,
    relative_sd=0.3,
)


def speed_prior(
    model: ModelSpec,
    node: NodeSpec,
    *,
    tensor: int,
    kv_dtype: KvDtype = "fp8",
    quantisation: QuantSpec | None = None,
    relative_sd: float = 0.4,
) -> SpeedPrior:
    """The roofline of a model on `tensor` GPUs of a node, with the overheads published for MI355X.

    On a GPU for which nobody published them, a layer costs as much and a prefill sustains the same
    share of the data sheet; what is measured replaces all of it soon.
    """
    gpu = node.gpu
    memory = tensor * gpu.sustained_memory_rate
    linear = tensor * LINEAR_FLOPS_SHARE * gpu.bf16_flops
    attention = tensor * (gpu.achieved_bf16_flops or LINEAR_FLOPS_SHARE * gpu.bf16_flops)
    by_part = weight_bytes_by_part(model, quantisation or model.quantisation)
    shares = weights_per_gpu(model, Sharding(tensor=tensor), quantisation=quantisation)
    static = shares.total - by_part["routed_experts"] / tensor
    pair_flops = 2 * (model.qk_dim + model.v_dim) * model.heads * len(model.full_attention_layers)
    fixed_s = LAYER_S * model.layers + static / gpu.sustained_memory_rate
    return SpeedPrior(
        prefill_fixed_s=fixed_s,
        prefill_token_s=2 * active_parameters(model) / linear,
        prefill_pair_s=pair_flops / attention,
        chunk_tokens=PREFILL_CHUNK_TOKENS,
        step_fixed_s=fixed_s,
        step_row_s=_row_s(model, node, tensor),
        step_experts_s=by_part["routed_experts"] / memory,
        expert_share=model.moe.top_k / model.moe.experts,
        # MLA's rows are shared by all heads, so every rank reads them all
        step_kv_token_s=kv_bytes_per_token(model, kv_dtype) / gpu.sustained_memory_rate,
        kv_token_bytes=kv_bytes_per_token(model, kv_dtype),
        state_bytes=state_bytes(model),
        relative_sd=relative_sd,
    )


def known_prior(model: str, gpu: str, *, tensor: int) -> SpeedPrior:
    """The prior by the names people write; KIMI_NANO's on the CPU is measured.

    ConfigError for a model or GPU that is not published here.
    """
    node = NODES.get(gpu)
    if node is None:
        raise ConfigError(f"no GPU {gpu!r} is known; use one of {', '.join(NODES)}")
    if model == KIMI_NANO.name and gpu == "cpu":
        return NANO_ON_CPU
    return speed_prior(published(model), node, tensor=tensor)


def _row_s(model: ModelSpec, node: NodeSpec, tensor: int) -> float:
    """One more sequence in a step: its all-reduces, and its KDA state read and written."""
    state_s = 2 * kda_state_bytes(model) / (tensor * node.gpu.sustained_memory_rate)
    if tensor == 1:
        return state_s
    # two all-reduces a layer of bf16 activations; each moves its 1/tensor twice over a link
    reduced = 2 * model.layers * 2 * (2 * model.hidden / tensor)
    return state_s + reduced / node.gpu_link.rate
