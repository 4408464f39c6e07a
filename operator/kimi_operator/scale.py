"""KimiWorkers: the number of instances that somebody else writes, and what `/scale` reads."""

from collections.abc import Mapping, Sequence
from typing import Any

from kimi_operator.api.roles import RoleName
from kimi_operator.changes import is_owned
from kimi_operator.observed import InstanceView, Manifest, ObjectKey


def workers_replicas(children: Mapping[ObjectKey, Manifest], owner_uid: str) -> dict[RoleName, int]:
    """The replicas of each role's KimiWorkers, where one says a number."""
    return {
        child["spec"]["role"]: int(replicas)
        for key, child in children.items()
        if key.kind == "KimiWorkers" and is_owned(child, owner_uid)
        if (replicas := child["spec"].get("replicas")) is not None
    }


def seeded(workers: Manifest, replicas: int) -> Manifest:
    """A KimiWorkers as it is created: with a number, which is never ours again after that.

    Never 0, at which an autoscaler would take scaling for disabled.
    """
    return {**workers, "spec": {**workers["spec"], "replicas": max(replicas, 1)}}


def workers_status(
    workers: Manifest, instances: Sequence[InstanceView], selector: str
) -> dict[str, Any]:
    """What `/scale` reads of a role."""
    role = workers["spec"]["role"]
    mine = [i for i in instances if i.id.role == role and not i.terminating]
    return {
        "observedGeneration": workers["metadata"]["generation"],
        "replicas": len(mine),
        "selector": selector,
    }
