"""Hugging Face `config.json` files of every Kimi family -> `ModelSpec`.

Nothing is guessed: a key without which the model would compute something else is required, and a
value that is not implemented is refused.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from pydantic import ValidationError

from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.config_quantisation import read_quantisation
from kimi_runtime.spec.config_section import ConfigSection
from kimi_runtime.spec.config_vision import read_vision
from kimi_runtime.spec.model import (
    DsaSpec,
    Family,
    KdaSpec,
    ModelSpec,
    MoeSpec,
    RopeSpec,
    YarnSpec,
)

SPECIAL_SLOTS = 256
_END_OF_TURN_OFFSET = 2  # <|im_end|> or <|end_of_msg|>, in every Kimi vocabulary

_FAMILIES: dict[str, Family] = {
    "kimi_k2": "k2",
    "kimi_k25": "k2",
    "kimi_linear": "kimi_linear",
    "kimi_k3": "k3",
    "kimi_k31": "k31",
}
_NESTED = ("kimi_k25", "kimi_k3", "kimi_k31")


def load_config(
    config: Path | str | Mapping[str, object],
    *,
    name: str | None = None,
    latent_norm_eps: float = 1e-6,
) -> ModelSpec:
    """Read a config.json (its path, its folder, or its parsed content).

    `name` defaults to the folder's name, or the model type. Where a generation_config.json lies
    beside the file, its end ids count too: K2's config.json has only [EOS], which never ends a
    turn. ConfigError names the key and the file.
    """
    data, source, folder = _read(config)
    top = ConfigSection(data, source)
    default_name = folder.name if folder and folder.name else top.text("model_type")
    try:
        return ModelSpec.model_validate(
            _fields(top, folder)
            | {"name": name or default_name, "latent_norm_eps": latent_norm_eps}
        )
    except ValidationError as exc:
        problems = "; ".join(str(error["msg"]) for error in exc.errors())
        raise ConfigError(f"{source} does not describe a model: {problems}") from exc


def _fields(top: ConfigSection, folder: Path | None) -> dict[str, object]:
    model_type = top.text("model_type")
    if model_type not in _FAMILIES:
        raise top.wrong("model_type", f"one of {', '.join(_FAMILIES)}")
    family = _FAMILIES[model_type]
    text = top.section("text_config") if model_type in _NESTED else top
    return {
        "family": family,
        **_trunk(text),
        **(_k2(text) if family == "k2" else _hybrid(text, family)),
        **_tokens(top, text, folder),
        "quantisation": read_quantisation(text if text.has("quantization_config") else top),
        "vision": read_vision(top, text_hidden=text.integer("hidden_size")),
    }


def _read(
    config: Path | str | Mapping[str, object],
) -> tuple[Mapping[str, object], str, Path | None]:
    if isinstance(config, Mapping):
        return config, "the given config", None
    path = Path(config)
    if path.is_dir():
        path = path / "config.json"
    try:
        data = json.loads(path.read_bytes())
    except OSError as exc:
        raise ConfigError(
            f"{path} cannot be read ({exc.strerror}); give a model folder or its config.json"
        ) from exc
    except ValueError as exc:
        raise ConfigError(f"{path} is not JSON: {exc}") from exc
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__}, not a JSON object")
    return cast("dict[str, object]", data), str(path), path.resolve().parent


def _trunk(text: ConfigSection) -> dict[str, object]:
    """What all families have, under the same keys."""
    text.require("moe_layer_freq", 1)
    text.require("attention_bias", False)
    text.require("topk_method", "noaux_tc")
    return {
        "hidden": text.integer("hidden_size"),
        "layers": text.integer("num_hidden_layers"),
        "heads": text.integer("num_attention_heads"),
        "q_lora_rank": text.integer("q_lora_rank") if text.has("q_lora_rank") else None,
        "kv_lora_rank": text.integer("kv_lora_rank"),
        "qk_nope_dim": text.integer("qk_nope_head_dim"),
        "qk_rope_dim": text.integer("qk_rope_head_dim"),
        "v_dim": text.integer("v_head_dim"),
        "dense_ffn": text.integer("intermediate_size"),
        "first_dense_layers": text.integer("first_k_dense_replace"),
        "vocab_size": text.integer("vocab_size"),
        "norm_eps": text.number("rms_norm_eps"),
    }


def _tokens(top: ConfigSection, text: ConfigSection, folder: Path | None) -> dict[str, object]:
    """Embedding tie and special ids: the text model's own, else the file's."""

    def owner(key: str) -> ConfigSection:
        return text if text.has(key) or not top.has(key) else top

    bos = owner("bos_token_id").integer("bos_token_id")
    ends: list[int] = []
    if bos == text.integer("vocab_size") - SPECIAL_SLOTS:
        ends.append(bos + _END_OF_TURN_OFFSET)
    ends += owner("eos_token_id").integer_or_integers("eos_token_id")
    beside = folder / "generation_config.json" if folder else None
    if beside is not None and beside.is_file():
        data, source, _ = _read(beside)
        generation = ConfigSection(data, source)
        if generation.has("eos_token_id"):
            ends += generation.integer_or_integers("eos_token_id")
    return {
        "tied_embeddings": owner("tie_word_embeddings").boolean("tie_word_embeddings"),
        "bos_id": bos,
        "eos_ids": tuple(dict.fromkeys(ends)),
        "pad_id": owner("pad_token_id").integer("pad_token_id"),
    }


def _k2(text: ConfigSection) -> dict[str, object]:
    text.require("scoring_func", "sigmoid")
    text.require("hidden_act", "silu")
    return {
        "rope": _rope(text),
        "max_positions": text.integer("max_position_embeddings"),
        "moe": MoeSpec(
            experts=text.integer("n_routed_experts"),
            top_k=text.integer("num_experts_per_tok"),
            shared=text.integer("n_shared_experts"),
            ffn=text.integer("moe_intermediate_size"),
            groups=text.integer("n_group"),
            top_groups=text.integer("topk_group"),
            renormalise=text.boolean("norm_topk_prob"),
            scaling=text.number("routed_scaling_factor"),
        ),
    }


def _rope(text: ConfigSection) -> RopeSpec:
    """From `rope_scaling`, or `rope_parameters` as transformers 5 writes it."""
    newer = not text.has("rope_scaling") and text.has("rope_parameters")
    key = "rope_parameters" if newer else "rope_scaling"
    theta = text if text.has("rope_theta") or not newer else text.section(key)
    yarn = None
    if text.has(key):
        scaling = text.section(key)
        kind = "type" if scaling.has("type") else "rope_type"
        if scaling.text(kind) not in ("yarn", "default"):
            raise scaling.wrong(kind, "yarn or default")
        if scaling.text(kind) == "yarn":
            yarn = YarnSpec(
                factor=scaling.number("factor"),
                original_positions=scaling.integer("original_max_position_embeddings"),
                beta_fast=scaling.number("beta_fast"),
                beta_slow=scaling.number("beta_slow"),
                mscale=scaling.number("mscale"),
                mscale_all_dim=scaling.number("mscale_all_dim"),
            )
    return RopeSpec(theta=theta.number("rope_theta"), yarn=yarn)


def _hybrid(text: ConfigSection, family: Family) -> dict[str, object]:
    """Kimi-Linear and what grew out of it; K3's additions are required where it has them."""
    text.require("moe_router_activation_func", "sigmoid")
    if not text.boolean("mla_use_nope"):
        raise text.wrong("mla_use_nope", "true: a rotated hybrid model is not implemented")
    is_k3 = family != "kimi_linear"
    positions = "max_position_embeddings"
    if not is_k3 and not text.has(positions):
        positions = "model_max_length"
    fields: dict[str, object] = {
        "rope": None,
        "max_positions": text.integer(positions),
        "moe": MoeSpec(
            experts=text.integer("num_experts"),
            top_k=text.integer("num_experts_per_token"),
            shared=text.integer("num_shared_experts"),
            ffn=text.integer("moe_intermediate_size"),
            groups=text.integer("num_expert_group"),
            top_groups=text.integer("topk_group"),
            renormalise=text.boolean("moe_renormalize"),
            scaling=text.number("routed_scaling_factor"),
            latent=text.integer("routed_expert_hidden_size") if is_k3 else None,
            latent_norm=is_k3 and text.boolean("latent_moe_use_norm"),
        ),
        "kda": _kda(text, is_k3=is_k3),
        **_activation(text),
    }
    if is_k3:
        fields["attn_res_block"] = text.integer("attn_res_block_size")
        fields["mla_output_gate"] = text.boolean("mla_use_output_gate")
    if family == "k31":
        fields["dsa"] = _dsa(text)
    return fields


