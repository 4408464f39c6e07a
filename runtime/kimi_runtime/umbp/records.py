"""What the pool keeps account of."""

from dataclasses import dataclass

from kimi_connect.wire import Extent, Gap, GroupTag


@dataclass(slots=True, eq=False)
class Block:
    """One visible block, or one that only its pins keep (`gone`)."""

    key: bytes
    generation: int
    size: int
    pages: int
    extents: tuple[Extent, ...]
    tags: tuple[GroupTag, ...]
    pins: int = 0
    gone: bool = False
    uses: int = 1
    """How often an engine had a use for it; computing and putting it was the first."""


@dataclass(slots=True, eq=False)
class Reservation:
    """Pages that `writer` may store to."""

    key: bytes
    generation: int
    size: int
    extents: tuple[Extent, ...]
    writer: bytes
    expires_s: float
    quarantined: bool = False


@dataclass(slots=True, eq=False)
class Pinned:
    """Blocks that stay where they are until `expires_s`, and why the run ended."""

    number: int
    reader: int
    blocks: tuple[Block, ...]
    gap: Gap
    expires_s: float


@dataclass(slots=True)
class PoolCounters:
    """Blocks (and bytes) since the start. put = live + evicted + corrupt + cleared."""

    reserved: int = 0
    refused: int = 0
    put: int = 0
    put_bytes: int = 0
    duplicate: int = 0
    aborted: int = 0
    expired: int = 0
    writer_gone: int = 0
    pinned: int = 0
    evicted: int = 0
    evicted_bytes: int = 0
    corrupt: int = 0
    cleared: int = 0
    dropped_bytes: int = 0
    lapsed: int = 0
    """Blocks of pins whose lease ended before their reader was done."""
