"""How a checkpoint stores a tensor, and the bf16 or fp32 values the decoder computes with.

Three layouts are read: plain tensors; MXFP4 as compressed-tensors writes it (`<name>_packed`
[N, K/2] and `<name>_scale` [N, K/32], both uint8); and blocks of FP8 as DeepSeek-V3 and K2 have
them (`<name>` float8_e4m3fn and `<name>_scale_inv` fp32 per 128 x 128 block, which multiplies in
spite of its name). Files are mapped into memory: plain tensors stay in the page cache, others are
converted.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from kimi_runtime.errors import ConfigError
from kimi_runtime.kernels.mxfp4 import GROUP, NAN_SCALE, Mxfp4, dequantise_mxfp4
from kimi_runtime.models.checkpoint import Checkpoint
from kimi_runtime.models.tensors import TensorSpec
from kimi_runtime.spec.model import ModelSpec

_NESTED = "language_model."
"""Multimodal checkpoints keep the decoder under this prefix."""

_BLOCKED = ("self_attn.", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "experts.")


class StoredTensors(Mapping[str, Tensor]):
    """The decoder's tensors by name, read and converted whenever one is asked for.

    Reading raises ConfigError with what was expected. Nothing is kept: a model many times the size
    of what a GPU or a packed layout needs at once passes through tensor by tensor.
    """

    def __init__(
        self, checkpoint: Checkpoint, spec: ModelSpec, wanted: Mapping[str, TensorSpec]
    ) -> None:
        self._checkpoint, self._wanted = checkpoint, wanted
        self._quantisation = spec.quantisation
        nested = any(name.startswith(_NESTED) for name in checkpoint)
        self._prefix = _NESTED if nested else ""

    def __iter__(self) -> Iterator[str]:
        return iter(self._wanted)

    def __len__(self) -> int:
        return len(self._wanted)

    def __getitem__(self, name: str) -> Tensor:
        return self._read(self._prefix + name, self._wanted[name])

    def _read(self, name: str, wanted: TensorSpec) -> Tensor:
        """The tensor that the checkpoint calls `name`, in the dtype the decoder computes in."""
        match self._format(name, wanted):
            case "mxfp4":
                return self._mxfp4(name, wanted)
            case "fp8_block":
                return self._fp8_block(name, wanted)
        tensor = self._get(name, wanted.shape, name, wanted)
        dtype = getattr(torch, wanted.dtype)
        if tensor.dtype != dtype and not (wanted.dtype == "float32" and _widens(tensor.dtype)):
            hint = f"use an unquantised checkpoint of {wanted.dtype}"
            raise self._wrong_dtype(name, tensor.dtype, wanted.dtype, hint)
        return tensor.to(dtype)

    def _format(self, name: str, wanted: TensorSpec) -> str:
        quant = self._quantisation
        if quant is None or wanted.part != "matrix":
            return "plain"
        if quant.format == "mxfp4":
            return "mxfp4" if ".mlp.experts." in name else "plain"
        return "fp8_block" if any(part in name for part in _BLOCKED) else "plain"

    def _mxfp4(self, name: str, wanted: TensorSpec) -> Tensor:
        rows, columns = wanted.shape
        codes = self._get(f"{name}_packed", (rows, columns // 2), name, wanted)
        scales = self._get(f"{name}_scale", (rows, columns // GROUP), name, wanted)
        for part, tensor in (("packed", codes), ("scale", scales)):
            if tensor.dtype != torch.uint8:
                hint = "MXFP4 codes and scales are bytes"
                raise self._wrong_dtype(f"{name}_{part}", tensor.dtype, "uint8", hint)
        if (scales == NAN_SCALE).any():
            raise self._no_number(f"{name}_scale", scales == NAN_SCALE, "bytes 0 to 254")
        return dequantise_mxfp4(Mxfp4(codes, scales)).to(getattr(torch, wanted.dtype))

    def _fp8_block(self, name: str, wanted: TensorSpec) -> Tensor:
        quant = self._quantisation
        assert quant is not None
        side = quant.group
        rows, columns = wanted.shape
        blocks = (-(-rows // side), -(-columns // side))
        values = self._get(name, wanted.shape, name, wanted)
        scales = self._get(f"{name}_scale_inv", blocks, name, wanted)
        for part, tensor, dtype in (
            (name, values, torch.float8_e4m3fn),
            (f"{name}_scale_inv", scales, torch.float32),
        ):
            if tensor.dtype != dtype:
                hint = "block FP8 is e4m3 with fp32 scales"
                raise self._wrong_dtype(part, tensor.dtype, str(dtype).removeprefix("torch."), hint)
        if not scales.isfinite().all():
            raise self._no_number(f"{name}_scale_inv", ~scales.isfinite(), "finite numbers")
        spread = scales.repeat_interleave(side, 0)[:rows].repeat_interleave(side, 1)[:, :columns]
        return (values.float() * spread).to(getattr(torch, wanted.dtype))

    def _get(self, stored: str, shape: tuple[int, ...], name: str, wanted: TensorSpec) -> Tensor:
        """The tensor under the name `stored`, which must be there in that shape."""
        if stored not in self._checkpoint:
            raise ConfigError(self._missing(stored, name, wanted))
        found = self._checkpoint.shape(stored)
        if found != shape:
            raise ConfigError(
                f"{stored} in {self._checkpoint.path(stored)} has shape {found}, but the model's "
                f"config asks for {shape}; config.json and weights are of different models"
            )
        return self._checkpoint.tensor(stored)

    def _missing(self, stored: str, name: str, wanted: TensorSpec) -> str:
        expected = f"a {wanted.dtype} tensor of shape {wanted.shape}"
        if stored != name:
            expected = f"a part of {name}, {expected}"
        others = sorted(other for other in self._checkpoint if other.startswith(name))
        hint = "fetch the missing files"
        if others:
            hint = (
                f"there is {others[0]}: the weights are stored otherwise than config.json's "
                "quantization_config says"
            )
        return f"{self._checkpoint.folder} has no tensor {stored} ({expected} is expected); {hint}"

    def _wrong_dtype(self, stored: str, found: torch.dtype, wanted: str, hint: str) -> ConfigError:
        path = self._checkpoint.path(stored)
        return ConfigError(f"{stored} in {path} is {found}, but {wanted} is expected; {hint}")

    def _no_number(self, stored: str, bad: Tensor, expected: str) -> ConfigError:
        first = tuple(bad.nonzero()[0].tolist())
        return ConfigError(
            f"{stored} in {self._checkpoint.path(stored)} is not a number at {first} and "
            f"{int(bad.sum()) - 1} more places; {expected} are expected: fetch the file again"
        )


def _widens(dtype: torch.dtype) -> bool:
    """Checkpoints exist with the bias in bf16: what was lost there cannot be brought back."""
    return dtype in (torch.bfloat16, torch.float16)
