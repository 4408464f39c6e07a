"""The arena: one file of a node that holds the pool's pages, mapped by the daemon and by engines.

Layout: a header of `max(4096, page_bytes)` bytes, the directory (see `directory`), then the pages.
The header says which layout, which sizes and which *epoch*, a new one per start of a daemon. A
daemon that starts takes over the file that one before it left (after a crash as it was), or makes a
new one under the same name and marks the old one retired, so that a mapping of it is never trusted
again and never written over. Header fields are little-endian.

Who maps an arena to write holds a lock on one byte of the file, far beyond its end, which its
instance names. The lock ends with the process, so a daemon that knows only the instance of a writer
of its predecessor's can tell whether it is still there.

A client also holds a lock on one byte for each generation of its stock that it writes to. A daemon
that gets the lock instead has the generation back: the client, which looks at the number of what
was revoked once it has its locks, will not write there any more.
"""

import contextlib
import fcntl
import mmap
import os
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kimi_connect.directory import Cells, Directory
from kimi_connect.forking import leave_to_parent
from kimi_connect.wire import Extent

MAGIC = b"KIMIUMBP"
LAYOUT_VERSION = 3
LIVE, RETIRED, LEFT = 1, 2, 3
"""LEFT: its daemon stopped in order and left it for the next."""

MIN_HEADER_BYTES = 4096

