"""What to do where a child cannot be made as wanted by one apply: replace it, or leave it a while.

Two cases. A field that the server lets nobody change is met by a replacement, where nothing is lost
by one. A field that somebody else keeps writing would be taken back at every event for ever: after
a few times it is left alone for longer and longer, and a condition names who that is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kimi_operator.changes import FIELD_MANAGER, applied_fields
from kimi_operator.observed import Manifest, ObjectKey
from kimi_runtime.errors import ClusterRefused

REPLACED = frozenset(
    {
        "ConfigMap",
        "HorizontalPodAutoscaler",
        "Job",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "PodMonitor",
        "PrometheusRule",
        "RoleBinding",
        "ScaledObject",
    }
)
"""Kinds that hold no pods, no address and no history: deleted and made anew, nothing is lost."""
UNCHANGEABLE = (
    "field is immutable",
    "may not change once set",
    "cannot change roleRef",
    "updates to statefulset spec for fields other than",
    "Forbidden: may not be changed",
)
FREE_REPAIRS = 5
FIRST_PAUSE_S = 60.0
MOST_PAUSE_S = 600.0
FORGOTTEN_S = 1200.0


def cannot_change(exc: ClusterRefused) -> bool:
    """Whether a refusal is of a change to a field that nobody may change."""
    return exc.code == 422 and any(words in str(exc) for words in UNCHANGEABLE)


def may_replace(manifest: Manifest) -> bool:
    """Whether to replace the object loses nothing: no pods, no address that clients have."""
    headless = manifest["kind"] == "Service" and manifest["spec"].get("clusterIP") == "None"
    return headless or manifest["kind"] in REPLACED


def remedy(at: ObjectKey) -> str:
    """What a person can do about an object that is not replaced by itself."""
    pods = " (its pods restart)" if at.kind in ("DaemonSet", "Deployment", "StatefulSet") else ""
    return (
        f"it is made anew as wanted{pods} after: "
        f"kubectl -n {at.namespace} delete {at.kind.lower()} {at.name}"
    )


def rivals(manifest: Manifest, child: Mapping[str, object]) -> tuple[str, ...]:
    """Other managers of fields that the manifest sets, by name."""
    metadata = child["metadata"]
    assert isinstance(metadata, Mapping)
    wanted = applied_fields(manifest)
    found = {
        entry["manager"]
        for entry in metadata.get("managedFields", ())
        if entry.get("manager") != FIELD_MANAGER
        and not entry.get("subresource")
        and _shares(entry.get("fieldsV1", {}), wanted)
    }
    return tuple(sorted(found))


def _shares(fields: Mapping[str, object], wanted: Mapping[str, object]) -> bool:
    """Whether a manager owns a field that is wanted."""
    for name, below in fields.items():
        value = wanted.get(name[2:]) if name.startswith("f:") else None
        if value is None or not isinstance(below, Mapping):
            continue
        if not below.keys() - {"."} or not isinstance(value, Mapping):
            return True
        if _shares(below, value):
            return True
    return False


@dataclass
class _Repaired:
    times: int = 0
    at_s: float = float("-inf")


@dataclass
class Repairs:
    """How often each child was taken back of late, and so when it may be again."""

    _of: dict[ObjectKey, _Repaired] = field(default_factory=dict)

    def wait_s(self, at: ObjectKey, now_s: float) -> float:
        """Seconds until the child may be repaired again; 0 while it was not done often."""
        found = self._of.get(at)
        if found is None or found.times < FREE_REPAIRS:
            return 0.0
        pause_s = min(FIRST_PAUSE_S * 2.0 ** (found.times - FREE_REPAIRS), MOST_PAUSE_S)
        return max(found.at_s + pause_s - now_s, 0.0)

    def made(self, at: ObjectKey, now_s: float) -> None:
        """The child has been repaired."""
        found = self._of.setdefault(at, _Repaired())
        if now_s - found.at_s > FORGOTTEN_S:
            found.times = 0
        found.times, found.at_s = found.times + 1, now_s
