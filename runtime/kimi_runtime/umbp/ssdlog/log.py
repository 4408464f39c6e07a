"""A log of KV blocks on a disk: bounded, checksummed, and warm after a restart. Blocking.

Any thread may call anything. What reads or writes the disk says so; the rest takes microseconds
under a lock that nobody holds during I/O, and may be called on an event loop.
"""

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kimi_connect.wire import GroupTag
from kimi_runtime.spec.ssd import SsdSpec
from kimi_runtime.umbp.ssdlog.append import Appender, NewBlock, Written
from kimi_runtime.umbp.ssdlog.compaction import Space
from kimi_runtime.umbp.ssdlog.disk import Disk, Stop, Stopped, never
from kimi_runtime.umbp.ssdlog.health import Access, Refusal
from kimi_runtime.umbp.ssdlog.recovery import Recovered, open_volume
from kimi_runtime.umbp.ssdlog.segments import Entry
from kimi_runtime.umbp.ssdlog.tail import Tail
from kimi_runtime.umbp.ssdlog.volume import Corrupt, Volume


class Got(NamedTuple):
    """Tags of the leading blocks that were read and verified, and why there aren't more."""

    tags: list[tuple[GroupTag, ...]]
    failure: Exception | None = None
    """Corrupt, OSError or Stopped; None: the rest is not held, or has no target of its size."""


@dataclass(frozen=True, slots=True)
class LogStats:
    """A moment's figures; counters are of blocks since the start.

    offered = put + already + all of refused; recovered + put = blocks + evicted + corrupt +
    unreadable.
    """

    access: Access
    reason: str
    blocks: int
    live_bytes: int
    disk_bytes: int
    capacity_bytes: int
    segments: int
    pending_graves: int
    offered: int
    already: int
    refused: dict[Refusal, int]
    put: int
    put_bytes: int
    hits: int
    hit_bytes: int
    recovered: int
    evicted: int
    corrupt: int
    unreadable: int
    compactions: int
    moved_bytes: int
    written_bytes: int
    read_failures: int
    write_failures: int
    found: Recovered


