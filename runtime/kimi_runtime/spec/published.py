"""The published Kimi models, exactly as their `config.json` files state them.

Sources: the config.json of moonshotai/Kimi-K2-Instruct, -0905, Kimi-K2.6, Kimi-Linear-48B-A3B and
Kimi-K3. K3.1 Pro is published in part only: `k31_pro` takes the rest from whoever has the file.
"""

from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.model import (
    KIMI_NANO,
    DsaSpec,
    KdaSpec,
    ModelSpec,
    MoeSpec,
    QuantSpec,
    RopeSpec,
    VisionSpec,
    YarnSpec,
)

_VOCABULARY = 163_840  # 163584 ranks and 256 special slots, the same in every family
_BOS, _EOS, _END_OF_TURN, _PAD = 163_584, 163_585, 163_586, 163_839
_MEDIA_PAD = 163_605

INT4_EXPERTS = QuantSpec(
    method="compressed-tensors", format="int4", group=32, parts=("routed_experts",)
)
"""Moonshot's K2-Thinking to K2.7-Code checkpoints: INT4 with a bf16 scale per 32 inputs."""

MXFP4_EXPERTS = QuantSpec(
    method="compressed-tensors", format="mxfp4", group=32, parts=("routed_experts",)
)
"""Moonshot's K3 checkpoint."""

FP8_BLOCKS = QuantSpec(
    method="fp8",
    format="fp8_block",
    group=128,
    parts=("routed_experts", "shared_experts", "dense_ffn", "attention"),
)
"""K2's own checkpoint: E4M3 with an fp32 scale per 128 x 128 block."""

QUARK_MXFP4 = QuantSpec(
    method="quark",
    format="mxfp4",
    group=32,
    parts=("routed_experts", "shared_experts", "dense_ffn"),
)
"""AMD's MXFP4 checkpoints of K2.x: everything but attention, router, head and vision."""

MOONVIT_K25 = VisionSpec(
    hidden=1152,
    layers=27,
    heads=16,
    head_dim=72,
    ffn=4304,
    position_resampling="bicubic",
    norm="layer",
    norm_eps=1e-5,
    biases=True,
    projector="pre_norm",
    projector_eps=1e-5,
    pad_id=_MEDIA_PAD,
)

MOONVIT_K3 = VisionSpec(
    hidden=1024,
    layers=27,
    heads=12,
    head_dim=128,
    ffn=4096,
    position_resampling="bilinear",
    norm="rms",
    norm_eps=2.0**-7,
    biases=False,
    projector="post_norm",
    projector_eps=1e-5,
    pad_id=_MEDIA_PAD,
)


def _k2(
    name: str,
    *,
    yarn_factor: float,
    max_positions: int,
    norm_eps: float,
    eos_ids: tuple[int, ...],
    quantisation: QuantSpec,
    vision: VisionSpec | None = None,
) -> ModelSpec:
    """K2 of some generation: they differ in context, end ids, number format and eyes only."""
    yarn = YarnSpec(factor=yarn_factor, original_positions=4096)
    return ModelSpec(
        name=name,
        family="k2",
        hidden=7168,
        layers=61,
        heads=64,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_dim=128,
        qk_rope_dim=64,
        v_dim=128,
        rope=RopeSpec(theta=50_000.0, yarn=yarn),
        max_positions=max_positions,
        dense_ffn=18_432,
        first_dense_layers=1,
        moe=MoeSpec(experts=384, top_k=8, shared=1, ffn=2048, scaling=2.827),
        vocab_size=_VOCABULARY,
        tied_embeddings=False,
        norm_eps=norm_eps,
        bos_id=_BOS,
        eos_ids=eos_ids,
        pad_id=_PAD,
        quantisation=quantisation,
        vision=vision,
    )


def k2_0711(*, norm_eps: float) -> ModelSpec:
    """K2-Instruct of July 2025. Its norm eps differs between copies: read it from the config."""
    return _k2(
        "kimi-k2-0711",
        yarn_factor=32.0,
        max_positions=131_072,
        norm_eps=norm_eps,
        eos_ids=(_END_OF_TURN, _EOS),  # the config says [EOS], the generation config the turn's end
        quantisation=FP8_BLOCKS,
    )


def k2_0905(*, norm_eps: float) -> ModelSpec:
    """K2-Instruct of September 2025: twice the context. Norm eps as for `k2_0711`."""
    return _k2(
        "kimi-k2-0905",
        yarn_factor=64.0,
        max_positions=262_144,
        norm_eps=norm_eps,
        eos_ids=(_END_OF_TURN, _EOS),
        quantisation=FP8_BLOCKS,
    )


