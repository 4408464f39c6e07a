"""The one place where the operator reads the clock; whatever decides takes the time it was read."""

import time


def now_s() -> float:
    """Monotonic seconds, for waits and rates."""
    return time.monotonic()


def since_boot_s() -> float:
    """Monotonic seconds that go on while the machine sleeps, for what others count on."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def unix_s() -> float:
    """Wall-clock seconds since the epoch, comparable with what the API server stamps."""
    return time.time()
