"""Making room: what is alive in a segment is copied to the log's end, then the segment goes.

A compaction counts only once all its copies are on stable storage. Until then every block is read
from where it was, and if anything fails the copies are dead weight, or go with the segment that
was begun for them. A crash in the middle leaves both: the older copy wins (`Ledger.recover`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kimi_runtime.umbp.ssdlog import format as on_disk
from kimi_runtime.umbp.ssdlog.disk import Stop, aligned_buffer
from kimi_runtime.umbp.ssdlog.format import Grave
from kimi_runtime.umbp.ssdlog.health import Refusal
from kimi_runtime.umbp.ssdlog.segments import Entry, Segment
from kimi_runtime.umbp.ssdlog.tail import Tail
from kimi_runtime.umbp.ssdlog.volume import Corrupt, Volume

_TOMBSTONES_BYTES = 64 << 10
_MANY_PENDING = 1024
_BATCH = 16
"""Blocks copied before the next are placed; the copies under way take memory."""


class _NoRoom(Exception):
    """The copies do not fit: somebody still reads the space that was meant for them."""


@dataclass(slots=True)
class _Copies:
    """What one compaction has made so far."""

    rolled: Segment | None = None
    made: list[tuple[Entry, Entry]] = field(default_factory=list)
    bad: list[tuple[Entry, bool]] = field(default_factory=list)
    """Blocks that could not be copied, and whether they were read at all."""
    graves: list[tuple[Sequence[Grave], Segment]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Space:
    """Keeps room at the log's end. One caller at a time."""

    tail: Tail
    min_gain: int
    """Least bytes a compaction must free to be worth copying the rest of a segment."""
    compactions: int = 0
    moved_bytes: int = 0

    @property
    def _volume(self) -> Volume:
        return self.tail.volume

    def make(self, size: int, stop: Stop) -> Refusal | None:
        """See that the active segment has `size` bytes left; or why it can't. OSError, Stopped."""
        volume, ledger = self._volume, self._volume.ledger
        for _ in range(ledger.max_segments + 1):
            self.tail.drop_hopeless()
            with volume.lock:
                if ledger.room() >= size:
                    return None
                rolls = ledger.may_roll()
                victim = ledger.victim(max(size, self.min_gain))
                read = any(segment.retired for segment in ledger.segments.values())
            if rolls:
                self.tail.roll()
            elif victim is None:
                return Refusal.BUSY if read else Refusal.FULL
            elif not self.compact(victim, stop):
                return Refusal.BUSY
        return Refusal.BUSY

    def compact_ahead(self, stop: Stop) -> None:
        """Compact what is half dead before a write needs the room. OSError, Stopped."""
        ledger = self._volume.ledger
        for _ in range(ledger.max_segments):
            self.tail.drop_hopeless()
            with self._volume.lock:
                enough = ledger.may_roll() or ledger.room() > ledger.payload_bytes // 2
                victim = None if enough else ledger.victim(ledger.payload_bytes // 2)
            if victim is None or not self.compact(victim, stop):
                return

    def write_pending(
        self, stop: Stop, *, strict: bool, at_least: int = _MANY_PENDING
    ) -> Refusal | None:
        """Write the graves of what was forgotten, if `at_least` so many. OSError, Stopped.

        A refusal leaves them pending: there is no room until something is evicted or read.
        """
        volume = self._volume
        with volume.lock:
            pending = [Grave(*grave) for grave in volume.ledger.pending.items()]
        for batch in self._batches(pending) if len(pending) >= at_least else ():
            refusal = self.make(on_disk.tombstones_bytes(len(batch), volume.align), stop)
            if refusal is not None:
                return refusal
            segment = self.tail.write_graves(batch)
            if strict:
                self.tail.sync()
            with volume.lock:
                volume.ledger.graves_written(batch, segment)
        return None

    def compact(self, victim: Segment, stop: Stop) -> bool:
        """Copy what is needed of a segment, then delete it; False if there is no room to.

        OSError, Stopped: nothing has changed then.
        """
        copies = _Copies()
        try:
            self._copy_all(victim, copies, stop)
            self.tail.sync()
        except BaseException as exc:
            self._undo(copies)
            if isinstance(exc, _NoRoom):
                return False
            raise
        volume, ledger = self._volume, self._volume.ledger
        with volume.lock:
            for entry, corrupt in copies.bad:
                volume.drop(entry, corrupt=corrupt)
            for old, new in copies.made:
                ledger.move(old, new)
                self.moved_bytes += new.size
            for graves, segment in copies.graves:
                ledger.graves_written(graves, segment)
            gone = [victim.number] if ledger.retire(victim) else []
            self.compactions += 1
        volume.delete(gone)
        return True

    def _copy_all(self, victim: Segment, copies: _Copies, stop: Stop) -> None:
        volume, ledger = self._volume, self._volume.ledger
        with volume.lock:
            entries, graves = ledger.entries_in(victim), ledger.graves_in(victim)
        for start in range(0, len(entries), _BATCH):
            placed = [(old, self._place(old, copies)) for old in entries[start : start + _BATCH]]
            copies.made += placed  # before they are: what is placed may be on disk from here on
            outcomes = volume.threads.writes.each(lambda pair: self._copy(*pair, stop), placed)
            for pair, bad in zip(placed, outcomes, strict=True):
                if bad is not None:
                    copies.made.remove(pair)
                    copies.bad.append((pair[0], isinstance(bad, Corrupt)))
        for batch in self._batches(graves):
            self._see_room(on_disk.tombstones_bytes(len(batch), volume.align), copies)
            copies.graves.append((batch, self.tail.write_graves(batch)))

    def _place(self, old: Entry, copies: _Copies) -> Entry:
        self._see_room(old.size, copies)
        with self._volume.lock:
            segment, offset = self._volume.ledger.place(old.size)
        sizes = (old.size, old.head_bytes, old.body_bytes)
        return Entry(old.key, old.generation, segment.number, offset, *sizes)

    def _see_room(self, size: int, copies: _Copies) -> None:
        ledger = self._volume.ledger
        with self._volume.lock:
            if ledger.room() >= size:
                return
            if copies.rolled is not None or not ledger.may_roll(compacting=True):
                raise _NoRoom
        copies.rolled = self.tail.roll()

    def _copy(self, old: Entry, new: Entry, stop: Stop) -> OSError | Corrupt | None:
        """Copy a record as it is under a new head; what was wrong with its source."""
        volume = self._volume
        raw = aligned_buffer(old.size)[: old.size]
        body = raw[old.head_bytes : old.head_bytes + old.body_bytes]
        try:
            read = volume.files[old.segment].read(old.offset, [raw], stop)
            head = volume.head_of(old, raw[: old.head_bytes])
            if read < old.head_bytes + old.body_bytes or not on_disk.body_intact(head, body):
                raise Corrupt
        except (OSError, Corrupt) as exc:
            return exc
        head = head._replace(segment=new.segment, offset=new.offset)
        self.tail.write_record(head, body, stop)
        return None

    def _undo(self, copies: _Copies) -> None:
        volume, ledger = self._volume, self._volume.ledger
        gone = []
        with volume.lock:
            for _, new in copies.made:
                segment = ledger.segments[new.segment]
                if segment is not copies.rolled:
                    ledger.wasted(segment, new.key, torn=True)
            if copies.rolled is not None and ledger.active is copies.rolled:
                gone.append(copies.rolled.number)
                ledger.undo_roll()
        volume.delete(gone)

    def _batches(self, graves: Sequence[Grave]) -> list[Sequence[Grave]]:
        most = min(_TOMBSTONES_BYTES, self._volume.ledger.payload_bytes)
        count = on_disk.graves_within(most, self._volume.align)
        return [graves[start : start + count] for start in range(0, len(graves), count)]
