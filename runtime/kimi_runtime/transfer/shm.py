"""Moving bytes between processes of one host: the reader maps the owner's file.

The owner writes what may be done into the file's trailer: one slot per registered region with its
key, epoch and mode. It holds a lock on the file for as long as it lives, which the system drops
with the process. A reader checks slot, file name and lock before *and after* it copies: a region
released, a file made anew or an owner that died in between means that the bytes are not used.
"""

import fcntl
import mmap
import os
import secrets
import struct
from collections.abc import Sequence
from pathlib import Path

from kimi_connect.blocks import flat
from kimi_runtime.errors import CapacityError, ConfigError, PeerGone, RegionGone
from kimi_runtime.spec.request import RegionRef
from kimi_runtime.transfer.background import cores_for_copies
from kimi_runtime.transfer.base import LinkCounters, Session, Span
from kimi_runtime.transfer.batches import Batches
from kimi_runtime.transfer.memory import TRAILER_BYTES, Memory, trailer_offset

_HEAD = struct.Struct("<8sIQ")  # magic, version, data bytes
_SLOT = struct.Struct("<IQQ")  # mode, key, epoch
_MAGIC, _VERSION = b"KIMISHM\0", 1
_SLOT_BYTES = 64
SLOTS = TRAILER_BYTES // _SLOT_BYTES - 1
_FREE, _READ, _WRITE = 0, 1, 2


class ShmTransport:
    """Registers memory from `shared_memory` and maps that of others."""

    name = "shm"

    def __init__(self, peer: str, *, streams: int | None = None) -> None:
        """`streams`: threads that copy one batch; None: half the cores, at most four."""
        self._peer = peer
        self._streams = streams or cores_for_copies()
        self._epoch = secrets.randbits(52)
        self._count = 0
        self._files: dict[Path, _OwnedFile] = {}
        self._sessions: list[ShmSession] = []

    def register(self, memory: Memory, *, writable: bool = False) -> RegionRef:
        """Let processes of this user on this host map the file of `memory`.

        ConfigError for memory without such a file; CapacityError beyond `SLOTS` regions of one.
        """
        if memory.path is None:
            raise ConfigError("shm registers memory made by shared_memory(), not private memory")
        owned = self._files.get(memory.path)
        if owned is None:
            owned = self._files[memory.path] = _OwnedFile(memory.path, memory.size_bytes)
        self._count += 1
        key = owned.take(self._count, self._epoch, writable=writable)
        return RegionRef(
            transport=self.name,
            peer=self._peer,
            address=str(memory.path),
            key=key,
            size_bytes=memory.size_bytes,
            epoch=self._epoch,
        )

    def release(self, region: RegionRef) -> None:
        """Clear the region's slot."""
        owned = self._files.get(Path(region.address))
        if owned is not None and region.epoch == self._epoch and not owned.give_back(region.key):
            del self._files[Path(region.address)]

    async def open(self, remote: RegionRef, *, deadline_s: float) -> Session:
        """Map a peer's file."""
        session = ShmSession(remote, streams=self._streams)
        self._sessions = [s for s in self._sessions if not s.closed] + [session]
        return session

    async def aclose(self) -> None:
        """Release every region and close every session."""
        for owned in self._files.values():
            owned.close()
        self._files.clear()
        for session in self._sessions:
            await session.aclose()


class _OwnedFile:
    """The trailer of one of our files, and the lock that says we live."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        offset = trailer_offset(size_bytes)
        try:
            if os.fstat(self._descriptor).st_size != offset + TRAILER_BYTES:
                raise ConfigError(f"{path} was not made by shared_memory() for {size_bytes} bytes")
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                raise ConfigError(f"{path} is registered by another transport") from exc
            self._trailer = mmap.mmap(self._descriptor, TRAILER_BYTES, offset=offset)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._trailer[:] = bytes(TRAILER_BYTES)
        _HEAD.pack_into(self._trailer, 0, _MAGIC, _VERSION, size_bytes)
        self._slots: dict[int, int] = {}  # slot -> key

    def take(self, count: int, epoch: int, *, writable: bool) -> int:
        """A key, which tells its slot."""
        slot = next((slot for slot in range(SLOTS) if slot not in self._slots), None)
        if slot is None:
            raise CapacityError(
                "another region of one shared file",
                need="a free slot",
                have=f"{SLOTS} regions registered",
                where="its trailer",
                fix="release regions that are no longer used",
            )
        key = count * (SLOTS + 1) + slot
        self._slots[slot] = key
        mode = _WRITE if writable else _READ
        _SLOT.pack_into(self._trailer, (slot + 1) * _SLOT_BYTES, mode, key, epoch)
        return key

    def give_back(self, key: int) -> bool:
        """Clear a key's slot; whether the file still has regions."""
        slot = key % (SLOTS + 1)
        if self._slots.get(slot) == key:
            del self._slots[slot]
            _SLOT.pack_into(self._trailer, (slot + 1) * _SLOT_BYTES, _FREE, 0, 0)
        if not self._slots:
            self.close()
        return bool(self._slots)

    def close(self) -> None:
        """Clear every slot and drop the lock."""
        self._trailer[:] = bytes(TRAILER_BYTES)
        self._trailer.close()
        os.close(self._descriptor)


