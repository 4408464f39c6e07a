"""Triton as the kernel files see it, and whether kernels can run here.

Every kernel file holds its plain reference beside the kernel, and the references must import where
only torch is installed (the `engine` extra without `kernels`). So the kernel files take `triton`
and `tl` from here: the real modules where there are any, else stand-ins whose kernels refuse to
launch. What a launcher checks about its arguments is here too, so that all say it alike.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from kimi_runtime.errors import KernelUnavailable

try:
    import triton
    import triton.language as tl
except ImportError:

    class _AbsentKernel:
        """What `@triton.jit` makes of a function where Triton is absent."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getitem__(self, grid: object) -> NoReturn:
            raise KernelUnavailable(
                f"kernel {self._name} needs Triton, which is not installed here; "
                "install kimistack[kernels] or call the reference of the same name with _ref"
            )

    class _AbsentTriton:
        """As much of `triton` and `triton.language` as importing a kernel file touches."""

        constexpr = int

        @staticmethod
        def jit(function: Callable[..., Any]) -> _AbsentKernel:
            return _AbsentKernel(function.__name__)

        @staticmethod
        def cdiv(x: int, y: int) -> int:
            return -(-x // y)

    triton = tl = _AbsentTriton()

__all__ = [
    "can_launch",
    "cdiv",
    "device_arch",
    "is_installed",
    "require_contiguous",
    "require_device",
    "require_dtype",
    "tl",
    "triton",
]


def cdiv(x: int, y: int) -> int:
    """The smallest whole number of `y` that covers `x`."""
    return -(-x // y)


def is_installed() -> bool:
    """Whether the real Triton is here."""
    return hasattr(triton, "__version__")


def _is_interpreting() -> bool:
    """Whether Triton runs kernels in its CPU interpreter (`TRITON_INTERPRET=1`)."""
    return is_installed() and bool(triton.knobs.runtime.interpret)


def can_launch(device: torch.device) -> bool:
    """Whether a caller on `device` should use launchers; if not, it uses the references.

    The CPU answers no even under Triton's interpreter, which is for tests of the kernels
    themselves: it is a thousand times slower than the reference.
    """
    return device.type == "cuda" and is_installed()  # ROCm builds of torch say "cuda" as well


def device_arch(device: torch.device) -> str:
    """`gfx950`, `sm_90` and so on: the name of tuning data. `cpu` for the interpreter."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def require_device(**tensors: Tensor) -> torch.device:
    """The one device all tensors are on, if kernels run there.

    Raises ValueError for tensors on different devices, KernelUnavailable where nothing can run.
    """
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) > 1:
        where = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise ValueError(f"a kernel takes tensors of one device, not {where}")
    (device,) = devices
    if device.type != "cuda" and not _is_interpreting():
        raise KernelUnavailable(
            f"kernels run on a GPU, not on {device}; call the reference of the same name with _ref"
        )
    return device


def require_contiguous(**tensors: Tensor) -> None:
    """ValueError that names the first tensor which is not contiguous."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}, "
                "but the kernel reads contiguous memory; pass .contiguous()"
            )


def require_dtype(dtype: torch.dtype, **tensors: Tensor) -> None:
    """ValueError that names the first tensor of another dtype."""
    for name, tensor in tensors.items():
        if tensor.dtype != dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}, but the kernel takes {dtype}")
