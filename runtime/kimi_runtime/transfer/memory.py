"""Memory that a transport can register: a view, and the file behind it where there is one."""

import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kimi_runtime.errors import CapacityError
from kimi_runtime.units import format_bytes

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
TRAILER_BYTES = PAGE_BYTES
"""Behind the data of a shared file lies a page in which its owner says what peers may do."""


@dataclass(frozen=True, slots=True)
class Memory:
    """`view` is writable bytes. `path` is the file it maps from offset 0; None: private."""

    view: memoryview
    path: Path | None = None

    @property
    def size_bytes(self) -> int:
        """Length of the view."""
        return self.view.nbytes


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a GPU, which only a network card reads and writes: for the verbs transport.

    `dmabuf` is a file descriptor of the allocation, which stays the caller's, and `offset` is where
    in it these `nbytes` begin: a tensor of a caching allocator is seldom at the start.
    """

    dmabuf: int
    offset: int
    nbytes: int

    @property
    def size_bytes(self) -> int:
        """As `Memory.size_bytes`."""
        return self.nbytes


def trailer_offset(size_bytes: int) -> int:
    """Where a shared file's trailer begins: the next page after its data."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def private_memory(size_bytes: int) -> Memory:
    """Zeroed memory of this process alone, on huge pages where the kernel has them.

    With small ones, every 4 KiB of a copy that is larger than the processor's caches costs a walk
    of the page table, in a virtual machine of two: several times the copy itself.
    """
    if size_bytes < HUGE_PAGE_BYTES:
        return Memory(memoryview(bytearray(size_bytes)))
    mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return Memory(memoryview(mapping))


def shared_memory(path: Path, size_bytes: int) -> Memory:
    """A new file for `size_bytes`, mode 0600, mapped and backed by real pages.

    A file that is there is unlinked, never truncated: a process that still maps it would be killed.
    The file has a trailer of `TRAILER_BYTES` more, which transports use. Raises CapacityError when
    the file system has no room: without reserved pages a later store would kill the process with
    SIGBUS.
    """
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.posix_fallocate(descriptor, 0, trailer_offset(size_bytes) + TRAILER_BYTES)
        except OSError as exc:
            path.unlink()
            free = os.statvfs(path.parent)
            raise CapacityError(
                f"shared memory file {path}",
                need=format_bytes(size_bytes),
                have=f"{format_bytes(free.f_bavail * free.f_frsize)} free",
                where=str(path.parent),
                fix="lower the size or free space there",
            ) from exc
        return Memory(memoryview(mmap.mmap(descriptor, size_bytes)), path)
    finally:
        os.close(descriptor)
