"""What reading, writing and compacting share: ledger, lock, open files and the threads for I/O."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TypeVar

from kimi_connect.wire import GroupTag
from kimi_runtime.umbp.ssdlog import format as on_disk
from kimi_runtime.umbp.ssdlog.disk import Disk, SegmentFile, Stop, head_buffer
from kimi_runtime.umbp.ssdlog.format import Head, Identity
from kimi_runtime.umbp.ssdlog.health import Health
from kimi_runtime.umbp.ssdlog.ledger import Ledger
from kimi_runtime.umbp.ssdlog.segments import Entry

Item = TypeVar("Item")
Result = TypeVar("Result")


class Corrupt(Exception):
    """A record is not what was written."""


class IoWorkers:
    """Threads that share out the items of one call after another."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)

    def each(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """`work` of every item, several at a time; all have ended when this returns or raises.

        A thread takes the next item itself: handing over each one costs more than a small write.
        """
        items = list(items)
        if len(items) < 2:
            return [work(item) for item in items]
        results: dict[int, Result] = {}
        left = iter(enumerate(items))

        def take() -> None:
            for number, item in left:  # one step of this iterator is atomic
                results[number] = work(item)

        futures = [self._pool.submit(take) for _ in range(min(self._count, len(items)))]
        wait(futures)  # memory that a forgotten thread writes to is in use
        for future in futures:
            future.result()
        return [results[number] for number in range(len(items))]

    def close(self) -> None:
        """Return once all have ended."""
        self._pool.shutdown()


class Threads:
    """Where I/O runs. Reads have their own, so that none waits behind a batch of writes."""

    def __init__(self, each: int) -> None:
        self.reads = IoWorkers(each, "ssdlog-read")
        self.writes = IoWorkers(each, "ssdlog-write")

    def close(self) -> None:
        """Return once all have ended."""
        self.reads.close()
        self.writes.close()


@dataclass(slots=True, eq=False)
class Volume:
    """An open log. `lock` guards ledger, files, health and `lost`; it is never held during I/O."""

    disk: Disk
    identity: Identity
    ledger: Ledger
    threads: Threads
    last_number: int
    files: dict[int, SegmentFile] = field(default_factory=dict)
    health: Health = field(default_factory=Health)
    lock: threading.Lock = field(default_factory=threading.Lock)
    lost: list[bytes] = field(default_factory=list)
    """Keys of blocks that were dropped because they could not be read as written."""

    @property
    def align(self) -> int:
        """Where records begin."""
        return self.identity.align

    def read_block(self, entry: Entry, body: memoryview, stop: Stop) -> tuple[GroupTag, ...]:
        """Fill `body` with a block, verified; its tags. OSError, Corrupt, Stopped."""
        raw = head_buffer(entry.head_bytes)
        read = self.files[entry.segment].read(entry.offset, [raw, body], stop)
        head = self.head_of(entry, raw)
        if read < entry.head_bytes + entry.body_bytes or not on_disk.block_intact(head, body):
            raise Corrupt
        return head.groups

    def head_of(self, entry: Entry, raw: memoryview) -> Head:
        """The head that was read for an entry; Corrupt if it is another's."""
        head = on_disk.decode_head(raw, self.identity.log_id, entry.segment, entry.offset)
        found = head and (head.key, head.generation, head.body_bytes)
        if head is None or found != (entry.key, entry.generation, entry.body_bytes):
            raise Corrupt
        return head

    def drop(self, entry: Entry, *, corrupt: bool) -> None:
        """Forget a block that can't be read as written; the lock is held."""
        if self.ledger.drop(entry, corrupt=corrupt):
            self.lost.append(entry.key)

    def delete(self, numbers: Iterable[int]) -> None:
        """Delete the files of segments that the ledger has let go."""
        for number in numbers:
            with self.lock:
                file = self.files.pop(number)
            file.close()
            self.disk.remove(number)
            with self.lock:
                self.ledger.deleted(number)
