"""What a Kimi model is made of: dimensions and nothing else.

`ModelSpec` is what the engine builds modules from, what the pool computes block sizes from and what
the operator's preflight adds up. The published models are in `spec.published`, Hugging Face files
are read by `spec.config_file`, derived figures (bytes per token and state, parameters) are in
`spec.sizes`, what one GPU holds of them in `spec.parallel`.
"""

import math
from typing import Annotated, Literal, Self

from annotated_types import Ge
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from kimi_runtime.spec.base import SpecModel

Family = Literal["k2", "kimi_linear", "k3", "k31"]
Activation = Literal["silu", "situ"]
QuantFormat = Literal["int4", "mxfp4", "fp8_block", "fp8_channel"]
QuantPart = Literal["routed_experts", "shared_experts", "dense_ffn", "attention"]


class YarnSpec(SpecModel):
    """YaRN: interpolated below a ramp of dimensions, unchanged above it."""

    factor: Annotated[float, Ge(1)]
    original_positions: PositiveInt
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0


class RopeSpec(SpecModel):
    """Rotary positions over the `qk_rope_dim` dims, in interleaved pairs (x0,x1), (x2,x3)."""

    theta: PositiveFloat
    yarn: YarnSpec | None = None


class MoeSpec(SpecModel):
    """Routed and shared experts of a layer. The router reads the full hidden state in fp32.

    With `latent`, routed experts work in that width: hidden -> latent -> experts -> (norm) ->
    hidden; shared experts run on the full hidden state with a width of `shared * ffn`.
    """

    experts: PositiveInt
    top_k: PositiveInt
    shared: NonNegativeInt
    ffn: PositiveInt = Field(description="Inner width of one expert.")
    groups: PositiveInt = 1
    top_groups: PositiveInt = 1
    scoring: Literal["sigmoid"] = "sigmoid"
    renormalise: bool = True
    scaling: PositiveFloat
    latent: PositiveInt | None = None
    latent_norm: bool = False

    @model_validator(mode="after")
    def _chooses_among_what_is_there(self) -> Self:
        if self.experts % self.groups:
            raise ValueError(f"{self.experts} experts do not divide into {self.groups} groups")
        if self.top_groups > self.groups:
            raise ValueError(f"top_groups {self.top_groups} of only {self.groups} groups")
        eligible = self.experts // self.groups * self.top_groups
        if self.top_k > eligible:
            raise ValueError(f"top_k {self.top_k} of only {eligible} eligible experts")
        if self.latent_norm and self.latent is None:
            raise ValueError("latent_norm needs latent: there is no latent width to normalise")
        return self


class KdaSpec(SpecModel):
    """Kimi Delta Attention: which layers have it, and its shapes. Key and value widths are equal.

    The forget gate is `softplus` (`g = -exp(A_log) softplus(f)`) or `lower_bound`
    (`g = gate_lower_bound * sigmoid(exp(A_log) f)`). Its projection is low-rank through `head_dim`
    in both; the output gate is low-rank through `head_dim`, or one full matrix.
    """

    layers: tuple[NonNegativeInt, ...] = Field(description="0-based, ascending.")
    heads: PositiveInt
    head_dim: PositiveInt
    conv_width: Annotated[int, Ge(2)] = 4
    forget_gate: Literal["softplus", "lower_bound"]
    gate_lower_bound: Annotated[float, Field(lt=0)] | None = None
    full_rank_output_gate: bool

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if (self.forget_gate == "lower_bound") != (self.gate_lower_bound is not None):
            raise ValueError("gate_lower_bound goes with forget_gate 'lower_bound', and only there")
        if list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"layers must ascend without repeats, not {self.layers}")
        return self


class DsaSpec(SpecModel):
    """The lightning indexer: per listed layer, which `top_k` cache rows a query attends to."""

    layers: tuple[NonNegativeInt, ...] = Field(description="0-based, ascending.")
    heads: PositiveInt
    head_dim: PositiveInt
    top_k: PositiveInt
    norm_eps: PositiveFloat = Field(description="Of the LayerNorm over index keys.")


class QuantSpec(SpecModel):
    """How the checkpoint stores the weights of `parts`; everything else is bf16.

    `group` is the number of inputs that share one scale, for `fp8_block` the side of its square.
    """

    method: Literal["compressed-tensors", "quark", "fp8"]
    format: QuantFormat
    group: PositiveInt
    parts: tuple[QuantPart, ...] = Field(min_length=1)
    attention_format: QuantFormat | None = Field(
        None, description="Where attention has a format of its own (quark's -AttnFP8 checkpoints)."
    )


class VisionSpec(SpecModel):
    """The MoonViT tower and the projector behind it. Patches are square, merged 2 x 2."""

    hidden: PositiveInt
    layers: PositiveInt
    heads: PositiveInt
    head_dim: PositiveInt
    ffn: PositiveInt
    patch: PositiveInt = 14
    merge: PositiveInt = 2
    temporal: PositiveInt = Field(4, description="Video frames pooled into one.")
    position_side: PositiveInt = Field(64, description="Side of the learned position table.")
    position_resampling: Literal["bicubic", "bilinear"]
    norm: Literal["layer", "rms"]
    norm_eps: PositiveFloat
    biases: bool
    projector: Literal["pre_norm", "post_norm"] = Field(
        description="LayerNorm before the two linears (K2.5), or RMSNorm after them (K3)."
    )
    projector_eps: PositiveFloat
    pad_id: NonNegativeInt = Field(description="The placeholder token embeddings replace.")


