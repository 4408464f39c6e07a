"""What moves bytes between two processes' memories.

A transport registers memory (a `Region` that others may name), opens a `Session` to a peer's
region, and moves *spans* in batches. Every call states a deadline; a batch is done when its call
returns, and undefined bytes at the target when it raises.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kimi_runtime.spec.request import RegionRef
from kimi_runtime.transfer.memory import Memory


class Span(NamedTuple):
    """`size` bytes at `remote` in the peer's region, at `local` in our memory."""

    remote: int
    local: int
    size: int


@dataclass(frozen=True, slots=True)
class LinkCounters:
    """What a session has moved so far."""

    read_bytes: int = 0
    written_bytes: int = 0
    batches: int = 0
    failed_batches: int = 0
    busy_s: float = 0.0


class Session(Protocol):
    """A pair of memories prepared once; batches may run concurrently."""

    @property
    def counters(self) -> LinkCounters:
        """Bytes and time so far."""

    async def read(self, spans: Sequence[Span], into: memoryview, *, deadline_s: float) -> None:
        """Copy every span from the peer's region into `into`, within `deadline_s` seconds.

        Raises RegionGone (released, or another epoch), PeerGone, TransferLate, and ValueError for
        a span outside either memory. Cancelling the call frees both sides; bytes already written
        to `into` are undefined.
        """

    async def write(self, spans: Sequence[Span], data: memoryview, *, deadline_s: float) -> None:
        """Copy every span from `data` into the peer's region; errors as `read`.

        A region registered read-only refuses with RegionGone.
        """

    async def aclose(self) -> None:
        """Give up the session; running batches end with TransferCancelled."""


class Transport(Protocol):
    """One way to move bytes."""

    @property
    def name(self) -> str:
        """The name used in `RegionRef.transport` and in metrics."""

    def register(self, memory: Memory, *, writable: bool = False) -> RegionRef:
        """Let peers read `memory` (and write, if `writable`) until `release`."""

    def release(self, region: RegionRef) -> None:
        """From now on every read of the region raises RegionGone. Releasing twice is allowed."""

    async def open(self, remote: RegionRef, *, deadline_s: float) -> Session:
        """Prepare reading from a peer's region; RegionGone or PeerGone if it is not there."""

    async def aclose(self) -> None:
        """Release every region and close every session."""
