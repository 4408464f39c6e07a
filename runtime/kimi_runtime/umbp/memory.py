"""The daemon's arena file: its sizes, its memory, and taking over what the daemon before left."""

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kimi_connect.arena import Arena, ArenaGone, Shape, create_arena, epoch_of, reopen_arena
from kimi_connect.directory import Cells
from kimi_runtime import clock
from kimi_runtime.errors import CapacityError, ConfigError
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.umbp.cells import CellJournal
from kimi_runtime.umbp.journal import Kept
from kimi_runtime.umbp.pages import Pages
from kimi_runtime.units import format_bytes

LISTED_BLOCK_BYTES = 64 << 10
"""The directory has room for blocks of this size; smaller ones may be more than it lists."""

FEW_PAGES = 65_536
"""An arena of at most so many pages lists a block a page."""

FEW_RESERVATIONS = 4096

ALLOCATE_BYTES = 1 << 30
ALLOCATE_THREADS = 8
"""Zeroing memory takes a core 0.2 s a GiB or more."""

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_DEFAULT, _MPOL_BIND = 0, 2
_POPULATE = 23
"""MADV_POPULATE_WRITE, since Linux 5.14."""

log = logging.getLogger(__name__)


def shape_of(spec: UmbpSpec) -> Shape:
    """The layout of `dram_bytes`: the directory takes its part, the rest is pages."""
    total = spec.dram_bytes // spec.page_bytes
    listed = total if total <= FEW_PAGES else max(FEW_PAGES, spec.dram_bytes // LISTED_BLOCK_BYTES)
    listed = min(total, listed)
    # a reservation takes a spare, and so does what of a block does not fit into its head
    spares = listed // 4 + min(total, FEW_RESERVATIONS)
    cells = Cells(slots=listed + listed // 4 + 1, spares=spares)
    if cells.table_bytes + spec.page_bytes > spec.dram_bytes // 2:
        cells = Cells()  # of next to nothing, all is for pages
    table = -(-cells.table_bytes // spec.page_bytes)
    return Shape(spec.page_bytes, total - table, cells)


def segments_of(spec: UmbpSpec, pages: int) -> list[int]:
    """Pages on each NUMA node; one segment where none are named."""
    count = max(1, len(spec.numa_nodes))
    return [pages // count + (n < pages % count) for n in range(count)]


def open_arena(spec: UmbpSpec, *, own_writer: bytes) -> tuple[Arena, CellJournal | None, Kept]:
    """The arena and what is in it. Blocking. ConfigError or CapacityError if there can't be one."""
    shape, path = shape_of(spec), str(spec.arena)
    epoch = max(int(clock.unix_s() * 1e6), epoch_of(path) + 1)
    if shape.cells.slots:
        left = _left(path, shape, own_writer)
        if left is not None:
            left[0].take_over(epoch)
            return left
    arena = _new(spec, shape, epoch)
    journal = CellJournal(arena, own_writer=own_writer) if shape.cells.slots else None
    # numbers of an arena before are nobody's here: a client may still give them back
    return arena, journal, Kept(number=epoch)


def _left(
    path: str, shape: Shape, own_writer: bytes
) -> tuple[Arena, CellJournal | None, Kept] | None:
    """What a daemon before left, if that can be taken over."""
    if not os.path.exists(path):
        return None
    try:
        arena = reopen_arena(path, shape)
    except ArenaGone as exc:
        log.warning("umbp: %s; a new one is made", exc)
        return None
    journal = CellJournal(arena, own_writer=own_writer)
    kept = journal.recover()
    extents = [extent for block in kept.blocks for extent in block.extents]
    extents += [extent for old in kept.reservations for extent in old.extents]
    try:
        Pages(shape.pages, used=extents)
    except ValueError as exc:
        log.warning("umbp: the arena %s contradicts itself (%s); a new one is made", path, exc)
        arena.retire()
        arena.close()
        return None
    return arena, journal, kept


def _new(spec: UmbpSpec, shape: Shape, epoch: int) -> Arena:
    path = str(spec.arena)

    def allocate(descriptor: int, shape: Shape, size: int) -> None:
        _allocate(descriptor, shape, size, spec)

    try:
        return create_arena(
            path,
            page_bytes=shape.page_bytes,
            pages=shape.pages,
            epoch=epoch,
            cells=shape.cells,
            allocate=allocate,
        )
    except OSError as exc:
        if exc.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise ConfigError(f"the arena {path} can't be created: {exc.strerror}") from exc
        there = os.statvfs(spec.arena.parent)
        raise CapacityError(
            f"the arena {path}",
            need=format_bytes(spec.dram_bytes),
            have=f"{format_bytes(there.f_bavail * there.f_frsize)} free",
            where=str(spec.arena.parent),
            fix="lower dram_bytes or free space there",
        ) from exc


def _allocate(descriptor: int, shape: Shape, size: int, spec: UmbpSpec) -> None:
    """Back every byte of the file, each segment on its node, with several threads."""
    there = os.fstatvfs(descriptor)
    # said at once, not after minutes; a hugetlbfs without a limit says nothing here
    if there.f_blocks and there.f_bavail * there.f_frsize < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    ranges: list[tuple[int, int, int | None]] = [(0, shape.data_at, None)]
    at = shape.data_at
    nodes: tuple[int | None, ...] = spec.numa_nodes or (None,)
    for pages, node in zip(segments_of(spec, shape.pages), nodes, strict=True):
        end = at + pages * shape.page_bytes
        steps = range(at, end, ALLOCATE_BYTES)
        ranges += [(start, min(ALLOCATE_BYTES, end - start), node) for start in steps]
        at = end
    ranges.append((at, size - at, None))

    with (
        _mapped(descriptor, size) as address,
        ThreadPoolExecutor(min(ALLOCATE_THREADS, os.cpu_count() or 1)) as threads,
    ):

        def back(part: tuple[int, int, int | None]) -> None:
            start, length, node = part
            if length:
                with _on_node(node):
                    os.posix_fallocate(descriptor, start, length)
                    _touch(address + start, length)

        list(threads.map(back, ranges))


@contextlib.contextmanager
def _mapped(descriptor: int, size: int) -> Iterator[int]:
    """The address at which the file is mapped for now."""
    os.ftruncate(descriptor, size)
    with mmap.mmap(descriptor, size) as mapping:
        first = ctypes.c_char.from_buffer(mapping)
        try:
            yield ctypes.addressof(first)
        finally:
            del first  # the mapping can't be closed while it is there


def _touch(address: int, length: int) -> None:
    """Have the kernel zero what it has only set aside, here and not at an engine's first store.

    By ctypes, because `mmap.madvise` keeps the interpreter to itself. An older kernel declines.
    """
    page = mmap.PAGESIZE
    start = address // page * page
    _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + length - start), _POPULATE)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def _on_node(node: int | None) -> Iterator[None]:
    """Memory this thread allocates comes from one NUMA node. ConfigError if there is none such."""
    if node is None:
        yield
        return
    if not Path(f"/sys/devices/system/node/node{node}").exists():
        raise ConfigError(f"numa_nodes names node {node}, which this machine does not have")
    _set_policy(_MPOL_BIND, node)
    try:
        yield
    finally:
        _set_policy(_MPOL_DEFAULT, None)


def _set_policy(mode: int, node: int | None) -> None:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise ConfigError(f"numa_nodes is not known on {platform.machine()}: leave it out")
    mask = (ctypes.c_ulong * 16)()
    if node is not None:
        bits = 8 * ctypes.sizeof(ctypes.c_ulong)
        mask[node // bits] = 1 << node % bits
    where = (None, 0) if node is None else (mask, 8 * ctypes.sizeof(mask))
    if _libc().syscall(number, mode, *where):
        failed = os.strerror(ctypes.get_errno())
        raise ConfigError(f"no memory can be had of NUMA node {node}: {failed}; see numa_nodes")