class ModelSpec(SpecModel):
    """One Kimi text decoder, with its vision tower where it has one.

    A layer is dense below `first_dense_layers` and a mixture of experts from there on. It has KDA
    where `kda.layers` lists it and multi-head latent attention (MLA) elsewhere. `rope` None means
    NoPE: the `qk_rope_dim` dims are kept and cached, but never rotated.
    """

    name: str
    family: Family
    hidden: PositiveInt
    layers: PositiveInt
    heads: PositiveInt
    q_lora_rank: PositiveInt | None = Field(description="None: one full query projection.")
    kv_lora_rank: PositiveInt
    qk_nope_dim: PositiveInt
    qk_rope_dim: PositiveInt
    v_dim: PositiveInt
    rope: RopeSpec | None
    max_positions: PositiveInt
    dense_ffn: PositiveInt
    first_dense_layers: NonNegativeInt
    moe: MoeSpec
    vocab_size: PositiveInt
    tied_embeddings: bool
    norm_eps: PositiveFloat
    latent_norm_eps: PositiveFloat = Field(
        1e-6,
        description="Of the q_a and kv_a norms: Hugging Face's code has 1e-6 whatever its config "
        "says, other engines take norm_eps; the results differ by about 5e-6 relative.",
    )
    activation: Activation = "silu"
    situ_beta: PositiveFloat | None = Field(None, description="Bound of SiTU's gate side.")
    situ_linear_beta: PositiveFloat | None = Field(None, description="Bound of its linear side.")
    bos_id: NonNegativeInt
    eos_ids: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]
    pad_id: NonNegativeInt
    kda: KdaSpec | None = None
    attn_res_block: PositiveInt | None = Field(
        None, description="Layers whose sum becomes one entry of the AttnRes bank."
    )
    dsa: DsaSpec | None = None
    mla_output_gate: bool = False
    quantisation: QuantSpec | None = None
    vision: VisionSpec | None = None

    @property
    def qk_dim(self) -> int:
        """Width of one head's query and key."""
        return self.qk_nope_dim + self.qk_rope_dim

    @property
    def kv_row_dim(self) -> int:
        """Elements MLA caches per token and layer: the latent, then the rope part of the key."""
        return self.kv_lora_rank + self.qk_rope_dim

    @property
    def full_attention_layers(self) -> tuple[int, ...]:
        """0-based layers with MLA, ascending: those that have a KV cache."""
        linear = set(self.kda.layers) if self.kda else set()
        return tuple(layer for layer in range(self.layers) if layer not in linear)

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """0-based layers with KDA, ascending: those that have a recurrent state."""
        return self.kda.layers if self.kda else ()

    @property
    def moe_layers(self) -> int:
        """How many layers have experts."""
        return self.layers - self.first_dense_layers

    @property
    def attention_scale(self) -> float:
        """What MLA scores are multiplied by: qk_dim^-0.5 m^2.

        m = 0.1 mscale_all_dim ln(factor) + 1 is YaRN's, as DeepSeek-V2's attention code applies it
        (2.00474 = m^2 for factor 64); 1 without YaRN.
        """
        yarn = self.rope.yarn if self.rope else None
        m = 0.1 * yarn.mscale_all_dim * math.log(yarn.factor) + 1.0 if yarn else 1.0
        return float(self.qk_dim**-0.5 * m * m)

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.first_dense_layers > self.layers:
            raise ValueError(
                f"first_dense_layers {self.first_dense_layers} of only {self.layers} layers"
            )
        situ = self.situ_beta is not None and self.situ_linear_beta is not None
        if (self.activation == "situ") != situ:
            raise ValueError("situ_beta and situ_linear_beta go with activation 'situ'")
        for field, ids in (
            ("bos_id", (self.bos_id,)),
            ("eos_ids", self.eos_ids),
            ("pad_id", (self.pad_id,)),
        ):
            if any(token >= self.vocab_size for token in ids):
                raise ValueError(f"{field} {ids} is outside the vocabulary of {self.vocab_size}")
        for field, part in (("kda", self.kda), ("dsa", self.dsa)):
            if part is not None and any(layer >= self.layers for layer in part.layers):
                raise ValueError(f"{field}.layers names a layer beyond the {self.layers} there are")
        if self.qk_rope_dim % 2:
            raise ValueError(f"qk_rope_dim {self.qk_rope_dim} is odd: rotation works on pairs")
        return self


KIMI_NANO = ModelSpec(
    name="kimi-nano",
    family="k2",
    hidden=256,
    layers=4,
    heads=4,
    q_lora_rank=128,
    kv_lora_rank=512,
    qk_nope_dim=64,
    qk_rope_dim=64,
    v_dim=64,
    rope=RopeSpec(theta=50_000.0, yarn=YarnSpec(factor=8.0, original_positions=4096)),
    max_positions=32_768,
    dense_ffn=512,
    first_dense_layers=1,
    moe=MoeSpec(experts=8, top_k=2, shared=1, ffn=128, scaling=2.827),
    vocab_size=2304,
    tied_embeddings=False,
    norm_eps=1e-5,
    bos_id=2048,
    eos_ids=(2050,),
    pad_id=2303,
)
"""Our own K2 small enough for one CPU core: 2048 ranks, then 256 specials in the official order."""
