"""The arena: one file of a node that holds the pool's pages, mapped by the daemon and by engines.

Layout: a header of `max(4096, page_bytes)` bytes, then the pages. The header says which layout,
which page size and which *epoch*; a daemon that starts makes a new file under the same name with a
new epoch and marks the old file retired, so that a mapping of the old one is never trusted again
and never written over. Header fields are little-endian.
"""

import mmap
import os
import struct
from collections.abc import Iterator, Sequence

from kimi_connect.wire import Extent

MAGIC = b"KIMIUMBP"
LAYOUT_VERSION = 1
LIVE, RETIRED = 1, 2
MIN_HEADER_BYTES = 4096

_HEADER = struct.Struct("<8sIIIQQ")  # magic, version, state, page bytes, pages, epoch
_STATE = struct.Struct("<I")
_STATE_OFFSET = 12


class ArenaGone(Exception):
    """The file is not the arena that was asked for: missing, retired, another layout or epoch."""


def header_bytes(page_bytes: int) -> int:
    """Where page 0 starts; a multiple of the page size, so that pages stay aligned."""
    return max(MIN_HEADER_BYTES, page_bytes)


class Arena:
    """A mapped arena. Views of it stay valid as long as they are kept, whatever the daemon does."""

    def __init__(self, mapping: mmap.mmap, *, page_bytes: int, pages: int, epoch: int) -> None:
        self.page_bytes, self.pages, self.epoch = page_bytes, pages, epoch
        self._view = memoryview(mapping)
        self._mapping = mapping
        self._data = self._view[header_bytes(page_bytes) :]
        if hasattr(mmap, "MADV_DONTFORK"):
            # a forked child could store to pages long after its parent gave them back
            mapping.madvise(mmap.MADV_DONTFORK)

    @property
    def live(self) -> bool:
        """Whether the daemon that made this arena still stands behind it."""
        return _read_header(self._view) == (LIVE, self.page_bytes, self.pages, self.epoch)

    def retire(self) -> None:
        """Tell everyone who maps this file that it is over."""
        _STATE.pack_into(self._view, _STATE_OFFSET, RETIRED)

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
            yield self._data[start : start + take]
            left -= take
        if left:
            raise ValueError(f"extents {left} bytes too small for a block of {size}")

    def close(self) -> None:
        """Unmap, unless somebody still holds a view of it (then with the last view)."""
        try:
            self._data.release()
            self._view.release()
            self._mapping.close()
        except BufferError:
            return


def create_arena(path: str, *, page_bytes: int, pages: int, epoch: int) -> Arena:
    """A new arena file in place of whatever is there, mode 0600, every page backed by memory.

    A file that is there is marked retired and unlinked, never truncated: who maps it would be
    killed. OSError when the file system has no room for all pages.
    """
    _retire_file(path)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        size = header_bytes(page_bytes) + page_bytes * pages
        step = os.fstatvfs(descriptor).f_bsize  # a huge page on hugetlbfs
        size = -(-size // step) * step
        try:
            # memory is charged to who first touches it, and a store to a page that can't be had
            # kills the process: so all of it is allocated now, and by the daemon
            os.posix_fallocate(descriptor, 0, size)
            mapping = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED)
        except OSError:
            os.unlink(path)
            raise
    finally:
        os.close(descriptor)
    header = (MAGIC, LAYOUT_VERSION, LIVE, page_bytes, pages, epoch)
    _HEADER.pack_into(mapping, 0, *header)
    return Arena(mapping, page_bytes=page_bytes, pages=pages, epoch=epoch)


def attach_arena(path: str, *, page_bytes: int, pages: int, epoch: int) -> Arena:
    """Map the arena a daemon has announced; ArenaGone if what is there is not exactly that."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as exc:
        raise ArenaGone(f"the arena {path} cannot be opened: {exc.strerror}") from exc
    try:
        need, size = header_bytes(page_bytes) + page_bytes * pages, os.fstat(descriptor).st_size
        if size < need:
            raise ArenaGone(f"the arena {path} has {size} bytes, not the {need} of the daemon's")
        mapping = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED)
    except OSError as exc:
        raise ArenaGone(f"the arena {path} cannot be mapped: {exc.strerror}") from exc
    finally:
        os.close(descriptor)
    arena = Arena(mapping, page_bytes=page_bytes, pages=pages, epoch=epoch)
    if not arena.live:
        arena.close()
        raise ArenaGone(f"the arena {path} is not of the daemon's epoch {epoch}")
    return arena


def epoch_of(path: str) -> int:
    """The epoch in an arena file's header; 0 if there is none."""
    try:
        with open(path, "rb") as file:
            header = file.read(_HEADER.size)
    except OSError:
        return 0
    if len(header) < _HEADER.size or header[:8] != MAGIC:
        return 0
    epoch: int = _HEADER.unpack(header)[5]
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


def _read_header(view: memoryview) -> "tuple[int, int, int, int] | None":
    magic, version, state, page_bytes, pages, epoch = _HEADER.unpack_from(view)
    if magic != MAGIC or version != LAYOUT_VERSION:
        return None
    return state, page_bytes, pages, epoch