# magic, version, state, page bytes, pages, epoch, slots, spares, number
_HEADER = struct.Struct("<8sIIIQQQQQ")
_STATE, _STATE_OFFSET = struct.Struct("<I"), 12
_EPOCH_OFFSET = 28
_NUMBER, _NUMBER_OFFSET = struct.Struct("<Q"), 52
_REVOKED_OFFSET = 64

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14, which the mmap module has no name for."""

_CHUNK_BYTES = 2 << 20
"""Mapped at a time: one call is several times cheaper than a fault for each of its pages."""

_LOCKS_FROM, _STOCKS_FROM = 1 << 61, 1 << 62
_FLOCK = struct.Struct("hhqqi")


class ArenaGone(Exception):
    """The file is not the arena that was asked for: missing, retired, another layout or epoch."""


def header_bytes(page_bytes: int) -> int:
    """Where page 0 starts; a multiple of the page size, so that pages stay aligned."""
    return max(MIN_HEADER_BYTES, page_bytes)


NO_CELLS = Cells()


class Shape(NamedTuple):
    """The sizes that make two arenas the same layout."""

    page_bytes: int
    pages: int
    cells: Cells = NO_CELLS

    @property
    def data_at(self) -> int:
        """Where page 0 starts; a multiple of the page size, so that pages stay aligned."""
        head = header_bytes(self.page_bytes)
        return head + -(-self.cells.table_bytes // head) * head

    @property
    def file_bytes(self) -> int:
        """Of the whole file, at least."""
        return self.data_at + self.page_bytes * self.pages


class Arena:
    """A mapped arena. Views of it stay valid as long as they are kept, whatever the daemon does."""

    def __init__(self, mapping: mmap.mmap, descriptor: int, shape: Shape, epoch: int) -> None:
        self.shape, self.epoch = shape, epoch
        self.page_bytes, self.pages = shape.page_bytes, shape.pages
        self._view = memoryview(mapping)
        self._mapping = mapping
        self._data = self._view[shape.data_at :]
        head = header_bytes(shape.page_bytes)
        self.table = self._view[head : head + shape.cells.table_bytes]
        """The directory's cells."""
        self.directory = Directory(self.table, shape.cells)
        self._chunks: set[int] | None = set()  # mapped in; None: nothing is left to ask for
        self._descriptor = descriptor
        # not of this object: views may outlive it, and who may still write must hold its locks
        self._closed = weakref.finalize(mapping, os.close, descriptor)
        self._closed.atexit = False  # other threads go on until the process ends
        leave_to_parent(mapping, self._closed)

    @property
    def live(self) -> bool:
        """Whether the daemon that made or took over this arena still stands behind it."""
        # layout and sizes were looked at when it was mapped, and never change
        state: int = _STATE.unpack_from(self._view, _STATE_OFFSET)[0]
        epoch: int = _NUMBER.unpack_from(self._view, _EPOCH_OFFSET)[0]
        return state == LIVE and epoch == self.epoch

    @property
    def number(self) -> int:
        """A number above every generation that was given out here."""
        number: int = _NUMBER.unpack_from(self._view, _NUMBER_OFFSET)[0]
        return number

    @number.setter
    def number(self, number: int) -> None:
        _NUMBER.pack_into(self._view, _NUMBER_OFFSET, number)

    @property
    def data(self) -> memoryview:
        """All pages, writable, page 0 first. Parts that nobody touched yet may not be mapped in."""
        return self._data[: self.pages * self.page_bytes]

    def take_over(self, epoch: int) -> None:
        """A new daemon stands behind this arena: mappings of the epoch before are over."""
        _NUMBER.pack_into(self._view, _EPOCH_OFFSET, epoch)
        _STATE.pack_into(self._view, _STATE_OFFSET, LIVE)
        self.epoch = epoch

    def retire(self) -> None:
        """Tell everyone who maps this file that it is over."""
        _STATE.pack_into(self._view, _STATE_OFFSET, RETIRED)

    def leave(self) -> None:
        """Tell everyone that nobody stands behind this file until a daemon takes it over."""
        _STATE.pack_into(self._view, _STATE_OFFSET, LEFT)

    def hold(self, instance: bytes) -> None:
        """Say that a process writes here under this name, until the arena is closed. OSError."""
        self._set_lock(fcntl.F_RDLCK, _lock_of(instance))

    def held_by(self, instance: bytes) -> bool:
        """Whether a process that holds the arena under this name is there. OSError."""
        asked = _lock(fcntl.F_WRLCK, _lock_of(instance), 1)
        found = fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, asked)
        kind: int = _FLOCK.unpack(found)[0]
        return kind != fcntl.F_UNLCK

    @property
    def revoked(self) -> int:
        """How often the daemon has taken generations of stocks back."""
        number: int = _NUMBER.unpack_from(self._view, _REVOKED_OFFSET)[0]
        return number

    def claim(self, first: int, count: int) -> bool:
        """Hold `count` generations of a stock from `first` on, to write to their pages.

        They may be written to, until `release`, if this is True and what was `revoked` when they
        were granted still is the number.
        """
        try:
            self._set_lock(fcntl.F_WRLCK, _STOCKS_FROM + first, count)
        except OSError:
            return False
        return True

    def release(self) -> None:
        """Hold no generation any more."""
        with contextlib.suppress(OSError):
            self._set_lock(fcntl.F_UNLCK, _STOCKS_FROM, 0)

    def take(self, generation: int) -> bool:
        """Whether nobody holds this generation; then nobody writes to its pages any more."""
        try:
            self._set_lock(fcntl.F_WRLCK, _STOCKS_FROM + generation)
        except OSError:
            return False
        # before the lock is given up: who gets it next must see that
        _NUMBER.pack_into(self._view, _REVOKED_OFFSET, self.revoked + 1)
        self._set_lock(fcntl.F_UNLCK, _STOCKS_FROM + generation)
        return True

    def _set_lock(self, kind: int, start: int, count: int = 1) -> None:
        """OSError if somebody else's is in the way. A `count` of 0 is all from `start` on."""
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _lock(kind, start, count))

    def parts(self, extents: Sequence[Extent], size: int) -> Iterator[memoryview]:
        """The writable bytes of a block of `size` bytes, one view per extent, in order.

        ValueError if the extents lie outside the arena or are too small.
        """
        left = size
        for first, count in extents:
            if first < 0 or first + count > self.pages:
                raise ValueError(f"pages {first}+{count} of an arena of {self.pages}")
            start = first * self.page_bytes
            take = min(left, count * self.page_bytes)
            if self._chunks is not None:
                self._map_in(self.shape.data_at + start, take)
            yield self._data[start : start + take]
            left -= take
        if left:
            raise ValueError(f"extents {left} bytes too small for a block of {size}")

    def prefault(self, stop: "Callable[[], bool]" = lambda: False) -> None:
        """Map all of it into this process now, 2 MiB at a time until `stop`.

        Without, the first use of each part does that, which costs as much as copying to it.
        """
        for at in range(0, len(self._view), _CHUNK_BYTES):
            if stop():
                return
            self._map_in(at, min(_CHUNK_BYTES, len(self._view) - at))
        self._chunks = None

    def _map_in(self, start: int, size: int) -> None:
        """Have the kernel map these bytes into this process, if it was not asked for them yet."""
        chunks = self._chunks  # once: a copy in another thread may find out meanwhile
        if chunks is None:
            return
        for chunk in range(start // _CHUNK_BYTES, -(-(start + size) // _CHUNK_BYTES)):
            if chunk in chunks:
                continue
            at = chunk * _CHUNK_BYTES
            try:
                self._mapping.madvise(_POPULATE_WRITE, at, min(_CHUNK_BYTES, len(self._view) - at))
            except OSError:  # an older kernel: each page's first touch does it
                self._chunks = None
                return
            chunks.add(chunk)

    def close(self) -> None:
        """Unmap, unless somebody still holds a view of it (then with the last view)."""
        try:
            self._data.release()
            self.table.release()
            self._view.release()
            self._mapping.close()
        except BufferError:
            return
        self._closed()


def _mapped(descriptor: int, size: int) -> mmap.mmap:
    """Map the file by opening it once more: a mapping keeps a copy of its descriptor, and the copy
    that a forked child inherits must not keep the locks that are held through ours. OSError.
    """
    own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(own, size, flags=mmap.MAP_SHARED)
    finally:
        os.close(own)


def _lock(kind: int, start: int, count: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, start, count, 0)


def _lock_of(instance: bytes) -> int:
    return _LOCKS_FROM + int.from_bytes(instance[:7], "big")


def create_arena(
    path: str,
    *,
    page_bytes: int,
    pages: int,
    epoch: int,
    cells: Cells = NO_CELLS,
    allocate: "Callable[[int, Shape, int], None] | None" = None,
) -> Arena:
    """A new arena file in place of whatever is there, mode 0600, every page backed by memory.

    A file that is there is marked retired and unlinked, never truncated: who maps it would be
    killed. `allocate` backs a descriptor's bytes, given the shape and their number. OSError when
    the file system has no room for all pages.
    """
    _retire_file(path)
    shape = Shape(page_bytes, pages, cells)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        step = os.fstatvfs(descriptor).f_bsize  # a huge page on hugetlbfs
        size = -(-shape.file_bytes // step) * step
        # memory is charged to who first touches it, and a store to a page that can't be had
        # kills the process: so all of it is allocated now, and by the daemon
        if allocate is None:
            os.posix_fallocate(descriptor, 0, size)
        else:
            allocate(descriptor, shape, size)
        mapping = _mapped(descriptor, size)
    except BaseException:
        os.close(descriptor)
        os.unlink(path)
        raise
    _HEADER.pack_into(mapping, 0, MAGIC, LAYOUT_VERSION, LIVE, *shape[:2], epoch, *cells, 0)
    return Arena(mapping, descriptor, shape, epoch)


def attach_arena(
    path: str, *, page_bytes: int, pages: int, epoch: int, instance: bytes = b""
) -> Arena:
    """Map the arena a daemon has announced; ArenaGone if what is there is not exactly that.

    With an `instance`, the arena is held under that name until it is closed.
    """
    arena = _map(path)
    announced = (page_bytes, pages, epoch)
    if not arena.live or (arena.page_bytes, arena.pages, arena.epoch) != announced:
        arena.close()
        raise ArenaGone(f"the arena {path} is not of the daemon's epoch {epoch}")
    try:
        if instance:
            arena.hold(instance)
    except OSError as exc:
        arena.close()
        raise ArenaGone(f"the arena {path} cannot be locked: {exc.strerror}") from exc
    return arena


def reopen_arena(path: str, shape: Shape) -> Arena:
    """Map the arena that a daemon before left, which `take_over` makes live.

    ArenaGone if there is none, if it is retired or has another layout.
    """
    arena = _map(path)
    header = _read_header(arena._view)
    if arena.shape != shape or header is None or header[0] not in (LIVE, LEFT):
        arena.close()
        raise ArenaGone(f"the arena {path} has another layout, or is retired")
    return arena


def _map(path: str) -> Arena:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as exc:
        raise ArenaGone(f"the arena {path} cannot be opened: {exc.strerror}") from exc
    try:
        size = os.fstat(descriptor).st_size
        if size < MIN_HEADER_BYTES:
            raise ArenaGone(f"the arena {path} has {size} bytes and no header")
        mapping = _mapped(descriptor, size)
        header = _read_header(memoryview(mapping))
        if header is None:
            raise ArenaGone(f"the file {path} is no arena of this layout")
        _, shape, epoch, _ = header
        if size < shape.file_bytes:
            raise ArenaGone(f"the arena {path} has {size} bytes, not its {shape.file_bytes}")
    except ArenaGone:
        os.close(descriptor)
        raise
    except OSError as exc:
        os.close(descriptor)
        raise ArenaGone(f"the arena {path} cannot be mapped: {exc.strerror}") from exc
    return Arena(mapping, descriptor, shape, epoch)


def epoch_of(path: str) -> int:
    """The epoch in an arena file's header; 0 if there is none."""
    try:
        with open(path, "rb") as file:
            header = file.read(_HEADER.size)
    except OSError:
        return 0
    if len(header) < _HEADER.size or header[:8] != MAGIC:
        return 0
    epoch: int = _NUMBER.unpack_from(header, _EPOCH_OFFSET)[0]
    return epoch


def _retire_file(path: str) -> None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        size = os.fstat(descriptor).st_size
        if size >= MIN_HEADER_BYTES:
            # through a mapping, because hugetlbfs knows no write()
            with mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED) as mapping:
                if mapping[: len(MAGIC)] == MAGIC:
                    _STATE.pack_into(mapping, _STATE_OFFSET, RETIRED)
    finally:
        os.close(descriptor)
    os.unlink(path)


def _read_header(view: memoryview) -> "tuple[int, Shape, int, int] | None":
    magic, version, state, *shape, epoch, slots, spares, number = _HEADER.unpack_from(view)
    if magic != MAGIC or version != LAYOUT_VERSION:
        return None
    page_bytes, pages = shape
    return state, Shape(page_bytes, pages, Cells(slots, spares)), epoch, number
