"""The regions of this process that peers may name, and how one is taken away while in use."""

import secrets
import threading
from types import TracebackType

from kimi_runtime.spec.request import RegionRef


class Export:
    """A registered region. Its bytes are touched only within `touched`, which never waits long."""

    __slots__ = ("_idle", "_users", "_view", "ref", "writable")

    def __init__(self, view: memoryview, writable: bool, ref: RegionRef) -> None:
        self.writable, self.ref = writable, ref
        self._view: memoryview | None = view
        self._users = 0
        self._idle = threading.Condition()

    @property
    def view(self) -> memoryview | None:
        """Its bytes, to make views of; None once it is gone."""
        return self._view

    def touched(self) -> "_Touch":
        """Around one copy that does not block: whether the region is still there."""
        return _Touch(self)

    def enter(self) -> bool:
        """Whether it is still there, and stays until `leave`. For `touched` alone."""
        with self._idle:
            here = self._view is not None
            self._users += here
        return here

    def leave(self) -> None:
        """See `enter`."""
        with self._idle:
            self._users -= 1
            if not self._users:
                self._idle.notify_all()

    def end(self) -> None:
        """It is gone. Returns when nobody touches its bytes any more: after one copy at most."""
        with self._idle:
            self._view = None
            while self._users:
                self._idle.wait()


class _Touch:
    __slots__ = ("_export", "_here")

    def __init__(self, export: Export) -> None:
        self._export, self._here = export, False

    def __enter__(self) -> bool:
        self._here = self._export.enter()
        return self._here

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._here:
            self._export.leave()


class Exports:
    """What one transport has registered. Looked up from any thread."""

    def __init__(self, transport: str, peer: str) -> None:
        self._transport, self._peer = transport, peer
        self._epoch = secrets.randbits(52)
        self._by_key: dict[int, Export] = {}
        self._count = 0

    def register(
        self, view: memoryview, *, size_bytes: int, writable: bool, address: str
    ) -> RegionRef:
        """A new region of `size_bytes`. `view` is empty where others than we touch the bytes."""
        self._count += 1
        ref = RegionRef(
            transport=self._transport,
            peer=self._peer,
            address=address,
            key=self._count,
            size_bytes=size_bytes,
            epoch=self._epoch,
        )
        self._by_key[ref.key] = Export(view, writable, ref)
        return ref

    def find(self, key: int, epoch: int, size_bytes: int) -> Export | None:
        """The region with this identity, if it is still there."""
        export = self._by_key.get(key)
        if export is None or (epoch, size_bytes) != (self._epoch, export.ref.size_bytes):
            return None
        return export

    def release(self, ref: RegionRef) -> Export | None:
        """Take a region away; None if it was gone already. Nobody touches its bytes from now on."""
        export = self.find(ref.key, ref.epoch, ref.size_bytes)
        if export is None:
            return None
        del self._by_key[ref.key]
        export.end()
        return export

    def clear(self) -> list[Export]:
        """Release all; those that were there."""
        released = [self.release(export.ref) for export in list(self._by_key.values())]
        return [export for export in released if export is not None]
