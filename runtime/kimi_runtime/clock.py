"""The one place that reads the clock. Deciding code takes `now_s` as an argument instead."""

import time


def now_s() -> float:
    """Monotonic seconds: comparable between processes of one host, not across hosts."""
    return time.monotonic()


def unix_s() -> float:
    """Wall-clock seconds since the epoch, for timestamps that people and other hosts read."""
    return time.time()
