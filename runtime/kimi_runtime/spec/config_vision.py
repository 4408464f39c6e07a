"""The `vision_config` of a checkpoint."""

from kimi_runtime.spec.config_section import ConfigSection
from kimi_runtime.spec.model import VisionSpec

# Not in any config.json: the towers' code fixes them.
_LAYER_NORM_EPS = 1e-5
_RMS_NORM_EPS = 2.0**-7


def read_vision(config: ConfigSection, *, text_hidden: int) -> VisionSpec | None:
    """The file's vision tower; None where it has none. ConfigError for a tower we do not know."""
    if not config.has("vision_config"):
        return None
    tower = config.section("vision_config")
    tower.require("merge_type", "sd2_tpool")
    tower.require("pos_emb_type", "divided_fixed")
    tower.require("text_hidden_size", text_hidden)
    side = tower.integer("init_pos_emb_height")
    tower.require("init_pos_emb_width", side)
    merge = tower.integers("merge_kernel_size")
    if len(merge) != 2 or merge[0] != merge[1]:
        raise tower.wrong("merge_kernel_size", "two equal sides")
    newer = {"patchmerger": False, "patchmergerv2": True}.get(tower.text("mm_projector_type"))
    if newer is None:
        raise tower.wrong("mm_projector_type", "patchmerger or patchmergerv2")
    hidden, heads = tower.integer("vt_hidden_size"), tower.integer("vt_num_attention_heads")
    tower.require("mm_hidden_size", hidden)
    attention_width = tower.integer("qkv_hidden_size") if newer else hidden
    if attention_width % heads:
        raise tower.wrong("vt_num_attention_heads", f"a divisor of {attention_width}")
    if newer:
        tower.require("norm_type", "rmsnorm")
        tower.require("attn_bias", False)
        tower.require("linear_bias", False)
        tower.require("pos_emb_interpolation_mode", "bilinear")
    return VisionSpec(
        hidden=hidden,
        layers=tower.integer("vt_num_hidden_layers"),
        heads=heads,
        head_dim=attention_width // heads,
        ffn=tower.integer("vt_intermediate_size"),
        patch=tower.integer("patch_size"),
        merge=merge[0],
        temporal=tower.integer("init_pos_emb_time"),
        position_side=side,
        position_resampling="bilinear" if newer else "bicubic",
        norm="rms" if newer else "layer",
        norm_eps=_RMS_NORM_EPS if newer else _LAYER_NORM_EPS,
        biases=not newer,
        projector="post_norm" if newer else "pre_norm",
        projector_eps=tower.number("projector_ln_eps"),
        pad_id=config.integer("media_placeholder_token_id"),
    )