class SsdLog:
    """An open log. `put`, `get`, `maintain`, `flush` and `close` wait for the disk."""

    def __init__(self, spec: SsdSpec, volume: Volume, found: Recovered) -> None:
        self.spec, self.found = spec, found
        self._volume = volume
        self._strict = spec.durability == "strict"
        payload = volume.ledger.payload_bytes
        least = max(volume.align, int((1 - spec.fill) / 2 * payload))
        self._space = Space(Tail(volume), least)
        self._appender = Appender(self._space, self._strict)
        self._writing = threading.Lock()
        self._read = threading.Condition(volume.lock)
        self._reading = 0
        self._refused: Counter[Refusal] = Counter()
        self._offered = self._already = self._hits = self._hit_bytes = 0

    @classmethod
    def open(cls, spec: SsdSpec, disk: Disk | None = None) -> "SsdLog":
        """Open or make the log in `spec.folder`; ConfigError, see `recovery.open_volume`."""
        disk = disk or Disk(spec.folder, direct=spec.direct)
        volume, found = open_volume(spec, disk, new_id=secrets.token_bytes(8))
        return cls(spec, volume, found)

    @property
    def access(self) -> Access:
        """What the log still does."""
        return self._volume.health.access

    def held(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run of `keys` that can be read; warms nothing."""
        return 0 if self.access is Access.NONE else self._volume.ledger.held(keys)

    def keys(self) -> list[bytes]:
        """Every key that can be read, coldest first."""
        with self._volume.lock:
            return [] if self.access is Access.NONE else self._volume.ledger.keys()

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make those of `keys` that are held the warmest, the first most of all."""
        with self._volume.lock:
            self._volume.ledger.touch(keys)

    def sizes(self, keys: Sequence[bytes]) -> list[int]:
        """Bytes of each block of the leading run."""
        with self._volume.lock:
            return [] if self.access is Access.NONE else self._volume.ledger.sizes(keys)

    def evict(self, blocks: int) -> list[bytes]:
        """Forget up to `blocks`, coldest first; their keys. On disk with the next `flush`."""
        with self._volume.lock:
            return self._volume.ledger.evict(blocks)

    def forget(self, keys: Sequence[bytes]) -> list[bytes]:
        """Forget these; which of them were held. On disk with the next `flush`."""
        with self._volume.lock:
            return self._volume.ledger.forget(keys)

    def refuse(self, blocks: int, why: Refusal, *, already: int = 0) -> None:
        """Count blocks that never came to `put`, and those of their batch that were held."""
        with self._volume.lock:
            self._offered += blocks + already
            self._already += already
            self._refused[why] += blocks

    def take_lost(self) -> list[bytes]:
        """Keys dropped as corrupt or unreadable since the last call."""
        with self._volume.lock:
            lost, self._volume.lost = self._volume.lost, []
        return lost

    def put(self, blocks: Sequence[NewBlock], stop: Stop = never) -> Written:
        """Write the leading blocks that fit without evicting; held ones aren't written again."""
        with self._writing:
            written = self._appender.put(blocks, stop)
        with self._volume.lock:
            self._offered += len(blocks)
            self._already += written.already
            if written.refusal is not None:
                left = len(blocks) - written.put - written.already
                self._refused[written.refusal] += left
        return written

    def get(self, keys: Sequence[bytes], targets: Sequence[memoryview], stop: Stop = never) -> Got:
        """Read the leading run of `keys` into targets of their sizes, verified.

        A block that isn't what was written, or can't be read, is dropped. What was read behind the
        run's end is undefined.
        """
        volume = self._volume
        with volume.lock:
            if self.access is Access.NONE:
                return Got([])
            entries = volume.ledger.run(keys[: len(targets)])
            self._reading += 1
        fitting = _fitting(entries, targets)
        try:
            outcomes = volume.threads.reads.each(
                lambda pair: self._read_one(*pair, stop),
                zip(fitting, targets, strict=False),
            )
        finally:
            self._release(entries)
        got = _leading(outcomes)
        with volume.lock:
            self._hits += len(got.tags)
            self._hit_bytes += sum(entry.body_bytes for entry in fitting[: len(got.tags)])
        return got

    def maintain(self, stop: Stop = never) -> None:
        """Put forgotten keys on disk, compact ahead of need, and see whether a full disk has room.

        To be called now and then, and after evicting.
        """
        volume = self._volume
        with self._writing:
            if volume.health.waits_for_space:
                room = volume.disk.free_bytes() >= volume.identity.segment_bytes
                with volume.lock:
                    if room:
                        volume.health.space_found()
            if volume.health.refusal is None:
                self._attempt(lambda: self._settle(stop))
                self._attempt(lambda: self._space.compact_ahead(stop))

    def flush(self, stop: Stop = never) -> bool:
        """Return once all that was put and forgotten is on stable storage; False if it isn't."""
        with self._writing:
            if self._volume.health.refusal is not None:
                return False
            return self._attempt(lambda: self._settle(stop)) and not self._volume.ledger.pending

    def close(self) -> None:
        """Flush, seal and let go of the folder. A second close does nothing."""
        volume = self._volume
        with self._writing:
            if volume.health.refusal is Refusal.CLOSED:
                return
            if volume.health.refusal is None:
                self._attempt(lambda: self._settle(never))
                self._attempt(self._space.tail.seal)
                self._attempt(self._space.tail.drop_hopeless)
            with self._read:
                volume.health.close()
                self._read.wait_for(lambda: not self._reading)
        volume.threads.close()
        for file in volume.files.values():
            file.close()
        volume.files.clear()
        volume.disk.unlock()

    def stats(self) -> LogStats:
        """All figures of one moment."""
        volume, ledger = self._volume, self._volume.ledger
        with volume.lock:
            return LogStats(
                access=self.access,
                reason=volume.health.reason,
                blocks=len(ledger),
                live_bytes=ledger.live_bytes,
                disk_bytes=sum(segment.end for segment in ledger.segments.values()),
                capacity_bytes=ledger.max_segments * ledger.segment_bytes,
                segments=len(ledger.segments),
                pending_graves=len(ledger.pending),
                offered=self._offered,
                already=self._already,
                refused=dict(self._refused),
                put=ledger.counters.put,
                put_bytes=ledger.counters.put_bytes,
                hits=self._hits,
                hit_bytes=self._hit_bytes,
                recovered=ledger.counters.recovered,
                evicted=ledger.counters.evicted,
                corrupt=ledger.counters.corrupt,
                unreadable=ledger.counters.unreadable,
                compactions=self._space.compactions,
                moved_bytes=self._space.moved_bytes,
                written_bytes=self._space.tail.written_bytes,
                read_failures=volume.health.read_failures,
                write_failures=volume.health.write_failures,
                found=self.found,
            )

    def check_integrity(self) -> None:
        """AssertionError unless every copy, grave, byte and counter is accounted for."""
        with self._volume.lock:
            self._volume.ledger.check_integrity()
            put = self._volume.ledger.counters.put
            refused = sum(self._refused.values())
            assert self._offered == put + self._already + refused

    def _settle(self, stop: Stop) -> None:
        """Write what is pending and sync. OSError, Stopped."""
        self._space.write_pending(stop, strict=self._strict, at_least=1)
        self._space.tail.sync()

    def _attempt(self, work: Callable[[], object]) -> bool:
        try:
            work()
        except Stopped:
            return False
        except OSError as exc:
            with self._volume.lock:
                self._volume.health.write_failed(exc)
            return False
        return True

    def _read_one(
        self, entry: Entry, target: memoryview, stop: Stop
    ) -> tuple[GroupTag, ...] | Exception:
        volume = self._volume
        try:
            tags = volume.read_block(entry, target, stop)
        except Stopped as exc:
            return exc
        except (Corrupt, OSError) as exc:
            with volume.lock:
                volume.drop(entry, corrupt=isinstance(exc, Corrupt))
                if isinstance(exc, OSError):
                    volume.health.read_failed(exc)
            return exc
        with volume.lock:
            volume.health.read_worked()
        return tags

    def _release(self, entries: Sequence[Entry]) -> None:
        with self._volume.lock:
            gone = self._volume.ledger.release(entries)
        self._volume.delete(gone)
        with self._read:
            self._reading -= 1
            self._read.notify_all()


def _leading(outcomes: Sequence[tuple[GroupTag, ...] | Exception]) -> Got:
    tags: list[tuple[GroupTag, ...]] = []
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            return Got(tags, outcome)
        tags.append(outcome)
    return Got(tags)


def _fitting(entries: Sequence[Entry], targets: Sequence[memoryview]) -> list[Entry]:
    """The leading entries whose targets have their sizes."""
    pairs = zip(entries, targets, strict=False)
    wrong = (n for n, (entry, target) in enumerate(pairs) if entry.body_bytes != target.nbytes)
    return list(entries[: next(wrong, len(entries))])
