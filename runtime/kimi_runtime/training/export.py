"""A trained model as a folder that the engine, and other engines, read."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kimi_runtime.kernels.mxfp4 import GROUP, quantise_mxfp4_ref
from kimi_runtime.models.tensors import k2_tensors
from kimi_runtime.spec.model import ModelSpec
from kimi_runtime.training.weights import Masters, tensors_of

_IGNORED = (
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
)


def write_model(spec: ModelSpec, masters: Masters, folder: Path) -> int:
    """Write config.json and model.safetensors: bf16, routed experts in MXFP4 as compressed-tensors
    packs it. Returns the bytes of both. The weights are replaced last and at once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.json"
    config.write_text(json.dumps(config_of(spec), indent=2) + "\n")
    partial, target = folder / "model.partial", folder / "model.safetensors"
    save_file(_stored(spec, masters), partial, metadata={"format": "pt"})
    os.replace(partial, target)
    return config.stat().st_size + target.stat().st_size


def _stored(spec: ModelSpec, masters: Masters) -> dict[str, Tensor]:
    """The tensors as they are saved; experts are rounded once, from the fp32 masters."""
    wanted = k2_tensors(spec)
    result = {}
    for name, tensor in tensors_of(spec, masters).items():
        if ".mlp.experts." in name:
            codes, scales = quantise_mxfp4_ref(tensor)
            result[f"{name}_packed"], result[f"{name}_scale"] = codes, scales
        else:
            result[name] = tensor.to(getattr(torch, wanted[name].dtype)).contiguous()
    return result


def config_of(spec: ModelSpec) -> dict[str, Any]:
    """The config.json of a K2 with MXFP4 experts, as `spec.config_file` reads it."""
    moe = spec.moe
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.heads,
        "q_lora_rank": spec.q_lora_rank,
        "kv_lora_rank": spec.kv_lora_rank,
        "qk_nope_head_dim": spec.qk_nope_dim,
        "qk_rope_head_dim": spec.qk_rope_dim,
        "v_head_dim": spec.v_dim,
        "intermediate_size": spec.dense_ffn,
        "first_k_dense_replace": spec.first_dense_layers,
        "moe_layer_freq": 1,
        "moe_intermediate_size": moe.ffn,
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "n_shared_experts": moe.shared,
        "n_group": moe.groups,
        "topk_group": moe.top_groups,
        "norm_topk_prob": moe.renormalise,
        "scoring_func": moe.scoring,
        "topk_method": "noaux_tc",
        "routed_scaling_factor": moe.scaling,
        "hidden_act": spec.activation,
        "attention_bias": False,
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_positions,
        **_rope(spec),
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.tied_embeddings,
        "bos_token_id": spec.bos_id,
        "eos_token_id": spec.eos_ids[0],
        "pad_token_id": spec.pad_id,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "type": "float",
                        "num_bits": 4,
                        "group_size": GROUP,
                        "symmetric": True,
                        "strategy": "group",
                    },
                }
            },
            "ignore": list(_IGNORED),
        },
    }


def _rope(spec: ModelSpec) -> dict[str, Any]:
    rope = spec.rope
    if rope is None or rope.yarn is None:
        raise ValueError(f"{spec.name} has no YaRN positions; a K2's config.json states them")
    yarn = rope.yarn
    return {
        "rope_theta": rope.theta,
        "rope_scaling": {
            "type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_positions,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
        },
    }
