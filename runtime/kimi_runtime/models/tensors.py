"""The tensors of a K2 checkpoint: Hugging Face names, shapes and dtypes, in one list.

Random weights, the loader and the decoder all go by it.
"""

from dataclasses import dataclass
from typing import Literal

from kimi_runtime.spec.model import ModelSpec

Dtype = Literal["bfloat16", "float32"]
Part = Literal["embedding", "matrix", "norm", "bias", "head"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor. `part` says what it is for, which decides how random values are scaled."""

    shape: tuple[int, ...]
    part: Part
    dtype: Dtype = "bfloat16"


def k2_tensors(spec: ModelSpec) -> dict[str, TensorSpec]:
    """Every tensor by name, in the order of a forward pass."""
    tensors = {"model.embed_tokens.weight": TensorSpec((spec.vocab_size, spec.hidden), "embedding")}
    for index in range(spec.layers):
        prefix = f"model.layers.{index}."
        tensors |= {prefix + name: tensor for name, tensor in _layer(spec, index).items()}
    tensors["model.norm.weight"] = TensorSpec((spec.hidden,), "norm")
    if not spec.tied_embeddings:
        tensors["lm_head.weight"] = TensorSpec((spec.vocab_size, spec.hidden), "head")
    return tensors


def _layer(spec: ModelSpec, index: int) -> dict[str, TensorSpec]:
    norms = ("input_layernorm", "post_attention_layernorm")
    tensors = {f"{name}.weight": TensorSpec((spec.hidden,), "norm") for name in norms}
    tensors |= {f"self_attn.{name}": tensor for name, tensor in _attention(spec).items()}
    if index < spec.first_dense_layers:
        return tensors | _mlp("mlp.", spec.hidden, spec.dense_ffn)
    moe = spec.moe
    tensors["mlp.gate.weight"] = TensorSpec((moe.experts, spec.hidden), "matrix")
    tensors["mlp.gate.e_score_correction_bias"] = TensorSpec((moe.experts,), "bias", "float32")
    for expert in range(moe.experts):
        tensors |= _mlp(f"mlp.experts.{expert}.", spec.hidden, moe.ffn)
    if moe.shared:
        tensors |= _mlp("mlp.shared_experts.", spec.hidden, moe.shared * moe.ffn)
    return tensors


def _attention(spec: ModelSpec) -> dict[str, TensorSpec]:
    queries = spec.heads * spec.qk_dim
    tensors = {}
    if spec.q_lora_rank is None:
        tensors["q_proj.weight"] = TensorSpec((queries, spec.hidden), "matrix")
    else:
        tensors["q_a_proj.weight"] = TensorSpec((spec.q_lora_rank, spec.hidden), "matrix")
        tensors["q_a_layernorm.weight"] = TensorSpec((spec.q_lora_rank,), "norm")
        tensors["q_b_proj.weight"] = TensorSpec((queries, spec.q_lora_rank), "matrix")
    up = spec.heads * (spec.qk_nope_dim + spec.v_dim)
    return tensors | {
        "kv_a_proj_with_mqa.weight": TensorSpec((spec.kv_row_dim, spec.hidden), "matrix"),
        "kv_a_layernorm.weight": TensorSpec((spec.kv_lora_rank,), "norm"),
        "kv_b_proj.weight": TensorSpec((up, spec.kv_lora_rank), "matrix"),
        "o_proj.weight": TensorSpec((spec.hidden, spec.heads * spec.v_dim), "matrix"),
    }


def _mlp(prefix: str, hidden: int, ffn: int) -> dict[str, TensorSpec]:
    return {
        f"{prefix}gate_proj.weight": TensorSpec((ffn, hidden), "matrix"),
        f"{prefix}up_proj.weight": TensorSpec((ffn, hidden), "matrix"),
        f"{prefix}down_proj.weight": TensorSpec((hidden, ffn), "matrix"),
    }
