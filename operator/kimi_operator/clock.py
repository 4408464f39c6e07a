"""The one place where the operator reads the clock; whatever decides takes the time it was read."""

import time
from datetime import UTC, datetime


def now_s() -> float:
    """Monotonic seconds, for waits and rates."""
    return time.monotonic()


def unix_s() -> float:
    """Wall-clock seconds since the epoch, comparable with what the API server stamps."""
    return time.time()


def rfc3339(unix: float) -> str:
    """Seconds since the epoch as Kubernetes writes them, e.g. `2030-01-31T08:00:00Z`."""
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def rfc3339_micro(unix: float) -> str:
    """The same with microseconds, as Leases have it."""
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