def _activation(text: ConfigSection) -> dict[str, object]:
    act = text.text("hidden_act")
    if act == "silu":
        return {"activation": "silu"}
    if act != "situ":
        raise text.wrong("hidden_act", "silu or situ")
    return {
        "activation": "situ",
        "situ_beta": text.number("activation_situ_beta"),
        "situ_linear_beta": text.number("activation_situ_linear_beta"),
    }


def _full_layers(text: ConfigSection) -> tuple[int, ...]:
    """0-based layers with full attention. The file counts from 1."""
    layers = text.section("linear_attn_config").integers("full_attn_layers")
    return tuple(sorted(layer - 1 for layer in layers))


def _kda(text: ConfigSection, *, is_k3: bool) -> KdaSpec:
    linear = text.section("linear_attn_config")
    layers = tuple(sorted(layer - 1 for layer in linear.integers("kda_layers")))
    if sorted(layers + _full_layers(text)) != list(range(text.integer("num_hidden_layers"))):
        raise linear.wrong(
            "kda_layers", "so that it and full_attn_layers name every layer once, counting from 1"
        )
    bounded = is_k3 or linear.has("gate_lower_bound")
    full_rank = is_k3 or linear.has("use_full_rank_gate")
    return KdaSpec(
        layers=layers,
        heads=linear.integer("num_heads"),
        head_dim=linear.integer("head_dim"),
        conv_width=linear.integer("short_conv_kernel_size"),
        forget_gate="lower_bound" if bounded else "softplus",
        gate_lower_bound=linear.number("gate_lower_bound") if bounded else None,
        full_rank_output_gate=full_rank and linear.boolean("use_full_rank_gate"),
    )


def _dsa(text: ConfigSection) -> DsaSpec:
    """K3.1's indexer, on exactly the full-attention layers, its LayerNorm with the model's eps."""
    dsa = text.section("dsa_config")
    return DsaSpec(
        layers=_full_layers(text),
        heads=dsa.integer("index_n_heads"),
        head_dim=dsa.integer("index_head_dim"),
        top_k=dsa.integer("index_topk"),
        norm_eps=text.number("rms_norm_eps"),
    )
