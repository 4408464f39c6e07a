"""Moving bytes by RDMA: one-sided reads and writes on several reliable queue pairs per session.

The owner's processor takes part only when a session opens and when a queue pair is reconnected.
Registered memory is pinned; a released region's key is void at once, so a peer's card is refused by
ours whatever it still asks. A batch that is cancelled or late first waits for what is under way,
then puts its queue pairs in error, which flushes it; only then does the call return. Queue pairs in
error are reset and reconnected by whoever needs them next.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from kimi_connect.blocks import flat
from kimi_runtime.spec.request import RegionRef
from kimi_runtime.transfer.base import Session
from kimi_runtime.transfer.exports import Export, Exports
from kimi_runtime.transfer.memory import DeviceMemory, Memory
from kimi_runtime.transfer.network import NetworkSettings, address_of, listen
from kimi_runtime.transfer.serving import Server
from kimi_runtime.transfer.verbs_completions import CompletionThread
from kimi_runtime.transfer.verbs_device import Registration, VerbsDevice
from kimi_runtime.transfer.verbs_local import LocalMemory
from kimi_runtime.transfer.verbs_owner import Owner
from kimi_runtime.transfer.verbs_session import VerbsSession

_CONTROL_THREADS = 16


class VerbsTransport:
    """Registers memory with an RDMA device and reaches that of peers."""

    name = "verbs"

    def __init__(self, peer: str, settings: NetworkSettings) -> None:
        """ConfigError without a device that has an active port and a usable address."""
        self._peer, self._settings = peer, settings
        self._device = VerbsDevice(settings.rdma)
        self._exports = Exports(self.name, peer)
        self._local = LocalMemory(self._device)
        self._registered: dict[int, tuple[Registration, memoryview | DeviceMemory]] = {}
        self._completions = CompletionThread(f"{peer}-verbs-completions")
        self._completions.start()
        self._threads = ThreadPoolExecutor(_CONTROL_THREADS, f"{peer}-verbs-control")
        self._server: Server | None = None
        self._address = ""
        self._sessions: list[VerbsSession] = []
        self._closed = False

    @property
    def device(self) -> str:
        """The device and the address on it that are used."""
        return f"{self._device.name} {self._device.gid}"

    def register(self, memory: Memory | DeviceMemory, *, writable: bool = False) -> RegionRef:
        """Pin `memory` and let holders of a call key reach it.

        ConfigError if nothing can be listened on, CapacityError if it can't be pinned,
        TransferError if the device refuses it (dma-buf needs a driver that has it).
        """
        if self._server is None:
            listener = listen(self._settings)
            self._address = address_of(listener, self._settings)
            owner = Owner(self._device, self._find, self._settings.call_keys)
            self._server = Server(
                listener, owner.serve, threads=1, name=f"{self._peer}-verbs-owner"
            )
        bytes_of = memory if isinstance(memory, DeviceMemory) else flat(memory.view)
        registration = self._device.register(bytes_of, remote=True, writable=writable)
        try:
            self._local.keep(bytes_of)
        except BaseException:
            registration.close()
            raise
        ref = self._exports.register(
            memoryview(b""),
            size_bytes=memory.size_bytes,
            writable=writable,
            address=self._address,
        )
        self._registered[ref.key] = (registration, bytes_of)
        return ref

    def release(self, region: RegionRef) -> None:
        """From now on the card refuses every request for the region."""
        if self._exports.release(region) is not None:
            self._unpin(region.key)

    async def open(self, remote: RegionRef, *, deadline_s: float) -> Session:
        """A session with connected queue pairs; PeerGone also where the deadline passes."""
        session = VerbsSession(
            remote,
            self._settings,
            device=self._device,
            local=self._local,
            completions=self._completions,
            threads=self._threads,
        )
        try:
            await session.connect(deadline_s)
        except BaseException:
            await session.aclose()
            raise
        self._sessions = [s for s in self._sessions if not s.closed] + [session]
        return session

    async def aclose(self) -> None:
        """Release every region, close every session, end every thread, give the device back."""
        if self._closed:
            return
        self._closed = True
        for export in self._exports.clear():
            self._unpin(export.ref.key)
        for session in self._sessions:
            await session.aclose()
        if self._server is not None:
            await asyncio.to_thread(self._server.close)
        await asyncio.to_thread(self._completions.end)
        self._threads.shutdown(wait=False)
        self._local.close()
        self._device.close()

    def _find(self, key: int, epoch: int, size_bytes: int) -> tuple[Export, Registration] | None:
        export = self._exports.find(key, epoch, size_bytes)
        registered = self._registered.get(key)
        return None if export is None or registered is None else (export, registered[0])

    def _unpin(self, key: int) -> None:
        registration, bytes_of = self._registered.pop(key)
        registration.close()
        self._local.drop(bytes_of)
