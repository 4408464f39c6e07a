"""The wanted counts of the last while: the planner's only memory, which a restart may lose.

Without it nothing shrinks until the whole window was seen again, which is the safe side.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kimi_operator.api.roles import RoleName

Sample = tuple[float, int]


@dataclass(frozen=True)
class Track:
    """One role's wanted counts: those that can still be the highest, or the lowest, of a window.

    Older samples that a newer one outdoes are dropped, so a track is never longer than the
    number of different counts.
    """

    highs: tuple[Sample, ...] = ()
    lows: tuple[Sample, ...] = ()

    def add(self, now_s: float, count: int, keep_s: float) -> "Track":
        """The track with one sample more, without those older than `keep_s`."""
        recent = now_s - keep_s
        highs = [s for s in self.highs if s[1] > count and s[0] >= recent]
        lows = [s for s in self.lows if s[1] < count and s[0] >= recent]
        return Track((*highs, (now_s, count)), (*lows, (now_s, count)))

    def highest(self, since_s: float) -> int:
        """The highest count since then; there is one, since the newest sample is kept."""
        return next(count for at_s, count in self.highs if at_s >= since_s)

    def lowest(self, since_s: float) -> int:
        """The lowest count since then."""
        return next(count for at_s, count in self.lows if at_s >= since_s)


@dataclass(frozen=True)
class History:
    """Tracks by role, without a gap since `since_s` (None: nothing was seen yet)."""

    since_s: float | None = None
    tracks: Mapping[RoleName, Track] = field(default_factory=dict)

    def add(self, now_s: float, wanted: Mapping[RoleName, int], keep_s: float) -> "History":
        """The history with what is wanted now; a role it did not have begins a new history."""
        if self.since_s is None or set(wanted) != set(self.tracks):
            return History(now_s, {r: Track().add(now_s, n, keep_s) for r, n in wanted.items()})
        tracks = {r: self.tracks[r].add(now_s, n, keep_s) for r, n in wanted.items()}
        return History(self.since_s, tracks)

    def covers(self, now_s: float, window_s: float) -> bool:
        """Whether all of the window was seen."""
        return self.since_s is not None and now_s - self.since_s >= window_s
