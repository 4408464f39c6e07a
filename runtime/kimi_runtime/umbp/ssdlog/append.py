"""Putting blocks into the log. One call at a time; its blocks are written in parallel."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kimi_connect.wire import GroupTag
from kimi_runtime.umbp.ssdlog import format as on_disk
from kimi_runtime.umbp.ssdlog.compaction import Space
from kimi_runtime.umbp.ssdlog.disk import Stop, Stopped
from kimi_runtime.umbp.ssdlog.format import Head, Kind
from kimi_runtime.umbp.ssdlog.health import Refusal
from kimi_runtime.umbp.ssdlog.segments import Entry, Segment
from kimi_runtime.umbp.ssdlog.volume import Corrupt, Volume

MAX_GROUPS = 1024


class NewBlock(NamedTuple):
    """A block to write. Without `tags` it is one layer group; with them its bytes must match."""

    key: bytes
    body: memoryview
    tags: tuple[GroupTag, ...] = ()

    @property
    def groups(self) -> tuple[int, ...]:
        """Sizes of the layer groups."""
        return tuple(group.size for group in self.tags) or (self.body.nbytes,)


class Written(NamedTuple):
    """What became of a batch: its first `kept` blocks are held, and why the next one is not.

    `already` of all blocks were held before, and `put` were written; with a refusal, blocks behind
    the first one refused may be among them.
    """

    kept: int
    put: int
    already: int
    refusal: Refusal | None


@dataclass(slots=True)
class _Job:
    """One block of a batch, and where it goes; nowhere if it is held."""

    block: NewBlock
    offset: int = 0
    size: int = 0
    entry: Entry | None = None
    failure: Exception | None = None


class _Placed(NamedTuple):
    """Jobs for the leading blocks that fit the active segment; what is wrong with the next one."""

    jobs: list[_Job]
    refusal: Refusal | None = None
    needed: int = 0
    """Room the first block needs, if the active segment lacks it."""


@dataclass(slots=True, eq=False)
class Appender:
    """Writes blocks at the log's end; never raises for the disk."""

    space: Space
    strict: bool

    @property
    def _volume(self) -> Volume:
        return self.space.tail.volume

    def put(self, blocks: Sequence[NewBlock], stop: Stop) -> Written:
        """Write the blocks that aren't held, until one can't be."""
        kept = put = already = 0
        refusal = self._volume.health.refusal
        if refusal is None:
            refusal = self._guarded(partial(self.space.write_pending, stop, strict=self.strict))
        if refusal in (Refusal.FULL, Refusal.BUSY):
            refusal = None  # graves stay pending; the blocks may be held already
        while kept < len(blocks) and refusal is None:
            refusal = Refusal.CANCELLED if stop() else self._volume.health.refusal
            if refusal is not None:
                break
            placed = self._place(blocks[kept:])
            if placed.needed:
                refusal = self._guarded(partial(self.space.make, placed.needed, stop))
                continue
            refusal = self._write(placed.jobs, stop) or placed.refusal
            good = [job for job in placed.jobs if job.failure is None]
            already += sum(job.entry is None for job in good)
            put += sum(job.entry is not None for job in good)
            bad = (n for n, job in enumerate(placed.jobs) if job.failure is not None)
            kept += next(bad, len(placed.jobs))
        return Written(kept, put, already, refusal)

    def _place(self, blocks: Sequence[NewBlock]) -> _Placed:
        volume, ledger, align = self._volume, self._volume.ledger, self._volume.align
        jobs, new, live = list[_Job](), dict[bytes, _Job](), 0
        refusal, needed = None, 0
        with volume.lock:
            for block in blocks:
                if block.key in ledger or block.key in new:
                    jobs.append(_Job(block))
                    continue
                groups = len(block.groups)
                size = on_disk.block_record_bytes(groups, block.body.nbytes, align)
                if size > ledger.payload_bytes or groups > MAX_GROUPS:
                    refusal = Refusal.TOO_LARGE
                elif not ledger.fits_live(live + size):
                    refusal = Refusal.FULL
                elif ledger.room() < size:
                    needed = 0 if jobs else size
                else:
                    _, offset = ledger.place(size)
                    new[block.key] = _Job(block, offset, size)
                    jobs.append(new[block.key])
                    live += size
                    continue
                break
            if new and ledger.active is not None:
                self._number(list(new.values()), ledger.active)
        return _Placed(jobs, refusal, needed)

    def _number(self, jobs: Sequence[_Job], segment: Segment) -> None:
        """Give out generations: the head of a batch is the newest, and so the last to go."""
        for job in reversed(jobs):
            body_bytes = job.block.body.nbytes
            job.entry = Entry(
                job.block.key,
                self._volume.ledger.next_generation(),
                segment.number,
                job.offset,
                job.size,
                job.size - on_disk.padded(body_bytes, self._volume.align),
                body_bytes,
            )

    def _write(self, jobs: Sequence[_Job], stop: Stop) -> Refusal | None:
        """Write what is placed and make it live; why the first that failed did."""
        volume, ledger = self._volume, self._volume.ledger
        new = [job for job in jobs if job.entry is not None]
        if not new:
            return None
        for job, failure in zip(
            new,
            volume.threads.writes.each(lambda job: self._write_one(job, stop), new),
            strict=True,
        ):
            job.failure = failure
        if self.strict:
            self._sync(new)
        failed = [job for job in new if job.failure is not None]
        with volume.lock:
            for job in sorted(new, key=lambda j: j.entry.generation if j.entry else 0):
                if job.failure is None and job.entry is not None:
                    ledger.commit(job.entry)
        return self._clean_up(new, failed) if failed else None

    def _write_one(self, job: _Job, stop: Stop) -> Exception | None:
        block, entry = job.block, job.entry
        assert entry is not None
        digests = on_disk.group_leaves(block.groups, block.body)
        tags = on_disk.tags_of(block.key, block.groups, digests)
        if block.tags and block.tags != tags:
            return Corrupt()
        head = Head(
            Kind.BLOCK,
            entry.segment,
            entry.offset,
            entry.generation,
            entry.key,
            entry.body_bytes,
            on_disk.body_sum_of_leaves(digests),
            tags,
        )
        try:
            self.space.tail.write_record(head, block.body, stop)
        except (OSError, Stopped) as exc:
            return exc
        return None

    def _sync(self, jobs: Sequence[_Job]) -> None:
        try:
            self.space.tail.sync()
        except OSError as exc:
            for job in jobs:
                job.failure = job.failure or exc

    def _clean_up(self, new: Sequence[_Job], failed: Sequence[_Job]) -> Refusal:
        """Cut failed writes off the segment's end; those before a good one stay, dead."""
        volume, ledger = self._volume, self._volume.ledger
        segment = ledger.active
        assert segment is not None
        good = [job.offset + job.size for job in new if job.failure is None]
        end = max(good, default=new[0].offset)
        file = volume.files[segment.number]
        try:
            file.truncate(end)
        except OSError:
            end = segment.end
        else:
            with suppress(OSError):  # without it, the next writes are slower
                file.reserve(volume.identity.segment_bytes)
        first = failed[0].failure
        with volume.lock:
            ledger.cut(segment, end)
            for job in failed:
                if job.offset < end:
                    ledger.wasted(segment, job.block.key, torn=True)
            if isinstance(first, OSError):
                return volume.health.write_failed(first)
        return Refusal.CORRUPT if isinstance(first, Corrupt) else Refusal.CANCELLED

    def _guarded(self, work: Callable[[], Refusal | None]) -> Refusal | None:
        try:
            return work()
        except Stopped:
            return Refusal.CANCELLED
        except OSError as exc:
            with self._volume.lock:
                return self._volume.health.write_failed(exc)
