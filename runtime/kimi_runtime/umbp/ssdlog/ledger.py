"""What the log holds: live blocks, segments, graves and space. Pure: no bytes, I/O or clock.

Space is counted in whole segments, of which one is always left to compaction, so the disk can't
overflow and compaction can't be stuck. A dead copy of a block on disk (evicted, replaced, moved)
would come back with the next start; its key's *grave* keeps it dead, and must itself be kept until
the last dead copy has gone with its segment.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kimi_runtime.umbp.ssdlog.format import Grave, tombstones_bytes
from kimi_runtime.umbp.ssdlog.segments import Entry, LedgerCounters, Segment

Graves = Iterable[tuple[Segment, Grave]]
"""Each grave a scan found, and the segment it lies in."""


@dataclass(slots=True)
class Ledger:
    """The bookkeeping of at most `max_segments` segments of `segment_bytes`."""

    max_segments: int
    segment_bytes: int
    align: int
    live_limit_bytes: int
    counters: LedgerCounters = field(default_factory=LedgerCounters)
    generation: int = 0
    live_bytes: int = 0
    active: Segment | None = None
    segments: dict[int, Segment] = field(default_factory=dict)
    pending: dict[bytes, int] = field(default_factory=dict)
    """Graves not yet written: key -> generation."""
    _live: OrderedDict[bytes, Entry] = field(default_factory=OrderedDict)
    """Coldest first."""
    _graves: dict[bytes, tuple[int, Segment]] = field(default_factory=dict)
    _dead: dict[bytes, int] = field(default_factory=dict)
    """How many dead copies of a key the disk holds."""

    def __len__(self) -> int:
        """Live blocks."""
        return len(self._live)

    def __contains__(self, key: bytes) -> bool:
        """Whether a key is live."""
        return key in self._live

    @property
    def payload_bytes(self) -> int:
        """What records can take of a segment: its identity and seal take the rest."""
        return self.segment_bytes - 2 * self.align

    def held(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run of `keys` that is live."""
        return next((n for n, key in enumerate(keys) if key not in self._live), len(keys))

    def keys(self) -> list[bytes]:
        """Every live key, coldest first."""
        return list(self._live)

    def sizes(self, keys: Sequence[bytes]) -> list[int]:
        """Bytes of each block of the leading live run."""
        return [self._live[key].body_bytes for key in keys[: self.held(keys)]]

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make those of `keys` that are live the warmest, the first most of all."""
        for key in reversed(keys):
            if key in self._live:
                self._live.move_to_end(key)

    def run(self, keys: Sequence[bytes]) -> list[Entry]:
        """Entries of the leading live run, kept readable until `release`; the head gets warmest."""
        entries = [self._live[key] for key in keys[: self.held(keys)]]
        for entry in entries:
            self.segments[entry.segment].readers += 1
        for entry in reversed(entries):
            self._live.move_to_end(entry.key)
        return entries

    def release(self, entries: Iterable[Entry]) -> list[int]:
        """End a read; numbers of segments to delete, which take their space until `deleted`."""
        gone = []
        for entry in entries:
            segment = self.segments[entry.segment]
            segment.readers -= 1
            if segment.retired and not segment.readers:
                gone.append(segment.number)
        return gone

    def deleted(self, number: int) -> None:
        """A retired segment's file is gone, and its space free."""
        self.segments.pop(number, None)

    def next_generation(self) -> int:
        """A number higher than any on disk."""
        self.generation += 1
        return self.generation

    def fits_live(self, size: int) -> bool:
        """Whether a record of `size` may become live without evicting."""
        return self.live_bytes + size <= self.live_limit_bytes

    def room(self) -> int:
        """Bytes the active segment has left for records."""
        if self.active is None:
            return 0
        return self.align + self.payload_bytes - self.active.end

    def may_roll(self, *, compacting: bool = False) -> bool:
        """Whether another segment may be opened; the last one only for compaction."""
        return len(self.segments) + 1 <= self.max_segments - (not compacting)

    def roll(self, number: int) -> Segment:
        """Begin a segment; it becomes the active one."""
        self.active = self.segments[number] = Segment(number, self.align)
        return self.active

    def place(self, size: int) -> tuple[Segment, int]:
        """Take `size` bytes of the active segment, which must have that room; where they begin."""
        segment = self.active
        assert segment is not None
        assert size <= self.room()
        offset = segment.end
        segment.end += size
        return segment, offset

    def commit(self, entry: Entry) -> None:
        """A block has been written: it is live now."""
        self._add(entry)
        self.counters.put += 1
        self.counters.put_bytes += entry.body_bytes

    def wasted(self, segment: Segment, key: bytes, *, torn: bool) -> None:
        """A block's copy may be on disk, only a part of it if `torn`, but is not live."""
        segment.copies.append(key)
        segment.torn |= torn
        self._dead[key] = self._dead.get(key, 0) + 1

    def cut(self, segment: Segment, end: int) -> None:
        """The file now ends at `end`: what was placed behind is not on disk."""
        segment.end = end

    def undo_roll(self) -> None:
        """The active segment holds nothing that is needed and is deleted."""
        if self.active is not None:
            del self.segments[self.active.number]
            self.active = None

    def evict(self, blocks: int) -> list[bytes]:
        """Forget up to `blocks`, coldest first; their keys."""
        keys = list(islice(self._live, max(0, blocks)))
        return self.forget(keys)

    def forget(self, keys: Iterable[bytes]) -> list[bytes]:
        """Forget these; which of them were live."""
        gone = [entry.key for key in keys if (entry := self._live.get(key)) and self._bury(entry)]
        self.counters.evicted += len(gone)
        return gone

    def drop(self, entry: Entry, *, corrupt: bool) -> bool:
        """Forget a block that can't be read as written, if it is still the live copy."""
        if self._live.get(entry.key) is not entry:
            return False
        self._bury(entry)
        if corrupt:
            self.counters.corrupt += 1
        else:
            self.counters.unreadable += 1
        return True

    def graves_written(self, graves: Iterable[Grave], segment: Segment) -> None:
        """Tombstones were written to `segment`; graves that aren't needed any more are let go."""
        for key, generation in graves:
            if self.pending.get(key) == generation:
                del self.pending[key]
            if key not in self._dead:
                continue
            old = self._graves.get(key)
            if old is not None:
                if old[0] > generation:
                    continue
                old[1].graves.discard(key)
            self._graves[key] = (generation, segment)
            segment.graves.add(key)

    def gain(self, segment: Segment) -> int:
        """Bytes that compacting a segment would free."""
        graves = tombstones_bytes(len(segment.graves), self.align)
        return self.payload_bytes - segment.live_bytes - graves

    def victim(self, at_least: int) -> Segment | None:
        """The segment whose compaction frees most, the oldest (coldest) of equals; None if none."""
        candidates = [s for s in self.segments.values() if s is not self.active and not s.retired]
        best = max(candidates, key=lambda s: (self.gain(s), -s.number), default=None)
        return best if best is not None and self.gain(best) >= at_least else None

    def entries_in(self, segment: Segment) -> list[Entry]:
        """The live blocks of a segment, in the order they lie there."""
        entries = {self._live[key] for key in segment.copies if key in self._live}
        return sorted((e for e in entries if e.segment == segment.number), key=lambda e: e.offset)

    def graves_in(self, segment: Segment) -> list[Grave]:
        """The graves a segment holds that are still needed."""
        return [Grave(key, self._graves[key][0]) for key in sorted(segment.graves)]

    def move(self, old: Entry, new: Entry) -> None:
        """A copy was made: it is the live one if the block still is, as warm as it was."""
        segment = self.segments[new.segment]
        segment.copies.append(new.key)
        self._dead[old.key] = self._dead.get(old.key, 0) + 1
        if self._live.get(old.key) is old:
            self._live[old.key] = new
            self._account(old, -1)
            self._account(new, 1)

    def retire(self, segment: Segment) -> bool:
        """Nothing live is left in a segment: its copies and graves go; whether to delete it now.

        If not, the last reader's `release` says when. It takes its space until `deleted`.
        """
        assert not segment.live_blocks
        for key in segment.copies:
            self._dead[key] -= 1
            if not self._dead[key]:
                del self._dead[key]
                self.pending.pop(key, None)
                grave = self._graves.pop(key, None)
                if grave is not None:
                    grave[1].graves.discard(key)
        for key in list(segment.graves):  # not copied: to be written again
            generation, _ = self._graves.pop(key)
            self.pending[key] = max(generation, self.pending.get(key, 0))
        segment.graves.clear()
        segment.retired = True
        if self.active is segment:
            self.active = None
        return not segment.readers

    def discard(self, segment: Segment) -> list[bytes]:
        """Forget every live block of a segment, so that it can be retired; their keys."""
        return self.forget([entry.key for entry in self.entries_in(segment)])

    def hopeless(self) -> Iterator[Segment]:
        """Segments of which nothing is needed."""
        return (
            segment
            for segment in list(self.segments.values())
            if segment is not self.active
            and not (segment.retired or segment.live_blocks or segment.graves)
        )

    def recover(
        self, segments: Sequence[Segment], entries: Sequence[Entry], graves: Graves
    ) -> None:
        """Take over what a scan found: every intact copy, and the graves of every segment.

        The newest generation of a key wins, if no grave is as new. Of two copies of one generation
        the older segment's wins: compaction was under way, and its target can be thrown away.
        """
        self.segments = {segment.number: segment for segment in segments}
        best: dict[bytes, Entry] = {}
        for entry in entries:
            rank = (entry.generation, -entry.segment)
            known = best.get(entry.key)
            if known is None or rank > (known.generation, -known.segment):
                best[entry.key] = entry
        newest: dict[bytes, tuple[int, Segment]] = {}
        for segment, (key, generation) in graves:
            if generation > newest.get(key, (0, segment))[0]:
                newest[key] = (generation, segment)
        for key in [k for k, (generation, _) in newest.items() if k in best]:
            if best[key].generation <= newest[key][0]:
                del best[key]
        for segment in segments:
            for key in segment.copies:
                self._dead[key] = self._dead.get(key, 0) + 1
        for entry in sorted(best.values(), key=lambda e: e.generation):
            self._one_less_dead(entry.key)
            self._live[entry.key] = entry
            self._account(entry, 1)
        for key, grave in newest.items():
            if key in self._dead:
                self._graves[key] = grave
                grave[1].graves.add(key)
        self.counters.recovered = len(self._live)

    def check_integrity(self) -> None:
        """AssertionError unless every copy, grave and byte is accounted for exactly once."""
        c = self.counters
        assert c.recovered + c.put == len(self._live) + c.evicted + c.corrupt + c.unreadable
        assert self.live_bytes == sum(entry.size for entry in self._live.values())
        assert len(self.segments) <= self.max_segments
        copies: dict[bytes, int] = {}
        for number, segment in self.segments.items():
            assert number == segment.number
            assert segment.end <= self.segment_bytes
            if segment.retired:
                continue
            live = self.entries_in(segment)
            assert segment.live_blocks == len(live)
            assert segment.live_bytes == sum(entry.size for entry in live)
            for key in segment.copies:
                copies[key] = copies.get(key, 0) + 1
            assert all(self._graves[key][1] is segment for key in segment.graves)
        for key in self._live:
            copies[key] -= 1
        assert {key: count for key, count in copies.items() if count} == self._dead
        assert self._graves.keys() <= self._dead.keys()
        assert sum(len(s.graves) for s in self.segments.values()) == len(self._graves)

    def _add(self, entry: Entry) -> None:
        assert entry.key not in self._live
        self.segments[entry.segment].copies.append(entry.key)
        self._live[entry.key] = entry
        self._account(entry, 1)

    def _account(self, entry: Entry, sign: int) -> None:
        segment = self.segments[entry.segment]
        segment.live_bytes += sign * entry.size
        segment.live_blocks += sign
        self.live_bytes += sign * entry.size

    def _bury(self, entry: Entry) -> bool:
        del self._live[entry.key]
        self._account(entry, -1)
        self._dead[entry.key] = self._dead.get(entry.key, 0) + 1
        self.pending[entry.key] = self.next_generation()
        return True

    def _one_less_dead(self, key: bytes) -> None:
        self._dead[key] -= 1
        if not self._dead[key]:
            del self._dead[key]
