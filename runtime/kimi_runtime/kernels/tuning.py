"""Tile sizes by kernel, architecture and shape bucket: data, never tried out while serving.

`tuned/<arch>.json` maps a kernel to buckets, in rising order of one size of the problem (named
by `by`; the launcher passes it), the last without a bound. An architecture without a file, and a
kernel without an entry, run with the defaults below, which are safe on every GPU.
"""

import functools
import importlib.resources
import json
from collections.abc import Mapping
from importlib.resources.abc import Traversable
from typing import Any

import torch

from kimi_runtime.errors import ConfigError
from kimi_runtime.kernels.lang import device_arch

DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gather_pages": {"TILE": 1024, "num_warps": 4},
    "scatter_pages": {"TILE": 1024, "TILE_IDS": 1024, "num_warps": 4},
    "quantise_mxfp4": {"TILE_GROUPS": 32, "num_warps": 4},
    "quantise_mxfp8": {"TILE_GROUPS": 32, "num_warps": 4},
    "mxfp4_gemm/bf16": {"TILE_M": 16, "TILE_N": 64, "TILE_K": 128, "XCDS": 1, "num_warps": 4},
    "mxfp4_gemm/mxfp8": {"TILE_M": 16, "TILE_N": 64, "TILE_K": 128, "XCDS": 1, "num_warps": 4},
    "mxfp4_gemm/mxfp4": {"TILE_M": 16, "TILE_N": 64, "TILE_K": 128, "XCDS": 1, "num_warps": 4},
}
"""Kernel -> launch arguments (tiles in capitals, Triton's own options in lower case)."""

_ALWAYS = {"enable_fp_fusion": False}
"""No fused multiply-add the source does not ask for: Triton's default differs by version."""


def tiles(kernel: str, device: torch.device, size: int) -> dict[str, int]:
    """Launch arguments of `kernel` on `device` for a problem of `size` (see `by` in the data)."""
    return tiles_for(kernel, device_arch(device), size)


def tiles_for(kernel: str, arch: str, size: int) -> dict[str, int]:
    """Launch arguments of `kernel` on an architecture such as `gfx950`.

    Raises KeyError for a kernel without defaults: a typo, not a missing file.
    """
    chosen: dict[str, int] = {**DEFAULTS[kernel], **_ALWAYS}
    for bucket in tuned(arch).get(kernel, {}).get("buckets", ()):
        if bucket["up_to"] is None or size <= bucket["up_to"]:
            chosen.update(bucket["tiles"])
            break
    return chosen


@functools.cache
def tuned(arch: str) -> dict[str, Any]:
    """The tuning data that ships for an architecture, by kernel; empty where there is none."""
    return read_tuned(importlib.resources.files(__package__) / "tuned", arch)


def read_tuned(folder: Traversable, arch: str) -> dict[str, Any]:
    """`<arch>.json` in `folder`, by kernel; empty where there is none.

    Raises ConfigError for a file that names an unknown kernel or argument, or whose buckets do
    not rise to an unbounded one, since a silent default would look like a slow GPU.
    """
    file = folder / f"{arch}.json"
    if not file.is_file():
        return {}
    kernels: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["kernels"]
    for kernel, entry in kernels.items():
        _check(file.name, kernel, entry["buckets"])
    return kernels


def _check(file: str, kernel: str, buckets: list[dict[str, Any]]) -> None:
    if kernel not in DEFAULTS:
        raise ConfigError(f"{file} tunes {kernel!r}, but the kernels are {', '.join(DEFAULTS)}")
    bounds = [bucket["up_to"] for bucket in buckets]
    if not bounds or bounds[-1] is not None or bounds[:-1] != sorted(set(bounds[:-1])):
        raise ConfigError(f"{file}: the buckets of {kernel} must rise and end in null: {bounds}")
    known = {*DEFAULTS[kernel], "num_warps", "num_stages", "waves_per_eu", "matrix_instr_nonkdim"}
    for bucket in buckets:
        unknown = set(bucket["tiles"]) - known
        if unknown:
            raise ConfigError(f"{file}: {kernel} has no argument {', '.join(sorted(unknown))}")
