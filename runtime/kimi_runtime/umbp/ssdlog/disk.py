"""Files of the log: positioned reads and writes in pieces, with or without O_DIRECT. Blocking.

A thread per request in flight, not io_uring: of the Python packages that offer it, the established
one reads only into memory of its own, which O_DIRECT can't use and which costs a copy
(`docs/decisions/0006-ssd-io.md`).
"""

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from kimi_connect.copying import copy_bytes
from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.ssd import DIRECT_ALIGN
from kimi_runtime.umbp.ssdlog.format import padded

PIECE_BYTES = 4 << 20
"""Bytes of one call to the kernel: how late a stop is noticed (some milliseconds)."""

LOG_FILE = "LOG"

_HEAD_BYTES = 64 << 10

_CAN_NOT_RESERVE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV}
"""Of file systems without it, or where the C library's stand-in for it does not suit O_DIRECT."""

Stop = Callable[[], bool]


class Stopped(Exception):
    """The caller asked to stop; what was read or written so far is undefined."""


def never() -> bool:
    """A stop that is never asked for."""
    return False


def aligned_buffer(size: int) -> memoryview:
    """Zeroed memory that O_DIRECT can use: it begins at a page and has whole pages."""
    return memoryview(mmap.mmap(-1, padded(size, DIRECT_ALIGN)))


def head_buffer(size: int) -> memoryview:
    """The calling thread's own aligned memory for one head, good until its next call.

    Mapping and unmapping memory for each would make all threads wait for each other.
    """
    if not hasattr(_of_thread, "head"):
        _of_thread.head = aligned_buffer(_HEAD_BYTES)
    own: memoryview = _of_thread.head
    return own[:size] if size <= own.nbytes else aligned_buffer(size)[:size]


class SegmentFile:
    """One open file. Any number of threads may read and write different parts of it at once."""

    def __init__(self, fd: int, *, direct: bool) -> None:
        self._fd, self._direct = fd, direct

    def read(self, offset: int, parts: Sequence[memoryview], stop: Stop = never) -> int:
        """Fill `parts`, one after another, from `offset`; bytes read, fewer at the file's end.

        OSError as the kernel says; Stopped.
        """
        if self._direct and not _direct_ready(parts):
            return self._read_bounced(offset, parts, stop)
        done = 0
        for piece in _pieces(parts):
            size = sum(view.nbytes for view in piece)
            if stop():
                raise Stopped
            got = self._read_piece(offset + done, piece, size)
            done += got
            if got < size:
                break
        return done

    def write(self, offset: int, parts: Sequence[memoryview], stop: Stop = never) -> None:
        """Write `parts`, one after another, at `offset`. OSError as the kernel says; Stopped."""
        if self._direct and not _direct_ready(parts):
            self._write_bounced(offset, parts, stop)
            return
        for piece in _pieces(parts):
            if stop():
                raise Stopped
            offset += self._write_piece(offset, piece)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._fd).st_size

    def sync(self) -> None:
        """Return once everything written is on stable storage."""
        os.fdatasync(self._fd)

    def truncate(self, size: int) -> None:
        """Cut the file to `size`."""
        os.ftruncate(self._fd, size)

    def reserve(self, size: int) -> None:
        """Have `size` bytes of disk taken and in the file, zeros where nothing was written.

        Writes behind a file's end wait for each other, and each has to find its own space.
        """
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError as exc:
            if exc.errno not in _CAN_NOT_RESERVE:
                raise

    def close(self) -> None:
        """Close it; nobody may be reading."""
        os.close(self._fd)

    def _read_piece(self, offset: int, piece: list[memoryview], size: int) -> int:
        done = 0
        while done < size:
            got = os.preadv(self._fd, _after(piece, done), offset + done)
            if not got:
                break
            done += got
        return done

    def _write_piece(self, offset: int, piece: list[memoryview]) -> int:
        size, done = sum(view.nbytes for view in piece), 0
        while done < size:
            done += os.pwritev(self._fd, _after(piece, done), offset + done)
        return size

    def _read_bounced(self, offset: int, parts: Sequence[memoryview], stop: Stop) -> int:
        bounce, done = self._bounce(), 0
        for piece in _pieces(parts):
            size = sum(view.nbytes for view in piece)
            if stop():
                raise Stopped
            skip = (offset + done) % DIRECT_ALIGN
            window = bounce[: padded(skip + size, DIRECT_ALIGN)]
            got = self._read_piece(offset + done - skip, [window], window.nbytes) - skip
            got = max(0, min(got, size))
            _scatter(bounce[skip : skip + got], piece)
            done += got
            if got < size:
                break
        return done

    def _write_bounced(self, offset: int, parts: Sequence[memoryview], stop: Stop) -> None:
        bounce = self._bounce()
        for piece in _pieces(parts):
            if stop():
                raise Stopped
            size = 0
            for view in piece:
                copy_bytes(bounce[size : size + view.nbytes], view)
                size += view.nbytes
            offset += self._write_piece(offset, [bounce[:size]])

    def _bounce(self) -> memoryview:
        if not hasattr(_of_thread, "bounce"):
            _of_thread.bounce = aligned_buffer(PIECE_BYTES + DIRECT_ALIGN)
        own: memoryview = _of_thread.bounce
        return own


