"""The one place where the operator reads the clock; whatever decides takes the time it was read."""

import time


def now_s() -> float:
    """Monotonic seconds, for waits and rates."""
    return time.monotonic()


def unix_s() -> float:
    """Wall-clock seconds since the epoch, comparable with what the API server stamps."""
    return time.time()
