"""What a model's dimensions imply: parameters, weight bytes, KV bytes, state bytes.

Checked in the tests against published figures; the K3 count matches its checkpoint's tensor list
element for element.
"""

from typing import Literal

from pydantic import NonNegativeInt

from kimi_runtime.spec.base import SpecModel
from kimi_runtime.spec.model import ModelSpec, QuantFormat, QuantPart, QuantSpec

KvDtype = Literal["bf16", "fp8"]
IndexDtype = Literal["bf16", "fp8", "fp4"]
WeightFormat = QuantFormat | Literal["bf16"]

_BF16_BYTES, _FP32_BYTES = 2, 4


class Parameters(SpecModel):
    """Parameter counts by part. `attention` is what tensor parallelism divides by heads."""

    routed_experts: NonNegativeInt
    shared_experts: NonNegativeInt
    dense_ffn: NonNegativeInt
    attention: NonNegativeInt
    attention_down: NonNegativeInt
    """Down-projections (q_a, kv_a, KDA's low-rank gates): every rank needs their whole output."""
    latent: NonNegativeInt
    """The projections into and out of the experts' latent space."""
    router: NonNegativeInt
    indexer: NonNegativeInt
    embedding: NonNegativeInt
    head: NonNegativeInt
    norms: NonNegativeInt
    """All norms and the AttnRes vectors of the decoder."""
    vision: NonNegativeInt

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.model_dump().values())


def parameters(model: ModelSpec) -> Parameters:
    """Count every tensor of the checkpoint (tensor shapes: the published safetensors indexes)."""
    moe, hidden = model.moe, model.hidden
    sparse = model.moe_layers
    expert_width = moe.latent or hidden
    mla_layers, kda_layers = len(model.full_attention_layers), len(model.kda_layers)
    embedding = model.vocab_size * hidden
    norms = (2 * model.layers + 1) * hidden + mla_layers * _mla_norms(model)
    if moe.latent_norm:
        norms += sparse * expert_width
    if model.kda:
        norms += kda_layers * model.kda.head_dim
    if model.attn_res_block:
        norms += (2 * model.layers + 1) * 2 * hidden
    return Parameters(
        routed_experts=sparse * moe.experts * 3 * expert_width * moe.ffn,
        shared_experts=sparse * 3 * hidden * moe.shared * moe.ffn,
        dense_ffn=model.first_dense_layers * 3 * hidden * model.dense_ffn,
        attention=mla_layers * _mla_by_heads(model) + kda_layers * _kda_by_heads(model),
        attention_down=mla_layers * _mla_down(model) + kda_layers * _kda_down(model),
        latent=sparse * 2 * hidden * moe.latent if moe.latent else 0,
        router=sparse * moe.experts * (hidden + 1),
        indexer=_indexer(model),
        embedding=embedding,
        head=0 if model.tied_embeddings else embedding,
        norms=norms,
        vision=_vision(model),
    )


def active_parameters(model: ModelSpec) -> int:
    """Text parameters a token is multiplied with.

    Of the routed experts the chosen `top_k`; not the embedding, which is looked up, unless it is
    the head as well. This is the convention behind the published 32B, 104B and 3B.
    """
    counts = parameters(model)
    chosen = counts.routed_experts // model.moe.experts * model.moe.top_k
    idle = counts.routed_experts - chosen + counts.vision
    return counts.total - idle - (0 if model.tied_embeddings else counts.embedding)


def bytes_per_weight(number_format: WeightFormat, group: int) -> float:
    """Storage of one weight, its share of the scale included (`fp8_channel`: < 0.1 % left out).

    INT4 has a bf16 scale and MXFP4 an E8M0 byte per `group` inputs (0.5625 and 0.53125 bytes for
    32); block FP8 has an fp32 scale per `group` x `group` square.
    """
    match number_format:
        case "bf16":
            return 2.0
        case "int4":
            return 0.5 + 2 / group
        case "mxfp4":
            return 0.5 + 1 / group
        case "fp8_block":
            return 1.0 + 4 / group**2
        case "fp8_channel":
            return 1.0


def format_of(quantisation: QuantSpec | None, part: QuantPart | None) -> WeightFormat:
    """The number format of a part; None is a part that no checkpoint quantises."""
    if quantisation is None or part is None:
        return "bf16"
    if part == "attention" and quantisation.attention_format is not None:
        return quantisation.attention_format
    return quantisation.format if part in quantisation.parts else "bf16"


# Parts of `Parameters` that a checkpoint may quantise, under the name QuantSpec has for them.
_QUANT_PARTS: dict[str, QuantPart] = {
    "routed_experts": "routed_experts",
    "shared_experts": "shared_experts",
    "dense_ffn": "dense_ffn",
    "attention": "attention",
    "attention_down": "attention",
}