_of_thread = threading.local()
"""Buffers of each thread: those that do I/O are few."""


class Disk:
    """The log's folder."""

    def __init__(self, folder: Path, *, direct: bool) -> None:
        self.folder, self.direct = folder, direct
        self._lock_fd: int | None = None

    def lock(self) -> None:
        """Take the folder (made if absent) for this process; ConfigError if another has it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.folder / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            os.close(fd)
            raise ConfigError(
                f"the SSD log {self.folder} is in use by another process; stop that one, "
                f"or give this one a folder of its own"
            ) from exc
        self._lock_fd = fd

    def unlock(self) -> None:
        """Leave the folder to others."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def read_log_file(self) -> bytes:
        """The file `LOG`; empty if there is none."""
        path = self.folder / LOG_FILE
        return path.read_bytes() if path.exists() else b""

    def write_log_file(self, content: bytes) -> None:
        """Replace the file `LOG` as a whole, durably."""
        path = self.folder / (LOG_FILE + ".new")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, content)
            os.fsync(fd)
        finally:
            os.close(fd)
        path.replace(self.folder / LOG_FILE)
        self.sync()

    def remove_log_file(self) -> None:
        """Delete the file `LOG`, durably."""
        (self.folder / LOG_FILE).unlink(missing_ok=True)
        self.sync()

    def numbers(self) -> list[int]:
        """Numbers of the segments there are, ascending."""
        stems = (path.stem for path in self.folder.glob("*.seg"))
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    def create(self, number: int) -> SegmentFile:
        """A new, empty segment."""
        return self._open(number, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def open(self, number: int) -> SegmentFile:
        """A segment that is there."""
        return self._open(number, os.O_RDWR)

    def remove(self, number: int) -> None:
        """Delete a segment."""
        with suppress(FileNotFoundError):
            os.unlink(self._path(number))

    def sync(self) -> None:
        """Return once files made and removed are so on stable storage."""
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def free_bytes(self) -> int:
        """What the file system has left for us."""
        stat = os.statvfs(self.folder)
        return stat.f_bavail * stat.f_frsize

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08}.seg"

    def _open(self, number: int, flags: int) -> SegmentFile:
        flags |= os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)
        return SegmentFile(os.open(self._path(number), flags, 0o600), direct=self.direct)


def _direct_ready(parts: Sequence[memoryview]) -> bool:
    """Whether the kernel can move these parts without a copy: whole pages at pages' starts."""
    return all(
        not view.readonly
        and view.nbytes % DIRECT_ALIGN == 0
        and ctypes.addressof(ctypes.c_char.from_buffer(view)) % DIRECT_ALIGN == 0
        for view in parts
        if view.nbytes
    )


def _pieces(parts: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The parts cut into lists of at most `PIECE_BYTES`."""
    piece: list[memoryview] = []
    room = PIECE_BYTES
    for view in parts:
        at = 0
        while at < view.nbytes:
            taken = view[at : at + room]
            piece.append(taken)
            at += taken.nbytes
            room -= taken.nbytes
            if not room:
                yield piece
                piece, room = [], PIECE_BYTES
    if piece:
        yield piece


def _after(piece: list[memoryview], done: int) -> list[memoryview]:
    """What is left of a piece of which `done` bytes have moved."""
    if not done:
        return piece
    left = []
    for view in piece:
        skipped = min(done, view.nbytes)
        done -= skipped
        if skipped < view.nbytes:
            left.append(view[skipped:])
    return left


def _scatter(source: memoryview, parts: Sequence[memoryview]) -> None:
    at = 0
    for view in parts:
        size = min(view.nbytes, source.nbytes - at)
        copy_bytes(view[:size], source[at : at + size])
        at += size
