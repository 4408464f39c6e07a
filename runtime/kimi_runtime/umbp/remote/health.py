"""When an owner is left alone after failures, and when it is tried again. Pure.

An owner that failed `FAILURES` times in a row is in quarantine for a while, which doubles with
every quarantine up to `MAX_PAUSE_S`. After it one fetch is let through as a probe: it decides
whether the owner is back at once or stays away for longer. Only what speaks against the owner or
the way to it is a failure; that a block is not there any more is none.
"""

from dataclasses import dataclass
from enum import Enum

FAILURES = 2
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0


class Standing(Enum):
    """What may be asked of an owner."""

    GOOD = "good"
    PROBED = "probed"
    """One fetch is under way that decides; no other may begin."""
    DUE = "due"
    """The quarantine is over: the next fetch is the probe."""
    QUARANTINED = "quarantined"


@dataclass(slots=True)
class OwnerHealth:
    """One owner's record, as one reader keeps it."""

    quarantines: int = 0
    """Times it was put into quarantine."""
    _failures: int = 0
    _pause_s: float = 0.0
    _until_s: float | None = None
    _probing: bool = False

    def standing(self, now_s: float) -> Standing:
        """What may be asked of it now."""
        if self._until_s is None:
            return Standing.GOOD
        if self._probing:
            return Standing.PROBED
        return Standing.DUE if now_s >= self._until_s else Standing.QUARANTINED

    def usable(self, now_s: float) -> bool:
        """Whether a fetch may begin now."""
        return self.standing(now_s) in (Standing.GOOD, Standing.DUE)

    def began(self, now_s: float) -> None:
        """A fetch begins; it ends with one of the calls below."""
        self._probing |= self.standing(now_s) is Standing.DUE

    def answered(self) -> None:
        """The owner did what it should, also where it had nothing."""
        self._failures, self._pause_s = 0, 0.0
        self._until_s, self._probing = None, False

    def failed(self, now_s: float) -> bool:
        """It did not answer, answered too late, or what came was damaged. True: it is left alone.

        Said once for each time it is.
        """
        self._failures += 1
        away = self._until_s is not None
        if away and not self._probing:
            return False  # a fetch that began before the quarantine
        if not away and self._failures < FAILURES:
            return False
        self._pause_s = min(max(FIRST_PAUSE_S, 2 * self._pause_s), MAX_PAUSE_S)
        self._until_s, self._probing = now_s + self._pause_s, False
        self.quarantines += 1
        return True

    def undecided(self) -> None:
        """A fetch ended for a reason of our own: it says nothing, and a probe is still due."""
        self._probing = False
