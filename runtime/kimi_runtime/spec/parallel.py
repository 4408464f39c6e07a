"""How a model is spread over GPUs: what each holds, which sizes are possible, and why others not.

Tensor parallelism divides attention by heads and feed-forward layers by their inner width. Every
rank keeps whole: the down-projections q_a and kv_a, K3's latent projections, routers, indexers,
norms and the vision tower (as ATOM and vLLM place them). The KV cache is replicated, KDA state is
divided by heads.
"""

from typing import Self

from pydantic import NonNegativeInt, PositiveInt, model_validator

from kimi_runtime.errors import CapacityError, ConfigError, KimistackError
from kimi_runtime.spec.base import SpecModel
from kimi_runtime.spec.hardware import GpuSpec
from kimi_runtime.spec.model import ModelSpec, QuantSpec
from kimi_runtime.spec.sizes import (
    KvDtype,
    format_of,
    kv_bytes_per_token,
    state_bytes,
    weight_bytes_by_part,
)

GPU_MEMORY_FRACTION = 0.9
"""Share of a GPU's memory that weights and KV may take; the rest is activations and graphs."""

_DIVIDED_BY_TENSOR = ("shared_experts", "dense_ffn", "attention", "embedding", "head")


class Sharding(SpecModel):
    """Tensor ranks share a layer; `expert` ranks share the routed experts.

    `expert` 1 cuts each routed expert over the tensor ranks; more spreads whole experts over
    `expert` ranks, which are the tensor ranks of one or more attention replicas.
    """

    tensor: PositiveInt = 1
    expert: PositiveInt = 1

    @model_validator(mode="after")
    def _experts_span_whole_groups(self) -> Self:
        if self.expert > 1 and self.expert % self.tensor:
            raise ValueError(
                f"{self.expert} expert ranks are no multiple of {self.tensor} tensor ranks"
            )
        return self


class WeightShare(SpecModel):
    """Weight bytes of one GPU: its part of what is divided, and what every GPU has whole."""

    divided: NonNegativeInt
    replicated: NonNegativeInt

    @property
    def total(self) -> int:
        """All weight bytes of the GPU."""
        return self.divided + self.replicated


def weights_per_gpu(
    model: ModelSpec, sharding: Sharding, *, quantisation: QuantSpec | None = None
) -> WeightShare:
    """Weight bytes of one GPU, in `quantisation` or else the model's own format.

    K3 under TP8 in its own format: 205.9 GB, of which 12.4 GB are replicated. The often quoted
    195 GB is the checkpoint over eight, as if nothing were.
    """
    by_part = weight_bytes_by_part(model, quantisation or model.quantisation)
    experts = by_part.pop("routed_experts")
    divided = sum(by_part.pop(part) for part in _DIVIDED_BY_TENSOR)
    expert_ranks = sharding.expert if sharding.expert > 1 else sharding.tensor
    return WeightShare(
        divided=-(-experts // expert_ranks) + -(-divided // sharding.tensor),
        replicated=sum(by_part.values()),
    )


def check_divides(
    model: ModelSpec, sharding: Sharding, *, quantisation: QuantSpec | None = None
) -> None:
    """ConfigError naming each dimension that the sharding does not divide."""
    tensor, expert = sharding.tensor, sharding.expert
    quantisation = quantisation or model.quantisation
    by_tensor = {
        "hidden": model.hidden,
        "heads": model.heads,
        "dense_ffn": model.dense_ffn,
        "vocab_size": model.vocab_size,
    }
    if model.moe.shared:
        by_tensor["shared expert width"] = model.moe.shared * model.moe.ffn
    if model.kda:
        by_tensor["KDA heads"] = model.kda.heads
    if expert == 1:
        by_tensor["expert width"] = model.moe.ffn
    problems = [
        f"{what} {size} % {tensor} = {size % tensor}"
        for what, size in by_tensor.items()
        if size % tensor
    ]
    if model.moe.experts % expert:
        problems.append(f"experts {model.moe.experts} % {expert} = {model.moe.experts % expert}")
    width = model.moe.ffn // (tensor if expert == 1 else 1)
    quantised = format_of(quantisation, "routed_experts") in ("int4", "mxfp4", "fp8_block")
    if not problems and quantisation and quantised and width % quantisation.group:
        problems.append(
            f"expert width {width} per rank is no multiple of the scale group {quantisation.group}"
        )
    if problems:
        raise ConfigError(
            f"{model.name} cannot be divided over {tensor} tensor and {expert} expert ranks: "
            f"{'; '.join(problems)}; use sizes that divide these"
        )


def kv_room(
    model: ModelSpec,
    gpu: GpuSpec,
    sharding: Sharding,
    *,
    quantisation: QuantSpec | None = None,
    memory_fraction: float = GPU_MEMORY_FRACTION,
) -> int:
    """Bytes of one GPU that are left for KV and states; CapacityError if the weights do not fit."""
    weights = weights_per_gpu(model, sharding, quantisation=quantisation).total
    usable = int(gpu.memory * memory_fraction)
    if weights >= usable:
        raise CapacityError(
            f"{model.name} over {sharding.tensor} tensor and {sharding.expert} expert ranks",
            need=f"{weights / 1e9:.1f} GB of weights per GPU",
            have=f"{usable / 1e9:.1f} GB ({memory_fraction:.0%} of {gpu.memory / 1e9:.0f} GB)",
            where=f"one {gpu.name}",
            fix="use more GPUs per replica, or a checkpoint in a smaller format",
        )
    return usable - weights


def kv_tokens(
    model: ModelSpec,
    gpu: GpuSpec,
    sharding: Sharding,
    *,
    dtype: KvDtype,
    sequences: int = 0,
    quantisation: QuantSpec | None = None,
) -> int:
    """Tokens of context that one GPU's memory holds beside weights and `sequences` live states."""
    room = kv_room(model, gpu, sharding, quantisation=quantisation)
    states = sequences * (state_bytes(model) // sharding.tensor)
    return max(0, room - states) // kv_bytes_per_token(model, dtype)


class TensorSize(SpecModel):
    """One tensor-parallel size: the weights of a GPU, and why it is impossible, if it is."""

    tensor: PositiveInt
    weights: WeightShare
    problem: str | None


def tensor_sizes(
    model: ModelSpec, gpu: GpuSpec, *, up_to: int = 8, quantisation: QuantSpec | None = None
) -> tuple[TensorSize, ...]:
    """Every tensor-parallel size from 1 to `up_to`, each with its verdict."""
    return tuple(
        TensorSize(
            tensor=tensor,
            weights=weights_per_gpu(model, Sharding(tensor=tensor), quantisation=quantisation),
            problem=_problem(model, gpu, Sharding(tensor=tensor), quantisation),
        )
        for tensor in range(1, up_to + 1)
    )


def _problem(
    model: ModelSpec, gpu: GpuSpec, sharding: Sharding, quantisation: QuantSpec | None
) -> str | None:
    try:
        check_divides(model, sharding, quantisation=quantisation)
        kv_room(model, gpu, sharding, quantisation=quantisation)
    except KimistackError as exc:
        return str(exc)
    return None
