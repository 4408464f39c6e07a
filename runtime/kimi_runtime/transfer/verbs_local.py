"""Our own memory as the card reaches it for requests of ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kimi_runtime.transfer.memory import DeviceMemory
from kimi_runtime.transfer.verbs_device import Registration, VerbsDevice, address_of


@dataclass(slots=True, eq=False)
class _Kept:
    memory: memoryview | DeviceMemory
    registration: Registration
    owners: int = 1
    users: int = 0


class LocalMemory:
    """Memory that peers may name is pinned once for our own requests too; other for each batch.

    Pinning takes some 0.1 ms per MiB, so whoever reads often reads into registered memory. Nothing
    else is kept: memory that was freed and is somebody else's now must not stay pinned.
    """

    def __init__(self, device: VerbsDevice) -> None:
        self._device = device
        self._kept: dict[tuple[int, int, int], _Kept] = {}

    def keep(self, memory: memoryview | DeviceMemory) -> None:
        """Pin memory until `drop`; as often as it is kept."""
        kept = self._kept.get(_identity(memory))
        if kept is not None:
            kept.owners += 1
            return
        registration = self._device.register(memory, remote=False, writable=False)
        self._kept[_identity(memory)] = _Kept(memory, registration)

    def drop(self, memory: memoryview | DeviceMemory) -> None:
        """One owner less."""
        kept = self._kept[_identity(memory)]
        kept.owners -= 1
        self._close_unused(kept)

    @contextmanager
    def reached(
        self, memory: memoryview | DeviceMemory, low: int, high: int
    ) -> Iterator[tuple[int, int]]:
        """The device's address of byte 0 of `memory`, and the key for its bytes low..high.

        The body must not end before the device has.
        """
        kept = self._holding(memory, low, high)
        if kept is None:
            part = _slice(memory, low, high)
            registration = self._device.register(part, remote=False, writable=False)
            try:
                yield registration.base - low, registration.local_key
            finally:
                registration.close()
            return
        kept.users += 1
        base = memory.offset if isinstance(memory, DeviceMemory) else address_of(memory)
        try:
            yield base, kept.registration.local_key
        finally:
            kept.users -= 1
            self._close_unused(kept)

    def close(self) -> None:
        """Unpin everything."""
        for kept in self._kept.values():
            kept.registration.close()
        self._kept.clear()

    def _holding(self, memory: memoryview | DeviceMemory, low: int, high: int) -> _Kept | None:
        space, start, _ = _identity(memory)
        for (other, at, size), kept in self._kept.items():
            if other == space and at <= start + low and start + high <= at + size:
                return kept
        return None

    def _close_unused(self, kept: _Kept) -> None:
        if not kept.owners and not kept.users:
            identity = _identity(kept.memory)
            if self._kept.get(identity) is kept:
                del self._kept[identity]
                kept.registration.close()


def _identity(memory: memoryview | DeviceMemory) -> tuple[int, int, int]:
    """Address space (-1 for this process, else a dma-buf), address in it, bytes."""
    if isinstance(memory, DeviceMemory):
        return memory.dmabuf, memory.offset, memory.nbytes
    return -1, address_of(memory), memory.nbytes


def _slice(memory: memoryview | DeviceMemory, low: int, high: int) -> memoryview | DeviceMemory:
    if isinstance(memory, DeviceMemory):
        return DeviceMemory(memory.dmabuf, memory.offset + low, high - low)
    return memory[low:high]
