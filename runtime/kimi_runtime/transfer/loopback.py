"""Moving bytes inside one process: the stand-in for every other transport, and their model."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from kimi_connect.blocks import flat
from kimi_runtime.errors import RegionGone
from kimi_runtime.spec.request import RegionRef
from kimi_runtime.transfer.base import LinkCounters, Session, Span
from kimi_runtime.transfer.batches import Batches
from kimi_runtime.transfer.memory import Memory


@dataclass(frozen=True, slots=True, eq=False)
class _Registered:
    view: memoryview
    writable: bool
    ref: RegionRef


@dataclass(slots=True)
class Fabric:
    """The regions that transports on it can reach."""

    regions: dict[int, _Registered] = field(default_factory=dict)
    next_key: int = 1


PROCESS_FABRIC = Fabric()
"""What `open_transport` uses: all loopback transports of a process reach each other."""


class LoopbackTransport:
    """One peer of a fabric."""

    name = "loopback"

    def __init__(self, peer: str, fabric: Fabric = PROCESS_FABRIC) -> None:
        self._peer, self._fabric = peer, fabric
        self._epoch = secrets.randbits(52)
        self._own: set[int] = set()
        self._sessions: list[LoopbackSession] = []

    def register(self, memory: Memory, *, writable: bool = False) -> RegionRef:
        """Let transports on the fabric read `memory`."""
        key = self._fabric.next_key
        self._fabric.next_key += 1
        ref = RegionRef(
            transport=self.name,
            peer=self._peer,
            address="",
            key=key,
            size_bytes=memory.size_bytes,
            epoch=self._epoch,
        )
        self._fabric.regions[key] = _Registered(flat(memory.view), writable, ref)
        self._own.add(key)
        return ref

    def release(self, region: RegionRef) -> None:
        """From now on the region is gone."""
        if region.key in self._own and region.epoch == self._epoch:
            self._own.discard(region.key)
            del self._fabric.regions[region.key]

    async def open(self, remote: RegionRef, *, deadline_s: float) -> Session:
        """A session to a region of the fabric."""
        registered = self._fabric.regions.get(remote.key)
        if registered is None or registered.ref != remote:
            raise RegionGone(_gone(remote))
        session = LoopbackSession(self._fabric, registered)
        self._sessions = [s for s in self._sessions if not s.closed] + [session]
        return session

    async def aclose(self) -> None:
        """Release every region and close every session."""
        for key in self._own:
            del self._fabric.regions[key]
        self._own.clear()
        for session in self._sessions:
            await session.aclose()


class LoopbackSession:
    """Reads and writes one registered region."""

    def __init__(self, fabric: Fabric, registered: _Registered) -> None:
        self._fabric, self._registered = fabric, registered
        self._batches = Batches(registered.ref.peer)

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
        if not self._registered.writable and not self.closed:
            raise RegionGone(f"region {self._registered.ref.key} is registered for reading only")
        await self._copy(spans, data, writes=True, deadline_s=deadline_s)

    async def aclose(self) -> None:
        """End the running batches."""
        await self._batches.aclose()

    async def _copy(
        self, spans: Sequence[Span], local: memoryview, *, writes: bool, deadline_s: float
    ) -> None:
        await self._batches.copy(
            spans,
            remote=self._registered.view,
            local=flat(local),
            writes=writes,
            deadline_s=deadline_s,
            check=self._check,
        )

    def _check(self) -> None:
        ref = self._registered.ref
        if self._fabric.regions.get(ref.key) is not self._registered:
            raise RegionGone(_gone(ref))


def _gone(ref: RegionRef) -> str:
    return (
        f"region {ref.key} of {ref.peer} was released, or {ref.peer} restarted; "
        "look its blocks up again"
    )
