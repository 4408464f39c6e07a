"""The tensors of a K2 checkpoint: Hugging Face names, shapes and dtypes, in one list.

Random weights, the loader and the decoder all go by it.
"""

import math
from dataclasses import dataclass
from typing import Literal

from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.model import ModelSpec, QuantSpec

Dtype = Literal["bfloat16", "float32"]
Part = Literal["embedding", "matrix", "norm", "bias", "head"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor. `part` says what it is for, which decides how random values are scaled."""

    shape: tuple[int, ...]
    part: Part
    dtype: Dtype = "bfloat16"

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * (2 if self.dtype == "bfloat16" else 4)


def k2_tensors(spec: ModelSpec) -> dict[str, TensorSpec]:
    """Every tensor by name, in the order of a forward pass. ConfigError for another family."""
    require_k2(spec)
    tensors = {"model.embed_tokens.weight": TensorSpec((spec.vocab_size, spec.hidden), "embedding")}
    for index in range(spec.layers):
        prefix = f"model.layers.{index}."
        tensors |= {prefix + name: tensor for name, tensor in _layer(spec, index).items()}
    tensors["model.norm.weight"] = TensorSpec((spec.hidden,), "norm")
    if not spec.tied_embeddings:
        tensors["lm_head.weight"] = TensorSpec((spec.vocab_size, spec.hidden), "head")
    return tensors


def require_k2(spec: ModelSpec) -> None:
    """Raise ConfigError unless the K2 decoder computes what `spec` describes."""
    extras = {
        "kda": spec.kda,
        "dsa": spec.dsa,
        "attn_res_block": spec.attn_res_block,
        "mla_output_gate": spec.mla_output_gate or None,
        "moe.latent": spec.moe.latent,
        "quantisation": None if _can_read(spec.quantisation) else spec.quantisation,
        "activation": spec.activation if spec.activation != "silu" else None,
    }
    present = [name for name, value in extras.items() if value is not None]
    if spec.family != "k2" or present:
        raise ConfigError(
            f"model {spec.name} of family {spec.family} cannot be computed by the K2 decoder"
            + (f" (it has {', '.join(present)})" if present else "")
            + "; choose a model of the K2 family in bf16, block FP8 or MXFP4"
        )


def _can_read(quantisation: QuantSpec | None) -> bool:
    """Whether checkpoints stored this way can be read."""
    if quantisation is None:
        return True
    parts = set(quantisation.parts)
    match quantisation.format:
        case "mxfp4":
            return quantisation.method == "compressed-tensors" and parts == {"routed_experts"}
        case "fp8_block":
            return parts == {"routed_experts", "shared_experts", "dense_ffn", "attention"}
    return False


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
