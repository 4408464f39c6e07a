"""Weights of a model: drawn from a seed, or read from a folder of safetensors."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from kimi_runtime.errors import CapacityError, ConfigError
from kimi_runtime.models.checkpoint import Checkpoint
from kimi_runtime.models.packaged import packaged_folder
from kimi_runtime.models.stored import StoredTensors
from kimi_runtime.models.tensors import Part, TensorSpec, k2_tensors
from kimi_runtime.spec.config_file import load_config
from kimi_runtime.spec.model import KIMI_NANO, ModelSpec
from kimi_runtime.spec.worker import FileWeights, PackagedWeights, Weights

_GRID = 2**15  # random values are multiples of 1/_GRID of their greatest one


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Tensors by Hugging Face name. Equal digests mean equal models, spec and values."""

    tensors: Mapping[str, Tensor]
    digest: str


def open_weights(source: Weights) -> tuple[ModelSpec, ModelWeights]:
    """The model a worker's file names. ConfigError when it is not there or not what it says."""
    if isinstance(source, PackagedWeights):
        source = FileWeights(path=packaged_folder(source.name))
    if isinstance(source, FileWeights):
        if not source.path.is_dir():
            raise ConfigError(
                f"model folder {source.path} is not there; name a folder with config.json and "
                "safetensors files, or use weights of kind 'random'"
            )
        spec = load_config(source.path)
        return spec, load_weights(spec, source.path)
    spec = KIMI_NANO if source.config is None else load_config(source.config)
    return spec, random_weights(spec, source.seed)


def random_weights(spec: ModelSpec, seed: int) -> ModelWeights:
    """The same weights for the same seed on every machine and in every order of drawing.

    Each tensor has a generator of its own, named by seed and tensor. Values are uniform on an
    integer grid, scaled so that logits have a standard deviation near 3 and attention is neither
    flat nor a single peak: other histories lead to other ids, so that a wrong cache shows.
    CapacityError when the machine's memory cannot hold them.
    """
    wanted = k2_tensors(spec)
    need = sum(tensor.size_bytes for tensor in wanted.values())
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > have:
        raise CapacityError(
            f"random weights of {spec.name}",
            need=f"{need / 2**30:.1f} GiB",
            have=f"{have / 2**30:.1f} GiB of memory",
            where="this machine",
            fix="use kimi-nano, or a smaller config.json",
        )
    tensors = {name: _random_tensor(name, tensor, seed) for name, tensor in wanted.items()}
    return ModelWeights(tensors, digest_of(spec, tensors))


def load_weights(spec: ModelSpec, folder: Path) -> ModelWeights:
    """The tensors that the model needs, in the folder's safetensors files.

    bf16, block FP8 and MXFP4 are read (`models.stored`), as config.json says. ConfigError names
    a missing or truncated file, a missing tensor or one that two files have, a shape, a dtype or a
    scale that is not the model's, with what was expected. Tensors the decoder has no use for are
    left alone. Every tensor is looked at once here, for the digest; none is kept: `tensors` reads
    one each time it is asked for it, plain ones as mapped memory.
    """
    checkpoint = Checkpoint(folder)
    tensors = StoredTensors(checkpoint, spec, k2_tensors(spec))
    digest = digest_of(spec, tensors)
    checkpoint.unmap()  # with it go the pages that the digest has touched
    return ModelWeights(tensors, digest)


def digest_of(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> str:
    """32 hex digits over the model's dimensions and every tensor's name, dtype, shape and bytes."""
    digest = hashlib.blake2b(spec.model_dump_json().encode(), digest_size=16, person=b"kimi-model")
    for name in sorted(tensors):
        tensor = tensors[name]
        content = tensor.contiguous().view(torch.uint8).cpu().numpy()
        inner = xxhash.xxh3_128_hexdigest(content.data)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {inner}\n".encode())
    return digest.hexdigest()


def _random_tensor(name: str, tensor: TensorSpec, seed: int) -> Tensor:
    key = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8, person=b"kimi-weights").digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
    # integers, not normal values: those go through log and cos, which CPUs round differently
    grid = torch.randint(-_GRID, _GRID + 1, tensor.shape, generator=generator, dtype=torch.int32)
    values = grid.to(torch.float32) * (1.0 / _GRID)
    offset, width = _spread(name, tensor.part, tensor.shape[-1])
    return (values * width + offset).to(getattr(torch, tensor.dtype))


def _spread(name: str, part: Part, inputs: int) -> tuple[float, float]:
    """Centre and half-width of a tensor's values. A uniform deviation is width / sqrt(3)."""
    unit: float = 3.0**0.5
    match part:
        case "embedding":
            return 0.0, unit
        case "head":
            return 0.0, 3.0 * unit * inputs**-0.5
        case "norm":
            return 1.0, 0.125
        case "bias":
            return 0.0, 0.0625
        case "matrix":
            gain = 2.0 if name.endswith(("q_b_proj.weight", "q_proj.weight")) else 1.0
            return 0.0, gain * unit * inputs**-0.5
