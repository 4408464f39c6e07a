"""What outlives the daemon of the pool's account: told to whoever keeps it. Pure.

The pool tells its journal before anything depends on it: a reservation before its writer hears of
it, a block before its reservation ends, and that a block or reservation is gone before its pages
are given to anybody else. A crash between any two of these calls therefore loses at most what was
not yet visible.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kimi_connect.wire import Extent, GroupTag, Priority
from kimi_runtime.umbp.records import Block, Reservation


class Journal(Protocol):
    """Where the account is kept. `unlisted` counts blocks there was no space for."""

    unlisted: int

    def reserved(self, reservation: Reservation) -> bool:
        """Pages are about to be written to. False: there is no space to note it."""

    def ended(self, generation: int) -> None:
        """Nobody writes to the pages of this reservation any more."""

    def published(self, block: Block) -> None:
        """A block is visible; one there is no space for is not kept."""

    def removed(self, block: Block) -> None:
        """A block is gone."""


class NoJournal:
    """Nothing is kept."""

    unlisted = 0

    def reserved(self, reservation: Reservation) -> bool:
        """Yes."""
        return True

    def ended(self, generation: int) -> None:
        """Nothing to do."""

    def published(self, block: Block) -> None:
        """Nothing to do."""

    def removed(self, block: Block) -> None:
        """Nothing to do."""


class KeptBlock(NamedTuple):
    """A block as a journal has it."""

    key: bytes
    generation: int
    size: int
    extents: tuple[Extent, ...]
    tags: tuple[GroupTag, ...]
    tenant: str
    priority: Priority


class KeptReservation(NamedTuple):
    """A reservation whose writer may still store to its pages."""

    generation: int
    writer: bytes
    extents: tuple[Extent, ...]
    tenant: str


@dataclass(frozen=True, slots=True)
class Kept:
    """Everything a journal has. `number` is above every generation ever given out."""

    number: int = 0
    blocks: tuple[KeptBlock, ...] = ()
    reservations: tuple[KeptReservation, ...] = ()