def weight_bytes_by_part(model: ModelSpec, quantisation: QuantSpec | None) -> dict[str, int]:
    """Bytes of each part of `Parameters` when stored as `quantisation` says (None: all bf16)."""
    group = quantisation.group if quantisation else 1
    return {
        part: round(
            count * bytes_per_weight(format_of(quantisation, _QUANT_PARTS.get(part)), group)
        )
        for part, count in parameters(model).model_dump().items()
    }


def weight_bytes(model: ModelSpec) -> int:
    """Bytes of the checkpoint in its own format: 1.56 TB for K3, 595 GB for K2.6 in INT4."""
    return sum(weight_bytes_by_part(model, model.quantisation).values())


def kv_bytes_per_token(model: ModelSpec, dtype: KvDtype, *, index: IndexDtype = "fp8") -> int:
    """Cache bytes of one token: an MLA row per full-attention layer, and its index keys.

    Per rank: MLA's row is shared by all heads, so tensor parallelism replicates it. An index key
    has a 4-byte scale in fp8 and fp4 (128 + 4 and 64 + 4 bytes, DeepSeek-V3.2's cache).
    """
    row_bytes = model.kv_row_dim * (2 if dtype == "bf16" else 1)
    size = len(model.full_attention_layers) * row_bytes
    if model.dsa:
        dim = model.dsa.head_dim
        key_bytes = {"bf16": 2 * dim, "fp8": dim + 4, "fp4": dim // 2 + 4}[index]
        size += len(model.dsa.layers) * key_bytes
    return size


def kda_state_bytes(model: ModelSpec) -> int:
    """fp32 recurrent state of one sequence, all heads: layers x heads x dim x dim x 4; 0 if none.

    The same at any length: 414 MiB for K3, 40 MiB for Kimi-Linear.
    """
    if model.kda is None:
        return 0
    kda = model.kda
    return len(kda.layers) * kda.heads * kda.head_dim**2 * _FP32_BYTES


def conv_state_bytes(model: ModelSpec, *, drafts: int = 0) -> int:
    """bf16 inputs that KDA's causal convolutions over q, k and v still need, of one sequence.

    `conv_width - 1` columns, and one more per draft token that may have to be rolled back.
    """
    if model.kda is None:
        return 0
    kda = model.kda
    columns = kda.conv_width - 1 + drafts
    return len(kda.layers) * 3 * kda.heads * kda.head_dim * columns * _BF16_BYTES


def state_bytes(model: ModelSpec, *, drafts: int = 0) -> int:
    """What a state checkpoint of one sequence holds: KDA and convolution state, all ranks."""
    return kda_state_bytes(model) + conv_state_bytes(model, drafts=drafts)


def _mla_by_heads(model: ModelSpec) -> int:
    values = model.heads * model.v_dim
    queries = (model.q_lora_rank or model.hidden) * model.heads * model.qk_dim
    keys = model.kv_lora_rank * model.heads * (model.qk_nope_dim + model.v_dim)
    gate = model.hidden * values if model.mla_output_gate else 0
    return queries + keys + gate + values * model.hidden


def _mla_down(model: ModelSpec) -> int:
    return model.hidden * ((model.q_lora_rank or 0) + model.kv_row_dim)


def _mla_norms(model: ModelSpec) -> int:
    return (model.q_lora_rank or 0) + model.kv_lora_rank


def _kda_by_heads(model: ModelSpec) -> int:
    if model.kda is None:
        return 0
    kda, hidden = model.kda, model.hidden
    width = kda.heads * kda.head_dim
    output_gate = hidden * width if kda.full_rank_output_gate else kda.head_dim * width
    projections = 4 * hidden * width + kda.head_dim * width + output_gate  # q k v o, f_b, g
    per_head = hidden * kda.heads + kda.heads + width  # b_proj, A_log, dt_bias
    return projections + per_head + 3 * width * kda.conv_width


def _kda_down(model: ModelSpec) -> int:
    if model.kda is None:
        return 0
    gates = 1 if model.kda.full_rank_output_gate else 2
    return gates * model.hidden * model.kda.head_dim


def _indexer(model: ModelSpec) -> int:
    if model.dsa is None:
        return 0
    dsa = model.dsa
    queries = (model.q_lora_rank or model.hidden) * dsa.heads * dsa.head_dim
    keys = model.hidden * dsa.head_dim + 2 * dsa.head_dim
    return len(dsa.layers) * (queries + keys + model.hidden * dsa.heads)


def _vision(model: ModelSpec) -> int:
    if model.vision is None:
        return 0
    tower = model.vision
    hidden, width, bias = tower.hidden, tower.heads * tower.head_dim, int(tower.biases)
    norm = hidden * (1 + bias)
    block = 4 * hidden * width + 2 * hidden * tower.ffn + 2 * norm
    block += bias * (3 * width + hidden + tower.ffn + hidden)
    patches = 3 * tower.patch**2 * hidden + bias * hidden + tower.position_side**2 * hidden
    merged = tower.merge**2 * hidden
    projector = merged**2 + merged * model.hidden + bias * (merged + model.hidden)
    projector += norm if tower.projector == "pre_norm" else model.hidden
    return tower.layers * block + patches + norm + projector
