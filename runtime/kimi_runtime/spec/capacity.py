"""What an instance's GPUs hold: weights, KV, states, and the largest context. Pure.

KV is counted as our engine keeps it: every tensor rank has the whole of it. Engines that spread a
sequence's KV over ranks (decode context parallel) are described by `context_ranks`.
"""

from typing import Annotated

from annotated_types import Gt
from pydantic import Field, PositiveInt

from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.base import SpecModel
from kimi_runtime.spec.hardware import NODES, NodeSpec
from kimi_runtime.spec.model import ModelSpec, QuantSpec
from kimi_runtime.spec.parallel import (
    Sharding,
    WeightShare,
    check_divides,
    kv_room,
    weights_per_gpu,
)
from kimi_runtime.spec.published import K3, PUBLISHED, k31_pro, published
from kimi_runtime.spec.sizes import KvDtype, kv_bytes_per_token, state_bytes
from kimi_runtime.spec.worker import Role
from kimi_runtime.units import Bytes

K31_PRO = "kimi-k3.1-pro"
_AS_K3 = "sizes as if its checkpoint were stored as K3's, which is not published"
Range = tuple[PositiveInt, PositiveInt]


class Shape(SpecModel):
    """Instances of one role."""

    role: Role = Role.BOTH
    replicas: PositiveInt = 1
    tensor: PositiveInt = 1
    expert: PositiveInt = 1
    kv_memory: Annotated[Bytes, Gt(0)] | None = Field(
        None, description="Of a GPU, for KV and states; None: all that weights leave."
    )
    max_running: PositiveInt = 256
    step_tokens: PositiveInt = 8192


class CapacitySpec(SpecModel):
    """A model on GPUs, and the load to imagine. Lengths are ranges, evenly spread."""

    name: str = ""
    model: str = Field(description="A published model's name, e.g. kimi-k2.7-code.")
    gpu: str = Field("MI355X", description="Of a node in `spec.hardware`.")
    shapes: Annotated[tuple[Shape, ...], Field(min_length=1)] = (Shape(),)
    quantisation: QuantSpec | None = Field(None, description="None: the model's own format.")
    kv_dtype: KvDtype = "fp8"
    context_ranks: PositiveInt = Field(
        1, description="GPUs that share a sequence's KV; 1: each has all of it."
    )
    input: Range = Field((6554, 8192), description="8k/1k as benchmarks draw it.")
    output: Range = (820, 1024)
    concurrency: tuple[PositiveInt, ...] = (1, 4, 16, 32, 64, 128, 256)


class Holding(SpecModel):
    """One GPU of a shape. Bytes."""

    role: Role
    replicas: PositiveInt
    gpus: PositiveInt = Field(description="Of one instance.")
    weights: WeightShare
    kv_memory: Bytes
    token_bytes: float = Field(description="KV of one token on this GPU.")
    state_bytes: Bytes = Field(description="KDA states of one sequence on this GPU; 0: none.")
    max_context_tokens: int = Field(description="What the model was made for.")

    @property
    def largest_context(self) -> int:
        """Tokens of the longest single request that fits."""
        room = max(self.kv_memory - self.state_bytes, 0)
        return min(int(room / self.token_bytes), self.max_context_tokens)

    @property
    def at_largest_context(self) -> int:
        """Bytes in use with one request of that length."""
        return self.with_one(self.largest_context)

    @property
    def full(self) -> int:
        """Bytes in use with all KV memory taken."""
        return self.weights.total + self.kv_memory

    def with_one(self, tokens: int) -> int:
        """Bytes in use with one request of so many tokens."""
        return self.weights.total + self.state_bytes + round(tokens * self.token_bytes)

    def sequences(self, tokens: int) -> int:
        """How many requests of so many tokens an instance holds at once."""
        return int(self.kv_memory // (self.state_bytes + tokens * self.token_bytes))


def holdings(spec: CapacitySpec) -> tuple[Holding, ...]:
    """What each shape's GPUs hold.

    ConfigError for a model or GPU that is not known or does not divide, CapacityError where weights
    or the KV memory asked for do not fit.
    """
    model, _ = model_of(spec.model)
    return tuple(_holding(spec, shape, model, node_of(spec.gpu)) for shape in spec.shapes)


def model_of(name: str) -> tuple[ModelSpec, str | None]:
    """A model by name, and what had to be assumed of it."""
    if name == K31_PRO:
        assumed = k31_pro(
            tied_embeddings=K3.tied_embeddings,
            bos_id=K3.bos_id,
            eos_ids=K3.eos_ids,
            pad_id=K3.pad_id,
            quantisation=K3.quantisation,
            vision=K3.vision,
        )
        return assumed, _AS_K3
    if name not in PUBLISHED:
        known = ", ".join(sorted((*PUBLISHED, K31_PRO)))
        raise ConfigError(f"model: {name!r} is not one of {known}")
    return published(name), None


def node_of(gpu: str) -> NodeSpec:
    """The node with such GPUs; ConfigError naming those there are."""
    if gpu not in NODES:
        raise ConfigError(f"gpu: {gpu!r} is not one of {', '.join(NODES)}")
    return NODES[gpu]


def _holding(spec: CapacitySpec, shape: Shape, model: ModelSpec, node: NodeSpec) -> Holding:
    sharding = Sharding(tensor=shape.tensor, expert=shape.expert)
    check_divides(model, sharding, quantisation=spec.quantisation)
    room = kv_room(model, node.gpu, sharding, quantisation=spec.quantisation)
    if spec.context_ranks > shape.tensor or shape.tensor % spec.context_ranks:
        raise ConfigError(
            f"context_ranks: {spec.context_ranks} ranks do not divide the {shape.tensor} tensor "
            "ranks; use a divisor"
        )
    return Holding(
        role=shape.role,
        replicas=shape.replicas,
        gpus=max(shape.tensor, shape.expert),
        weights=weights_per_gpu(model, sharding, quantisation=spec.quantisation),
        kv_memory=min(room, shape.kv_memory or room),
        token_bytes=kv_bytes_per_token(model, spec.kv_dtype) / spec.context_ranks,
        state_bytes=state_bytes(model) // shape.tensor,
        max_context_tokens=model.max_positions,
    )
