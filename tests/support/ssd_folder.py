"""Small SSD logs for tests: a spec, where records lie, and disks that fail on demand."""

import errno
import os
from contextlib import suppress

from kimi_runtime.spec.ssd import SsdSpec
from kimi_runtime.umbp.ssdlog import format as on_disk
from kimi_runtime.umbp.ssdlog.append import NewBlock
from kimi_runtime.umbp.ssdlog.disk import Disk, SegmentFile

ALIGN = 128


def small_spec(folder, **changes):
    """A log of a few kilobytes."""
    fields = {"capacity": 8 * 4096, "segment": 4096, "align": ALIGN, "io_threads": 2}
    return SsdSpec(folder=folder, **(fields | changes))


def key(n):
    """A key."""
    return n.to_bytes(16, "big")


def body(n, size):
    """The bytes key `n` stands for."""
    return bytes((n * 31 + at * 7 + (at >> 8)) % 256 for at in range(size))


def block(n, size=200):
    """A block of key `n`."""
    return NewBlock(key(n), memoryview(body(n, size)))


def entry_of(log, its_key):
    """Where a block lies on disk."""
    return log._volume.ledger._live[its_key]


def flip(path, offset):
    """Damage one byte of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0xFF]))


def damage(log, its_key):
    """Damage a block's body on disk."""
    entry = entry_of(log, its_key)
    path = log.spec.folder / f"{entry.segment:08}.seg"
    flip(path, entry.offset + entry.head_bytes + min(7, entry.body_bytes - 1))


def bytes_on_disk(folder):
    """What the segments take."""
    total = 0
    for path in folder.glob("*.seg"):
        with suppress(FileNotFoundError):  # deleted meanwhile
            total += path.stat().st_size
    return total


def heads_in(raw, number, log_id, align=ALIGN):
    """Every intact head of a segment's bytes, found by trying each offset."""
    found = []
    for at in range(align, len(raw), align):
        head = on_disk.decode_head(raw[at:], log_id, number, at)
        if head is not None:
            found.append(head)
    return found


class FailingDisk(Disk):
    """A disk whose calls fail with the error number in `failing`: read, write, sync, create."""

    def __init__(self, folder, *, direct=False):
        super().__init__(folder, direct=direct)
        self.failing = {}
        self.reading = None
        """Called before every read, e.g. to hold it."""

    def check(self, call):
        """Raise if this call is to fail now."""
        if call in self.failing:
            number = self.failing[call]
            raise OSError(number, os.strerror(number))

    def free_bytes(self):
        """None while writes find no space."""
        return 0 if self.failing.get("write") == errno.ENOSPC else super().free_bytes()

    def create(self, number):
        """A segment whose calls can fail."""
        self.check("create")
        return super().create(number)

    def _open(self, number, flags):
        made = super()._open(number, flags)
        return _FailingFile(made._fd, self)


class _FailingFile(SegmentFile):
    def __init__(self, fd, disk):
        super().__init__(fd, direct=disk.direct)
        self._disk = disk

    def read(self, *args):
        if self._disk.reading is not None:
            self._disk.reading()
        self._disk.check("read")
        return super().read(*args)

    def write(self, *args):
        self._disk.check("write")
        super().write(*args)

    def sync(self):
        self._disk.check("sync")
        super().sync()

    def truncate(self, size):
        self._disk.check("truncate")
        super().truncate(size)
