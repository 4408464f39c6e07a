"""What the ledger keeps account of."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Entry:
    """Where the live copy of a block lies. Replaced, never changed."""

    key: bytes
    generation: int
    segment: int
    offset: int
    size: int
    """Bytes on disk, head and padding included."""
    head_bytes: int
    body_bytes: int


@dataclass(slots=True, eq=False)
class Segment:
    """One file. `end` is where the next record goes."""

    number: int
    end: int
    live_bytes: int = 0
    live_blocks: int = 0
    copies: list[bytes] = field(default_factory=list)
    """Keys of all blocks written here, dead ones too."""
    graves: set[bytes] = field(default_factory=set)
    """Keys whose grave is here and still needed."""
    readers: int = 0
    retired: bool = False
    """Nothing of it is needed; it goes with its last reader."""
    torn: bool = False
    """A write failed inside: a start must verify the bodies."""


@dataclass(slots=True)
class LedgerCounters:
    """Blocks. recovered + put = live + evicted + corrupt + unreadable."""

    recovered: int = 0
    put: int = 0
    put_bytes: int = 0
    evicted: int = 0
    corrupt: int = 0
    unreadable: int = 0
