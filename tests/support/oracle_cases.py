"""What Hugging Face's DeepseekV3 was asked, and how a checkpoint is written down for it.

`scripts/record-oracle` records the answers, `tests/runtime/models/test_oracle.py` compares ours
with them, `benchmarks/transformers_compare.py` runs both. Weights are drawn from a seed on both
sides, so that none are committed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kimi_runtime.spec.model import KIMI_NANO, ModelSpec, MoeSpec, RopeSpec, YarnSpec

GOLDEN = Path(__file__).parents[1] / "goldens" / "oracle" / "deepseek-v3.safetensors"
NANO = "nano"
"""The case whose weights are the trained ones that come with the package."""


@dataclass(frozen=True)
class OracleCase:
    """A prompt of `length` ids; the logits after every `stride`-th of them, the last included."""

    spec: ModelSpec
    length: int
    stride: int

    @property
    def ids(self) -> tuple[int, ...]:
        """Drawn from the model's ids by a fixed rule."""
        return tuple(
            (7919 * i * i + 104729 * i + 5) % self.spec.vocab_size for i in range(self.length)
        )

    @property
    def rows(self) -> list[int]:
        """Positions whose logits are kept."""
        return list(range(self.length - 1, -1, -self.stride))[::-1]


def _k2(**changes: object) -> ModelSpec:
    """A K2 with short original positions, so that YaRN's ramp and its far side are both met."""
    fields: dict[str, object] = {
        "name": "kimi-oracle",
        "hidden": 96,
        "layers": 3,
        "heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 80,
        "qk_nope_dim": 32,
        "qk_rope_dim": 16,
        "v_dim": 24,
        "rope": RopeSpec(theta=50_000.0, yarn=YarnSpec(factor=16.0, original_positions=64)),
        "max_positions": 1024,
        "dense_ffn": 160,
        "moe": MoeSpec(experts=16, top_k=4, shared=1, ffn=48, scaling=2.827),
        "vocab_size": 512,
        "bos_id": 256,
        "eos_ids": (258,),
        "pad_id": 511,
    }
    return ModelSpec.model_validate(dict(KIMI_NANO) | fields | changes)


CASES = {
    "k2": OracleCase(_k2(), length=300, stride=12),
    "groups": OracleCase(
        _k2(
            moe=MoeSpec(
                experts=16,
                top_k=3,
                shared=2,
                ffn=48,
                scaling=2.5,
                groups=4,
                top_groups=2,
                renormalise=False,
            )
        ),
        length=90,
        stride=9,
    ),
    "plain": OracleCase(
        _k2(
            q_lora_rank=None,
            rope=RopeSpec(theta=10_000.0),
            first_dense_layers=2,
            tied_embeddings=True,
        ),
        length=90,
        stride=9,
    ),
    "mscale": OracleCase(
        _k2(
            rope=RopeSpec(
                theta=50_000.0,
                yarn=YarnSpec(
                    factor=32.0, original_positions=128, mscale=0.707, mscale_all_dim=1.2
                ),
            )
        ),
        length=90,
        stride=9,
    ),
    NANO: OracleCase(KIMI_NANO, length=400, stride=57),
}


def write_checkpoint(spec: ModelSpec, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """config.json and model.safetensors as transformers reads them, nothing quantised."""
    (folder / "config.json").write_text(json.dumps(_config(spec)))
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def in_fp32(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor widened."""
    return {name: tensor.to(torch.float32) for name, tensor in tensors.items()}


def _config(spec: ModelSpec) -> dict[str, Any]:
    moe = spec.moe
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_nextn_predict_layers": 0,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.heads,
        "q_lora_rank": spec.q_lora_rank,
        "kv_lora_rank": spec.kv_lora_rank,
        "qk_nope_head_dim": spec.qk_nope_dim,
        "qk_rope_head_dim": spec.qk_rope_dim,
        "v_head_dim": spec.v_dim,
        "intermediate_size": spec.dense_ffn,
        "first_k_dense_replace": spec.first_dense_layers,
        "moe_intermediate_size": moe.ffn,
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "n_shared_experts": moe.shared,
        "n_group": moe.groups,
        "topk_group": moe.top_groups,
        "norm_topk_prob": moe.renormalise,
        "routed_scaling_factor": moe.scaling,
        "hidden_act": spec.activation,
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_positions,
        "rope_parameters": _rope(spec),
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.tied_embeddings,
        "bos_token_id": spec.bos_id,
        "eos_token_id": spec.eos_ids[0],
        "pad_token_id": spec.pad_id,
    }


def _rope(spec: ModelSpec) -> dict[str, Any]:
    assert spec.rope is not None, "DeepseekV3 always rotates"
    yarn = spec.rope.yarn
    if yarn is None:
        return {"rope_type": "default", "rope_theta": spec.rope.theta}
    return {
        "rope_type": "yarn",
        "rope_theta": spec.rope.theta,
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_positions,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
    }
