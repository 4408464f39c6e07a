"""Hugging Face config.json files of every Kimi family, with the keys that decide the model."""

from typing import Any


def yarn(factor: float) -> dict[str, Any]:
    """The `rope_scaling` of a K2 file."""
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


def compressed(kind: str) -> dict[str, Any]:
    """The `quantization_config` of Moonshot's own checkpoints."""
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"type": kind, "num_bits": 4, "group_size": 32, "symmetric": True},
            }
        },
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        ],
    }


IDS = {"bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839}
TRUNK: dict[str, Any] = {
    "hidden_size": 7168,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "vocab_size": 163840,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "topk_group": 1,
}
K2: dict[str, Any] = {
    **TRUNK,
    **IDS,
    "model_type": "kimi_k2",
    "eos_token_id": 163585,
    "num_hidden_layers": 61,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.827,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rope_theta": 50000.0,
    "rope_scaling": yarn(32.0),
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
THINKING = {
    **K2,
    "eos_token_id": 163586,
    "max_position_embeddings": 262144,
    "rope_scaling": yarn(64.0),
    "quantization_config": compressed("int"),
}
LINEAR: dict[str, Any] = {
    **TRUNK,
    **IDS,
    "model_type": "kimi_linear",
    "hidden_size": 2304,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "q_lora_rank": None,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 2.446,
    "hidden_act": "silu",
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "linear_attn_config": {
        "kda_layers": [layer for layer in range(1, 27) if layer % 4],
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
}
K3_TEXT: dict[str, Any] = {
    **LINEAR,
    "hidden_size": 7168,
    "num_hidden_layers": 93,
    "num_attention_heads": 96,
    "q_lora_rank": 1536,
    "intermediate_size": 33792,
    "moe_intermediate_size": 3072,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_shared_experts": 2,
    "routed_scaling_factor": 1.0,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "routed_expert_hidden_size": 3584,
    "latent_moe_use_norm": True,
    "attn_res_block_size": 12,
    "mla_use_output_gate": True,
    "max_position_embeddings": 1048576,
    "linear_attn_config": {
        "kda_layers": [layer for layer in range(1, 93) if layer % 4],
        "full_attn_layers": [*range(4, 93, 4), 93],
        "num_heads": 96,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    },
    "quantization_config": compressed("float"),
}
K3_FILE: dict[str, Any] = {
    **IDS,
    "model_type": "kimi_k3",
    "media_placeholder_token_id": 163605,
    "tie_word_embeddings": False,
    "text_config": K3_TEXT,
    "vision_config": {
        "vt_hidden_size": 1024,
        "vt_num_hidden_layers": 27,
        "vt_num_attention_heads": 12,
        "vt_intermediate_size": 4096,
        "qkv_hidden_size": 1536,
        "mm_hidden_size": 1024,
        "text_hidden_size": 7168,
        "patch_size": 14,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mm_projector_type": "patchmergerv2",
        "pos_emb_type": "divided_fixed",
        "pos_emb_interpolation_mode": "bilinear",
        "init_pos_emb_height": 64,
        "init_pos_emb_width": 64,
        "init_pos_emb_time": 4,
        "norm_type": "rmsnorm",
        "attn_bias": False,
        "linear_bias": False,
        "projector_ln_eps": 1e-5,
    },
}
K31_FILE = {
    **K3_FILE,
    "model_type": "kimi_k31",
    "text_config": {
        **K3_TEXT,
        "dsa_config": {"index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048},
    },
}
FILES = {"k2": K2, "thinking": THINKING, "linear": LINEAR, "k3": K3_FILE, "k31": K31_FILE}
