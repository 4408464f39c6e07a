"""Finding the intact records of a segment, whatever damage lies between them. Blocking reads."""

from dataclasses import dataclass, field

from kimi_runtime.umbp.ssdlog import format as on_disk
from kimi_runtime.umbp.ssdlog.disk import SegmentFile
from kimi_runtime.umbp.ssdlog.format import Grave, Head, Identity, Kind

_PROBE_BYTES = 4096
_WINDOW_BYTES = 1 << 20


@dataclass(slots=True)
class Scan:
    """What a segment holds.

    A record that is `torn` has an intact head and a damaged body: it can't be used, but says which
    generations are taken.
    """

    number: int
    size: int
    sealed: bool = False
    intact: list[Head] = field(default_factory=list)
    torn: list[Head] = field(default_factory=list)
    graves: list[Grave] = field(default_factory=list)
    damaged_bytes: int = 0
    """Bytes that belong to no record with an intact head. Zeros at the end are none: a segment's
    space is reserved before it is written."""

    @property
    def generation(self) -> int:
        """The highest generation any head names; 0 for none."""
        return max((head.generation for head in (*self.intact, *self.torn)), default=0)


def scan_segment(file: SegmentFile, log: Identity, number: int, *, verify_all: bool) -> Scan:
    """Walk from head to head; after damage, search on at every multiple of `align`.

    Bodies are verified unless the segment was sealed (then they were on stable storage, and
    whoever reads them verifies them) and `verify_all` is not asked for. Bytes that can't be read
    are damage like any other.
    """
    walk = _Walk(file, log, number)
    scan = Scan(number, walk.size)
    scan.sealed = walk.is_sealed()
    verify = verify_all or not scan.sealed
    at = log.align
    while at < walk.size:
        head = walk.head_at(at)
        if head is None:
            found, written = walk.next_head(at)
            scan.damaged_bytes += written - at
            at = found
            continue
        if _take(scan, walk, head, verify):
            at += head.record_bytes(log.align)
        else:
            # not the stated length: what follows a torn record may begin inside it
            scan.torn.append(head)
            at += head.head_bytes(log.align)
    return scan


def _take(scan: Scan, walk: "_Walk", head: Head, verify: bool) -> bool:
    """Note a record; False if its body is damaged."""
    if head.kind is Kind.SEAL:
        return True
    if verify or head.kind is Kind.TOMBSTONES:
        body = walk.body_of(head)
        if body is None or not on_disk.body_intact(head, body):
            return False
        if head.kind is Kind.TOMBSTONES:
            scan.graves += on_disk.decode_graves(bytes(body))
    scan.intact.append(head)
    return True


class _Walk:
    """Reads of one segment that never raise for bytes that can't be read."""

    def __init__(self, file: SegmentFile, log: Identity, number: int) -> None:
        self._file, self._log, self._number = file, log, number
        self.size = file.size
        self._probe = bytearray(_PROBE_BYTES)

    def is_sealed(self) -> bool:
        at = self.size - self._log.align
        if at < self._log.align or at % self._log.align:
            return False
        head = self.head_at(at)
        return head is not None and head.kind is Kind.SEAL

    def head_at(self, offset: int) -> Head | None:
        raw = self._read(offset, memoryview(self._probe))
        if on_disk.head_size(raw) > raw.nbytes:
            raw = self._read(offset, memoryview(bytearray(on_disk.head_size(raw))))
        return on_disk.decode_head(raw, self._log.log_id, self._number, offset)

    def body_of(self, head: Head) -> memoryview | None:
        at = head.offset + head.head_bytes(self._log.align)
        if head.body_bytes > self.size - at:
            return None  # before memory is taken for it
        return self._read(at, memoryview(bytearray(head.body_bytes)))

    def next_head(self, at: int) -> tuple[int, int]:
        """Where the next intact head begins at or after `at`; the file's size if nowhere.

        And where that ends which was written before it, as far as zeros at the end can tell.
        """
        written = at
        while at < self.size:
            window = self._read(at, memoryview(bytearray(min(_WINDOW_BYTES, self.size - at))))
            if not window.nbytes:
                if self.head_at(at) is not None:
                    return at, at
                at = written = at + self._log.align  # unreadable in part: step by step over it
                continue
            data = bytes(window)
            found = self._in_window(data, at)
            if found is not None:
                return found, found
            if used := len(data.rstrip(b"\0")):
                written = min(at + on_disk.padded(used, self._log.align), self.size)
            at += on_disk.padded(window.nbytes, self._log.align)
        return self.size, written

    def _in_window(self, window: bytes, base: int) -> int | None:
        at = window.find(on_disk.RECORD_MAGIC)
        while at >= 0:
            offset = base + at
            if offset % self._log.align == 0 and self.head_at(offset) is not None:
                return offset
            at = window.find(on_disk.RECORD_MAGIC, at + 1)
        return None

    def _read(self, offset: int, into: memoryview) -> memoryview:
        try:
            return into[: self._file.read(offset, [into])]
        except OSError:
            return into[:0]
