"""The log's end: the active segment, which records are appended to. One caller at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

from kimi_connect.copying import copy_bytes
from kimi_runtime.umbp.ssdlog import format as on_disk
from kimi_runtime.umbp.ssdlog.disk import Stop, head_buffer, never
from kimi_runtime.umbp.ssdlog.format import Grave, Head, Identity
from kimi_runtime.umbp.ssdlog.segments import Segment
from kimi_runtime.umbp.ssdlog.volume import Volume


@dataclass(slots=True, eq=False)
class Tail:
    """Appends to a volume. Everything may raise OSError."""

    volume: Volume
    written_bytes: int = 0

    def roll(self) -> Segment:
        """Seal the active segment and begin another."""
        volume = self.volume
        self.seal()
        number = volume.last_number = volume.last_number + 1
        file = volume.disk.create(number)
        try:
            identity = volume.identity
            file.reserve(identity.segment_bytes)
            own = Identity(identity.log_id, identity.align, identity.segment_bytes, number)
            file.write(0, [_in_pages(on_disk.encode_identity(own))])
            volume.disk.sync()
        except OSError:
            file.close()
            volume.disk.remove(number)
            raise
        with volume.lock:
            volume.files[number] = file
            return volume.ledger.roll(number)

    def seal(self) -> None:
        """End the active segment: its records get onto stable storage, then its seal."""
        volume, ledger = self.volume, self.volume.ledger
        segment = ledger.active
        if segment is None:
            return
        with volume.lock:
            ledger.active = None  # whatever fails below: a start verifies what has no seal
        file = volume.files[segment.number]
        file.sync()
        file.truncate(segment.end)  # gives back what was reserved; the seal is the file's last
        if not segment.torn and segment.end > volume.align:
            self.write_record(on_disk.seal(segment.number, segment.end, ledger.generation))
            with volume.lock:
                segment.end += volume.align

    def sync(self) -> None:
        """Return once the active segment's records are on stable storage."""
        segment = self.volume.ledger.active
        if segment is not None:
            self.volume.files[segment.number].sync()

    def write_graves(self, graves: Sequence[Grave]) -> Segment:
        """Append one tombstone record; the active segment has the room."""
        volume = self.volume
        body = on_disk.encode_graves(graves)
        with volume.lock:
            segment, offset = volume.ledger.place(
                on_disk.tombstones_bytes(len(graves), volume.align)
            )
            generation = volume.ledger.next_generation()
        try:
            head = on_disk.tombstones(segment.number, offset, generation, body)
            self.write_record(head, memoryview(body))
        except OSError:
            segment.torn = True
            raise
        return segment

    def write_record(self, head: Head, body: memoryview | None = None, stop: Stop = never) -> None:
        """Write a record where its head says. OSError, Stopped."""
        align = self.volume.align
        parts = [_in_pages(on_disk.encode_head(self.volume.identity.log_id, align, head))]
        if body is not None and body.nbytes:
            parts.append(body)
            if body.nbytes % align:
                parts.append(memoryview(bytes(align - body.nbytes % align)))
        self.volume.files[head.segment].write(head.offset, parts, stop)
        with self.volume.lock:
            self.written_bytes += head.record_bytes(align)

    def drop_hopeless(self) -> None:
        """Delete segments of which nothing is needed. Not while copies are being made."""
        with self.volume.lock:
            ledger = self.volume.ledger
            gone = [s.number for s in ledger.hopeless() if ledger.retire(s)]
        self.volume.delete(gone)


def _in_pages(data: bytes) -> memoryview:
    """The same bytes where O_DIRECT can use them, until the thread's next head."""
    buffer = head_buffer(len(data))
    copy_bytes(buffer, memoryview(data))
    return buffer
