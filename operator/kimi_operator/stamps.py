"""Times as Kubernetes writes them."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any


def rfc3339(unix: float) -> str:
    """Seconds since the epoch as Kubernetes writes them, e.g. `2030-01-31T08:00:00Z`."""
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def rfc3339_micro(unix: float) -> str:
    """The same with microseconds, as Leases have it."""
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def seconds(stamp: Any) -> float:
    """Seconds since the epoch of an RFC 3339 time; 0 where there is none."""
    return datetime.fromisoformat(str(stamp)).timestamp() if stamp else 0.0


def ready_since_s(pod: Mapping[str, Any]) -> float | None:
    """Unix time from when a Pod is ready. None: it is not; 0: nobody says since when."""
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition["type"] == "Ready" and condition["status"] == "True":
            return seconds(condition.get("lastTransitionTime"))
    return None
