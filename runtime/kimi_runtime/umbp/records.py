"""What the pool keeps account of."""

from dataclasses import dataclass, field

from kimi_connect.wire import Extent, Gap, GroupTag, Priority
from kimi_runtime.umbp.tenants import Account, Terms


def _nobody() -> Account:
    return Account("", Terms())


@dataclass(slots=True, eq=False)
class Block:
    """One visible block, or one that only its pins keep (`gone`)."""

    key: bytes
    generation: int
    size: int
    pages: int
    extents: tuple[Extent, ...]
    tags: tuple[GroupTag, ...]
    account: Account = field(default_factory=_nobody)
    priority: Priority = Priority.NORMAL
    used_s: float = 0.0
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
    account: Account
    priority: Priority
    quarantined: bool = False
    stock: bool = False
    """Of a client's stock: it has no key yet, and its writer claims it before it stores to it."""

    @property
    def pages(self) -> int:
        """Pages it takes."""
        if len(self.extents) == 1:
            return self.extents[0].pages  # as is usual; asked for every block of a put
        return sum(extent.pages for extent in self.extents)


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
    """Blocks (and bytes) since the start.

    put + adopted = live + evicted + corrupt + cleared.
    """

    reserved: int = 0
    adopted: int = 0
    """Blocks taken over from the daemon before, and reservations likewise."""
    adopted_bytes: int = 0
    adopted_reservations: int = 0
    refused: int = 0
    over_quota: int = 0
    """Of those refused, for the tenant's quota alone."""
    put: int = 0
    put_bytes: int = 0
    duplicate: int = 0
    aborted: int = 0
    expired: int = 0
    writer_gone: int = 0
    revoked: int = 0
    """Reservations of stocks, taken back from who did not write to them."""
    pinned: int = 0
    evicted: int = 0
    evicted_bytes: int = 0
    corrupt: int = 0
    cleared: int = 0
    dropped_bytes: int = 0
    lapsed: int = 0
    """Blocks of pins whose lease ended before their reader was done."""