def _k2_int4(name: str, vision: VisionSpec | None) -> ModelSpec:
    return _k2(
        name,
        yarn_factor=64.0,
        max_positions=262_144,
        norm_eps=1e-5,
        eos_ids=(_END_OF_TURN,),
        quantisation=INT4_EXPERTS,
        vision=vision,
    )


K2_THINKING = _k2_int4("kimi-k2-thinking", None)
K25 = _k2_int4("kimi-k2.5", MOONVIT_K25)
K26 = _k2_int4("kimi-k2.6", MOONVIT_K25)
K27_CODE = _k2_int4("kimi-k2.7-code", MOONVIT_K25)


def every_fourth_full(layers: int) -> tuple[int, ...]:
    """0-based KDA layers where the 4th, 8th, ... and the last layer have full attention."""
    return tuple(layer for layer in range(layers - 1) if (layer + 1) % 4)


KIMI_LINEAR_48B = ModelSpec(
    name="kimi-linear-48b-a3b",
    family="kimi_linear",
    hidden=2304,
    layers=27,
    heads=32,
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_dim=128,
    qk_rope_dim=64,
    v_dim=128,
    rope=None,
    max_positions=1_048_576,
    dense_ffn=9216,
    first_dense_layers=1,
    moe=MoeSpec(experts=256, top_k=8, shared=1, ffn=1024, scaling=2.446),
    vocab_size=_VOCABULARY,
    tied_embeddings=False,
    norm_eps=1e-5,
    bos_id=_BOS,
    eos_ids=(_END_OF_TURN,),
    pad_id=_PAD,
    kda=KdaSpec(
        layers=every_fourth_full(27),
        heads=32,
        head_dim=128,
        forget_gate="softplus",
        full_rank_output_gate=False,
    ),
)

K3 = ModelSpec(
    name="kimi-k3",
    family="k3",
    hidden=7168,
    layers=93,
    heads=96,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_dim=128,
    qk_rope_dim=64,
    v_dim=128,
    rope=None,
    max_positions=1_048_576,
    dense_ffn=33_792,
    first_dense_layers=1,
    moe=MoeSpec(
        experts=896, top_k=16, shared=2, ffn=3072, scaling=1.0, latent=3584, latent_norm=True
    ),
    vocab_size=_VOCABULARY,
    tied_embeddings=False,
    norm_eps=1e-5,
    activation="situ",
    situ_beta=4.0,
    situ_linear_beta=25.0,
    bos_id=_BOS,
    eos_ids=(_END_OF_TURN,),
    pad_id=_PAD,
    kda=KdaSpec(
        layers=every_fourth_full(93),
        heads=96,
        head_dim=128,
        forget_gate="lower_bound",
        gate_lower_bound=-5.0,
        full_rank_output_gate=True,
    ),
    attn_res_block=12,
    mla_output_gate=True,
    quantisation=MXFP4_EXPERTS,
    vision=MOONVIT_K3,
)


def k31_pro(
    *,
    tied_embeddings: bool,
    bos_id: int,
    eos_ids: tuple[int, ...],
    pad_id: int,
    quantisation: QuantSpec | None,
    vision: VisionSpec | None,
) -> ModelSpec:
    """K3.1 Pro: K3's trunk, and an indexer on each of its 24 full-attention layers.

    The arguments are what is not published; their values are in the checkpoint's config.json.
    """
    dsa = DsaSpec(
        layers=K3.full_attention_layers, heads=32, head_dim=128, top_k=2048, norm_eps=K3.norm_eps
    )
    unpublished = {
        "tied_embeddings": tied_embeddings,
        "bos_id": bos_id,
        "eos_ids": eos_ids,
        "pad_id": pad_id,
        "quantisation": quantisation,
        "vision": vision,
    }
    known = {name: getattr(K3, name) for name in ModelSpec.model_fields}
    return ModelSpec(
        **(known | unpublished | {"name": "kimi-k3.1-pro", "family": "k31", "dsa": dsa})
    )


PUBLISHED: dict[str, ModelSpec] = {
    model.name: model for model in (KIMI_NANO, K2_THINKING, K25, K26, K27_CODE, KIMI_LINEAR_48B, K3)
}
"""By name, the models that are known completely."""


def published(name: str) -> ModelSpec:
    """The published model of that name; ConfigError naming those there are."""
    if name not in PUBLISHED:
        raise ConfigError(
            f"model {name!r} is not one of {', '.join(sorted(PUBLISHED))}; "
            "give the path of its config.json instead"
        )
    return PUBLISHED[name]
