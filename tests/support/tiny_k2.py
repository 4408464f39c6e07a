"""A K2 small enough for hundreds of forward passes, and ways to run it.

The latent (512) and the cached row (576) keep their real widths: it is products over 512 inputs and
more whose order of additions changes with the number of rows.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_runtime.models.cache import KvCache
from kimi_runtime.models.k2 import K2Model
from kimi_runtime.models.rows import padded_rows
from kimi_runtime.models.spans import TokenRun
from kimi_runtime.models.weights import random_weights
from kimi_runtime.spec.model import KIMI_NANO, ModelSpec, MoeSpec, RopeSpec, YarnSpec

BLOCK_TOKENS = 64


def tiny_spec(**changes: object) -> ModelSpec:
    """Two layers, one of them dense."""
    fields: dict[str, object] = {
        "name": "kimi-tiny",
        "hidden": 128,
        "layers": 2,
        "heads": 4,
        "q_lora_rank": 64,
        "qk_nope_dim": 32,
        "v_dim": 32,
        "rope": RopeSpec(theta=50_000.0, yarn=YarnSpec(factor=8.0, original_positions=256)),
        "max_positions": 2048,
        "dense_ffn": 512,
        "moe": MoeSpec(experts=8, top_k=2, shared=1, ffn=64, scaling=2.827),
        "vocab_size": 320,
        "bos_id": 256,
        "eos_ids": (258,),
        "pad_id": 319,
    }
    return ModelSpec.model_validate(dict(KIMI_NANO) | fields | changes)


@dataclass(frozen=True)
class Run:
    """Tokens of one request."""

    start: int
    ids: tuple[int, ...]
    blocks: tuple[int, ...]
    sample: bool = True


def model_of(
    spec: ModelSpec, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> tuple[K2Model, dict[str, Tensor]]:
    """A model with random weights in `dtype`, and those weights (the router's bias stays fp32)."""
    tensors = {
        name: tensor.to(device, torch.float32 if name.endswith("bias") else dtype)
        for name, tensor in random_weights(spec, seed).tensors.items()
    }
    return K2Model(spec, tensors), tensors


def cache_of(model: K2Model, blocks: int, *, fill: float = 0.0) -> KvCache:
    """A cache whose every element is `fill`: NaN shows any read of what was never written."""
    shape = (blocks, model.spec.layers, BLOCK_TOKENS, model.spec.kv_row_dim)
    return KvCache(torch.full(shape, fill, dtype=model.dtype, device=model.device))


def all_logits(model: K2Model, ids: Sequence[int]) -> Tensor:
    """[len(ids), vocab]: logits after every token, computed as one step on a cache of its own."""
    blocks = -(-len(ids) // BLOCK_TOKENS)
    cache = cache_of(model, blocks, fill=torch.nan)
    run: TokenRun = Run(0, tuple(ids), tuple(range(blocks)))
    step = model.step_builder(cache).build([run], padded_rows(len(ids)))
    return model.forward(
        dataclasses.replace(step, sampled=torch.arange(len(ids), device=model.device)), cache
    )


def random_ids(count: int, seed: int, vocab: int = 320) -> tuple[int, ...]:
    """Ids drawn uniformly."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, vocab, (count,), generator=generator).tolist())
