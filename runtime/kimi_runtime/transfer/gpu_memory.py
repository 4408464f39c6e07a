"""A GPU's memory as a network card takes it: by a dma-buf of its allocation and an offset in that.

The allocation's own driver exports it: ROCm's HSA runtime, or CUDA's driver. Both are loaded when
they are asked for, for nothing else here needs them.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from kimi_runtime.errors import ConfigError, TransferError
from kimi_runtime.transfer.memory import PAGE_BYTES, DeviceMemory

_HSA = "libhsa-runtime64.so.1"
_CUDA = "libcuda.so.1"
_CUDA_DMABUF = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD


@contextmanager
def gpu_memory(address: int, nbytes: int) -> Iterator[DeviceMemory]:
    """The `nbytes` at the device address `address` (`tensor.data_ptr()`), while the body runs.

    A registration made of it outlives the body; the descriptor does not. Raises ConfigError without
    a GPU's driver, TransferError if the driver does not export this memory.
    """
    for name, export in ((_HSA, _export_hsa), (_CUDA, _export_cuda)):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        descriptor, offset = export(library, address, nbytes)
        try:
            yield DeviceMemory(descriptor, offset, nbytes)
        finally:
            os.close(descriptor)
        return
    raise ConfigError(f"GPU memory needs its driver, and neither {_HSA} nor {_CUDA} is here")


def _export_hsa(library: ctypes.CDLL, address: int, nbytes: int) -> tuple[int, int]:
    descriptor, offset = ctypes.c_int(-1), ctypes.c_uint64()
    status = library.hsa_amd_portable_export_dmabuf(
        ctypes.c_void_p(address),
        ctypes.c_size_t(nbytes),
        ctypes.byref(descriptor),
        ctypes.byref(offset),
    )
    _require(status, "hsa_amd_portable_export_dmabuf", address, nbytes)
    return descriptor.value, offset.value


def _export_cuda(library: ctypes.CDLL, address: int, nbytes: int) -> tuple[int, int]:
    base, size, descriptor = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_int(-1)
    status = library.cuMemGetAddressRange_v2(
        ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
    )
    _require(status, "cuMemGetAddressRange", address, nbytes)
    pages = -(-size.value // PAGE_BYTES) * PAGE_BYTES
    status = library.cuMemGetHandleForAddressRange(
        ctypes.byref(descriptor),
        base,
        ctypes.c_size_t(pages),
        ctypes.c_int(_CUDA_DMABUF),
        ctypes.c_ulonglong(0),
    )
    _require(status, "cuMemGetHandleForAddressRange", address, nbytes)
    return descriptor.value, address - base.value


def _require(status: int, call: str, address: int, nbytes: int) -> None:
    if status:
        raise TransferError(
            f"the {nbytes} bytes of GPU memory at {address:#x} can't be exported as a dma-buf: "
            f"{call} returned {status}; use a kernel and driver with dma-buf export"
        )