class ShmSession:
    """One peer's file, mapped."""

    def __init__(self, remote: RegionRef, *, streams: int) -> None:
        self._remote = remote
        self._path = Path(remote.address)
        self._slot = (remote.key % (SLOTS + 1) + 1) * _SLOT_BYTES
        self._batches = Batches(remote.peer, streams=streams)
        self._map()

    @property
    def counters(self) -> LinkCounters:
        """Bytes and time so far."""
        return self._batches.counters

    @property
    def closed(self) -> bool:
        """Whether the session was given up."""
        return self._batches.closed

    async def read(self, spans: Sequence[Span], into: memoryview, *, deadline_s: float) -> None:
        """Copy spans of the region into `into`."""
        await self._copy(spans, into, writes=False, deadline_s=deadline_s)

    async def write(self, spans: Sequence[Span], data: memoryview, *, deadline_s: float) -> None:
        """Copy spans of `data` into the region."""
        if self._mode != _WRITE and not self.closed:
            raise RegionGone(f"{self._named()} is registered for reading only")
        await self._copy(spans, data, writes=True, deadline_s=deadline_s)

    async def aclose(self) -> None:
        """End the running batches and unmap."""
        first = not self._batches.closed
        await self._batches.aclose()
        if first:
            self._unmap()

    async def _copy(
        self, spans: Sequence[Span], local: memoryview, *, writes: bool, deadline_s: float
    ) -> None:
        await self._batches.copy(
            spans,
            remote=self._data,
            local=flat(local),
            writes=writes,
            deadline_s=deadline_s,
            check=self._check,
        )

    def _map(self) -> None:
        size, offset = self._remote.size_bytes, trailer_offset(self._remote.size_bytes)
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            raise RegionGone(f"{self._named()} can't be opened: {exc.strerror}") from exc
        try:
            if os.fstat(self._descriptor).st_size != offset + TRAILER_BYTES:
                raise RegionGone(f"{self._named()} has another size; its owner made it anew")
            trailer = os.pread(self._descriptor, TRAILER_BYTES, offset)
            head, (self._mode, *_) = (
                _HEAD.unpack_from(trailer),
                _SLOT.unpack_from(trailer, self._slot),
            )
            if head != (_MAGIC, _VERSION, size):
                raise RegionGone(f"{self._named()} was released, or its owner made it anew")
            self._mapping = self._mapped()
            self._view = memoryview(self._mapping)
            self._data = self._view[:size]
            self._inode = os.fstat(self._descriptor).st_ino
            try:
                self._check()
            except BaseException:
                self._release_views()
                raise
        except BaseException:
            os.close(self._descriptor)
            raise

    def _mapped(self) -> mmap.mmap:
        if self._mode != _WRITE:
            return mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED)
        finally:
            os.close(descriptor)

    def _check(self) -> None:
        trailer = self._view[trailer_offset(self._remote.size_bytes) :]
        slot = _SLOT.unpack_from(trailer, self._slot)
        if slot != (self._mode, self._remote.key, self._remote.epoch) or self._mode == _FREE:
            raise RegionGone(f"{self._named()} was released; look its blocks up again")
        try:
            inode = os.stat(self._path).st_ino
        except OSError as exc:
            raise RegionGone(f"{self._named()} was removed; look its blocks up again") from exc
        if inode != self._inode:
            raise RegionGone(f"{self._named()} was made anew; look its blocks up again")
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # its owner holds the lock: it lives
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        raise PeerGone(f"{self._remote.peer}, the owner of {self._path}, has ended")

    def _unmap(self) -> None:
        self._release_views()
        os.close(self._descriptor)

    def _release_views(self) -> None:
        try:
            self._data.release()
            self._view.release()
            self._mapping.close()
        except BufferError:
            return  # somebody still holds a view: unmapped with the last one

    def _named(self) -> str:
        return f"region {self._remote.key} of {self._remote.peer} ({self._path})"
