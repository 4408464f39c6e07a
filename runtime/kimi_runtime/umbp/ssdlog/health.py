"""Whether the disk can be used, and why not."""

import errno
from dataclasses import dataclass
from enum import StrEnum

MAX_READ_FAILURES = 3
"""Failed reads in a row after which the disk counts as gone: one bad block is not that."""

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE}
"""What passes when somebody frees something."""


class Access(StrEnum):
    """What the log still does."""

    FULL = "full"
    READ_ONLY = "read_only"
    NONE = "none"


class Refusal(StrEnum):
    """Why a block was not written."""

    FULL = "full"
    """No room without evicting."""
    BUSY = "busy"
    """Enough writes are under way, or what compaction freed is still being read."""
    TOO_LARGE = "too_large"
    NO_SPACE = "no_space"
    """The file system (or the process's file descriptors) is full."""
    IO_ERROR = "io_error"
    CORRUPT = "corrupt"
    """The bytes don't match the tags they came with."""
    CANCELLED = "cancelled"
    CLOSED = "closed"


@dataclass(slots=True)
class Health:
    """Changes under the log's lock."""

    access: Access = Access.FULL
    reason: str = ""
    write_failures: int = 0
    read_failures: int = 0
    _why: Refusal | None = None
    _failed_in_a_row: int = 0

    @property
    def refusal(self) -> Refusal | None:
        """Why nothing can be written; None if it can."""
        return self._why

    @property
    def waits_for_space(self) -> bool:
        """Whether writing may begin again when there is space."""
        return self.access is Access.READ_ONLY and self._why is Refusal.NO_SPACE

    def write_failed(self, error: OSError) -> Refusal:
        """No more writes: until there is space again, or at all."""
        self.write_failures += 1
        why = Refusal.NO_SPACE if error.errno in _NO_SPACE else Refusal.IO_ERROR
        if self._why is None or self.waits_for_space:
            self._why = why
            self.access = Access.READ_ONLY
            self.reason = f"a write failed: {error.strerror or error}"
        return why

    def read_failed(self, error: OSError) -> None:
        """A read failed; several in a row end all access."""
        self.read_failures += 1
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= MAX_READ_FAILURES:
            self.access, self._why = Access.NONE, Refusal.IO_ERROR
            self.reason = (
                f"{self._failed_in_a_row} reads in a row failed: {error.strerror or error}"
            )

    def read_worked(self) -> None:
        """The disk answers."""
        self._failed_in_a_row = 0

    def space_found(self) -> None:
        """There is space again."""
        if self.waits_for_space:
            self.access, self.reason, self._why = Access.FULL, "", None

    def close(self) -> None:
        """Nothing can be done any more."""
        self.access, self.reason, self._why = Access.NONE, "closed", Refusal.CLOSED
