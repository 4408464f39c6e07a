"""When a process that died is started again, and when no more. Pure: the time is an argument."""

from dataclasses import dataclass

FIRST_DELAY_S = 0.5
LAST_DELAY_S = 15.0
RAPID_S = 20.0
"""A process that lived longer than this, once ready, starts its count anew."""
MOST_RAPID = 5


@dataclass
class Restarts:
    """Deaths of one process: each doubles the delay, too many in a row end it."""

    most_rapid: int = MOST_RAPID
    total: int = 0
    rapid: int = 0

    def after(self, lived_s: float, *, was_ready: bool) -> float | None:
        """Seconds to wait before the next start, None to give up."""
        if was_ready and lived_s > RAPID_S:
            self.rapid = 0
        self.rapid += 1
        if self.rapid > self.most_rapid:
            return None
        self.total += 1
        return float(min(LAST_DELAY_S, FIRST_DELAY_S * 2 ** (self.rapid - 1)))
