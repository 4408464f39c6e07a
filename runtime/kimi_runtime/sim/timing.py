"""How long a step takes on a simulated worker: a roofline with the published kernel times. Pure.

A step computes one token for each of `rows` sequences that generate, and `new_tokens` of prompts.
Per tensor rank it takes

`launch_s * operations + moe(T) + linear(T) + reduce(T) + kv * K + (state + row_s) * rows
+ crowd_s * max(rows - 128, 0) + pair * pairs`

with T = rows + new_tokens, K the KV tokens that the generating rows hold and `pairs` the (new
token, token it attends to) pairs of the prompts. `moe` is interpolated in aiter's tuned kernel
tables, or a roofline where there is none; `linear` is the larger of reading the other weights and
multiplying by them; `reduce` two all-reduces a layer over the links of the rank. What data sheets
and kernel tables do not tell are `Constants`, fitted in `sim.fit`.

What operations a layer has is counted from the models' structure, for a stack that fuses what
ATOM's does: K3's layers have more of them than K2's, which is why they take longer.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Protocol

from kimi_runtime.errors import ConfigError
from kimi_runtime.sim.published import published_figures
from kimi_runtime.spec.hardware import NODES, NodeSpec
from kimi_runtime.spec.model import ModelSpec
from kimi_runtime.spec.published import published
from kimi_runtime.spec.sizes import kda_state_bytes, kv_bytes_per_token, parameters, state_bytes

MLA_OPERATIONS = (
    "norm and quantise", "q_a and kv_a", "their norms", "q_b", "rotate and write the cache",
    "absorb W_UK", "attention", "merge its splits", "absorb W_UV", "o", "all-reduce",
)  # fmt: skip
KDA_OPERATIONS = (
    "norm and quantise", "q, k, v", "convolution", "forget gate down", "forget gate up", "beta",
    "gate activation", "output gate", "normalise q and k", "recurrence", "norm and gate", "o",
    "all-reduce",
)  # fmt: skip
MOE_OPERATIONS = (
    "norm and quantise", "router", "top-k", "sort", "quantise by expert", "stage 1", "stage 2",
    "shared up", "shared activation", "shared down", "add", "all-reduce",
)  # fmt: skip
OUTPUT_GATE_OPERATIONS = ("gate", "multiply")
LATENT_OPERATIONS = ("down", "norm", "up")
ATTN_RES_OPERATIONS = ("attention scores", "mix", "ffn scores", "mix")
PREFILL_CHUNK_TOKENS = 8192
CROWD_ROWS = 128
"""From here on every expert is awake in a step, and more rows no longer come for almost nothing."""


@dataclass(frozen=True, slots=True)
class Constants:
    """What has to be fitted; seconds."""

    launch_s: float
    """Of one operation in a step, besides what it moves or multiplies."""
    row_s: float
    """Sampling and bookkeeping of one generating sequence in a step."""
    crowd_s: float
    """The same for each row beyond `CROWD_ROWS`: samplers and small products grow with rows."""
    prompt_s: float
    """For how long a prompt that is handed over occupies its worker besides being computed."""
    hand_off_s: float
    """From there until the decode worker begins, besides moving the bytes."""


class StepTiming(Protocol):
    """What the simulator has to know of a worker: how long its steps take, and what it is."""

    @property
    def model(self) -> ModelSpec:
        """What it serves."""

    @property
    def node(self) -> NodeSpec:
        """What it runs on."""

    @property
    def constants(self) -> Constants:
        """Times besides those of steps."""

    @property
    def kv_token_s(self) -> float:
        """Of each KV token that the generating rows of a step hold."""

    @property
    def kv_token_bytes(self) -> int:
        """Of a token's KV."""

    def step_s(self, rows: int, kv_tokens: float, new_tokens: int = 0, pairs: float = 0.0) -> float:
        """Seconds of one step; 0 if there is nothing to do."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One worker: a model on `tensor` GPUs of a node."""

    model: ModelSpec
    node: NodeSpec
    tensor: int
    constants: Constants
    fixed_s: float = field(init=False)
    row_s: float = field(init=False)
    """Of a generating row besides its share of the operations' work."""
    kv_token_s: float = field(init=False)
    pair_s: float = field(init=False)
    kv_token_bytes: int = field(init=False)
    state_bytes: int = field(init=False)
    _moe: tuple[tuple[float, ...], tuple[float, ...]] = field(init=False)
    _parts: tuple[tuple[float, float], ...] = field(init=False)
    _head: tuple[float, float] = field(init=False)
    _reduce_s: float = field(init=False)
    _by_tokens: dict[int, float] = field(default_factory=dict, init=False, compare=False)

    def __post_init__(self) -> None:
        """Work out what is the same for every step."""
        model, gpu, tensor, known = self.model, self.node.gpu, self.tensor, self.constants
        memory = gpu.sustained_memory_rate
        bf16 = gpu.achieved_bf16_flops or 0.5 * gpu.bf16_flops
        state_s = 2 * kda_state_bytes(model) / (tensor * memory)
        pair_flops = 2 * (model.qk_dim + model.v_dim) * model.heads
        pair_flops *= len(model.full_attention_layers)
        size = kv_bytes_per_token(model, "fp8")
        values = {
            "fixed_s": known.launch_s * operations(model),
            "row_s": known.row_s + state_s,
            "kv_token_s": size / memory,
            "pair_s": pair_flops / (tensor * bf16),
            "kv_token_bytes": size,
            "state_bytes": state_bytes(model),
            "_moe": _moe_table(model, self.node, tensor),
            "_parts": _linear_parts(model, self.node, tensor),
            "_head": (2 * parameters(model).head / tensor / memory,
                      2 * parameters(model).head / tensor / bf16),
            "_reduce_s": _reduce_s(model, self.node, tensor),
        }  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def work_s(self, tokens: int) -> float:
        """Experts, other weights and all-reduces of `tokens`; without the vocabulary's head."""
        known = self._by_tokens.get(tokens)
        if known is None:
            linear = sum(max(read_s, token_s * tokens) for read_s, token_s in self._parts)
            known = self._moe_s(tokens) + linear + self._reduce_s * tokens
            self._by_tokens[tokens] = known
        return known

    def step_s(self, rows: int, kv_tokens: float, new_tokens: int = 0, pairs: float = 0.0) -> float:
        """Seconds of one step; 0 if there is nothing to do."""
        if not rows and not new_tokens:
            return 0.0
        read_s, token_s = self._head
        return (
            self.fixed_s
            + self.work_s(rows + new_tokens)
            + max(read_s, token_s * max(rows, 1))
            + self.row_s * rows
            + self.constants.crowd_s * max(rows - CROWD_ROWS, 0)
            + self.kv_token_s * kv_tokens
            + self.pair_s * pairs
        )

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Seconds of a prompt alone on the worker, in chunks of 8,192 tokens."""
        total, at, end = 0.0, cached_tokens, cached_tokens + new_tokens
        while at < end:
            count = min(PREFILL_CHUNK_TOKENS, end - at)
            total += self.step_s(0, 0.0, count, count * (at + count / 2))
            at += count
        return total

    def _moe_s(self, tokens: int) -> float:
        sizes, seconds = self._moe
        layers = self.model.moe_layers
        if tokens >= sizes[-1]:
            return layers * seconds[-1] * tokens / sizes[-1]
        index = bisect_left(sizes, tokens)
        if sizes[index] == tokens or index == 0:
            return layers * seconds[index]
        low, high = sizes[index - 1], sizes[index]
        share = math.log(tokens / low) / math.log(high / low)
        return layers * float(seconds[index - 1] ** (1 - share) * seconds[index] ** share)


def timing_of(model: str, gpu: str, *, tensor: int, constants: Constants) -> Timing:
    """By the names people write; ConfigError for what is not published."""
    node = NODES.get(gpu)
    if node is None:
        raise ConfigError(f"no GPU {gpu!r} is known; use one of {', '.join(NODES)}")
    return Timing(published(model), node, tensor, constants)


def operations(model: ModelSpec) -> int:
    """Operations of one step."""
    full, linear = len(model.full_attention_layers), len(model.kda_layers)
    count = full * len(MLA_OPERATIONS) + linear * len(KDA_OPERATIONS)
    if model.mla_output_gate:
        count += full * len(OUTPUT_GATE_OPERATIONS)
    count += model.moe_layers * len(MOE_OPERATIONS)
    if model.moe.latent:
        count += model.moe_layers * len(LATENT_OPERATIONS)
    if model.attn_res_block:
        count += model.layers * len(ATTN_RES_OPERATIONS)
    return count


def _moe_table(
    model: ModelSpec, node: NodeSpec, tensor: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Tokens and seconds of one MoE layer."""
    table = published_figures().moe_kernel_us
    known = table.seconds(f"kimi-{model.family} tp{tensor}") if node.gpu.arch == "gfx950" else None
    if known is not None:
        return tuple(float(size) for size in table.tokens[: len(known)]), known
    expert = 0.53125 * 3 * (model.moe.latent or model.hidden) * model.moe.ffn / tensor
    gpu, share = node.gpu, model.moe.top_k / model.moe.experts
    flops = gpu.achieved_mxfp4_flops or gpu.achieved_bf16_flops or 0.5 * gpu.bf16_flops
    token_s = 2 * model.moe.top_k * expert / 0.53125 / flops
    sizes = tuple(float(2**power) for power in range(16))
    seconds = tuple(
        max(model.moe.experts * (1 - (1 - share) ** size) * expert / gpu.sustained_memory_rate,
            token_s * size)
        for size in sizes
    )  # fmt: skip
    return sizes, seconds


def _linear_parts(model: ModelSpec, node: NodeSpec, tensor: int) -> tuple[tuple[float, float], ...]:
    """Per part besides experts and head: seconds to read its weights, seconds per token.

    Attention runs in fp8, all else in bf16, as ATOM serves these models. Down-projections, latent
    projections and routers are whole on every rank.
    """
    counts, gpu = parameters(model), node.gpu
    memory = gpu.sustained_memory_rate
    bf16 = gpu.achieved_bf16_flops or 0.5 * gpu.bf16_flops
    fp8 = gpu.achieved_fp8_flops or gpu.fp8_flops or bf16
    parts = (
        (counts.attention / tensor, 1, fp8),
        (counts.attention_down, 1, fp8),
        (counts.shared_experts / tensor, 2, bf16),
        (counts.dense_ffn / tensor, 2, bf16),
        (counts.latent, 2, bf16),
        (counts.router, 2, bf16),
        (counts.indexer, 2, bf16),
    )
    return tuple(
        (count * size / memory, 2 * count / flops) for count, size, flops in parts if count
    )


def _reduce_s(model: ModelSpec, node: NodeSpec, tensor: int) -> float:
    """All-reduces of one token's bf16 activations; each rank's part crosses a link twice."""
    if tensor == 1:
        return 0.0
    width = model.hidden + (model.moe.latent or model.hidden)
    return model.layers * 2 * (2 * width / tensor) / node.gpu_link.rate
