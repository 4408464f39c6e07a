"""`kubectl kimi status`: one deployment as people ask for it. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from kimi_operator.changes import is_owned
from kimi_operator.instances import instance_id, instance_views
from kimi_operator.kubectl.sight import Sight
from kimi_operator.kubectl.signals import Heard, pods_of
from kimi_operator.observed import EVICT, InstanceView, Manifest
from kimi_operator.revisions import FAILED
from kimi_operator.stamps import seconds
from kimi_operator.teardown import FINALIZER


class Told(BaseModel):
    """Plain data for both forms of output."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True)


class PodLine(Told):
    """One pod of an instance. `phase` says why it is not ready, where it is not."""

    pod: str
    node: str | None
    ready: bool
    phase: str
    restarts: int


class InstanceLine(Told):
    """One instance. `in_flight` None: no router said so."""

    instance: str
    role: str
    revision: str
    state: str
    pods_ready: int
    pods_desired: int
    in_flight: int | None
    created_s: float
    pods: tuple[PodLine, ...]
    failures: tuple[str, ...]


class RevisionLine(Told):
    """A kept revision. `use`: current, update, or neither."""

    revision: str
    number: int
    use: str
    instances: int
    failed: bool
    created_s: float


class StatusReport(Told):
    """Everything about one deployment. `todo` are sentences for whoever reads it."""

    namespace: str
    name: str
    ready: bool
    url: str | None
    model: str | None
    generation: int
    observed_generation: int
    roles: Mapping[str, Mapping[str, Any]]
    rollout: Mapping[str, Any] | None
    gpu: Mapping[str, Any] | None
    conditions: tuple[Mapping[str, Any], ...]
    instances: tuple[InstanceLine, ...]
    revisions: tuple[RevisionLine, ...]
    recommendation: str | None
    todo: tuple[str, ...]


def report_of(sight: Sight, known: Heard) -> StatusReport:
    """The report on a deployment that is there."""
    resource = sight.resource
    assert resource is not None
    metadata, status = resource["metadata"], resource.get("status") or {}
    conditions = status.get("conditions") or []
    held = {c["type"]: c for c in conditions}
    return StatusReport(
        namespace=metadata["namespace"],
        name=metadata["name"],
        ready=held.get("Ready", {}).get("status") == "True",
        url=status.get("url"),
        model=status.get("model"),
        generation=metadata.get("generation", 0),
        observed_generation=status.get("observedGeneration", 0),
        roles={k: v for k, v in (status.get("pools") or {}).items() if v},
        rollout=status.get("rollout"),
        gpu=status.get("gpu"),
        conditions=tuple(conditions),
        instances=tuple(_instances(sight)),
        revisions=tuple(_revisions(sight)),
        recommendation=status.get("recommendation"),
        todo=tuple(_todo(resource, held, known)),
    )


def _instances(sight: Sight) -> Iterator[InstanceLine]:
    assert sight.resource is not None
    uid = sight.resource["metadata"]["uid"]
    sets = {
        found: child
        for at, child in sight.children.items()
        if at.kind == "StatefulSet" and is_owned(child, uid)
        if (found := instance_id(child["metadata"].get("labels") or {})) is not None
    }
    for view in instance_views(sight.children, uid, sight.loads):
        yield InstanceLine(
            instance=instance_name(view),
            role=view.id.role,
            revision=view.id.revision,
            state=state_of(view),
            pods_ready=view.pods_ready,
            pods_desired=view.pods_desired,
            in_flight=view.in_flight,
            created_s=view.created_s,
            pods=tuple(map(_pod, pods_of(sight, sets[view.id]))),
            failures=view.failures,
        )


def instance_name(view: InstanceView) -> str:
    """As `kubectl kimi drain` and every message name it."""
    return f"{view.id.role}-{view.id.revision}-{view.id.index}"


def state_of(view: InstanceView) -> str:
    """In one word."""
    if view.terminating:
        return "ending"
    if view.draining or view.evicted:
        return "draining"
    if view.serving:
        return "serving"
    if view.failures:
        return "failing"
    return "loading" if view.pods_scheduled >= view.pods_desired else "scheduling"


def _pod(pod: Manifest) -> PodLine:
    status = pod.get("status") or {}
    statuses = status.get("containerStatuses") or ()
    waiting = [
        reason
        for container in (*(status.get("initContainerStatuses") or ()), *statuses)
        if (reason := ((container.get("state") or {}).get("waiting") or {}).get("reason"))
    ]
    ready = any(
        c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ()
    )
    ending = "deletionTimestamp" in pod["metadata"]
    return PodLine(
        pod=pod["metadata"]["name"],
        node=pod["spec"].get("nodeName"),
        ready=ready,
        phase="Terminating" if ending else (waiting or [status.get("phase", "Unknown")])[0],
        restarts=sum(int(container.get("restartCount", 0)) for container in statuses),
    )


def _revisions(sight: Sight) -> Iterator[RevisionLine]:
    """Kept revisions, the newest first; of several with one name (another router) the last."""
    assert sight.resource is not None
    status = sight.resource.get("status") or {}
    instances = [
        child["metadata"]["labels"].get("kimistack.dev/revision")
        for at, child in sight.children.items()
        if at.kind == "StatefulSet"
    ]
    newest: dict[str, Manifest] = {}
    for manifest in kept_revisions(sight):
        newest.pop(manifest["data"]["name"], None)
        newest[manifest["data"]["name"]] = manifest
    for name, manifest in reversed(newest.items()):
        uses = [
            use
            for use, field in (("current", "currentRevision"), ("update", "updateRevision"))
            if status.get(field) == name
        ]
        annotations = manifest["metadata"].get("annotations") or {}
        yield RevisionLine(
            revision=name,
            number=manifest["revision"],
            use=", ".join(uses),
            instances=instances.count(name),
            failed=annotations.get(FAILED) == "true",
            created_s=seconds(manifest["metadata"].get("creationTimestamp")),
        )


def kept_revisions(sight: Sight) -> list[Manifest]:
    """ControllerRevisions of the deployment, oldest first."""
    found = [
        child
        for at, child in sight.children.items()
        if at.kind == "ControllerRevision" and "name" in (child.get("data") or {})
    ]
    return sorted(found, key=lambda manifest: manifest["revision"])


def _todo(resource: Manifest, held: Mapping[str, Mapping[str, Any]], known: Heard) -> Iterator[str]:
    metadata, spec = resource["metadata"], resource.get("spec") or {}
    name, where = metadata["name"], f"-n {metadata['namespace']}"
    if "deletionTimestamp" in metadata:
        stays = ", ".join(metadata.get("finalizers") or ()) or "no finalizer"
        yield f"it is being deleted ({stays} is left)"
        if FINALIZER in (metadata.get("finalizers") or ()):
            yield f"if the operator is gone for good: kubectl kimi unblock {name} {where}"
        return
    status = resource.get("status") or {}
    if not status:
        yield "no operator has looked at it: is one running that watches this namespace?"
    elif status.get("observedGeneration", 0) < metadata.get("generation", 0):
        yield "the operator has not yet seen the newest spec; if that stays so, is it running?"
    for kind, bad in (("Stalled", "True"), ("Degraded", "True"), ("NodesEligible", "False")):
        condition = held.get(kind, {})
        if condition.get("status") == bad:
            yield f"{condition['reason']}: {condition['message']}"
    preflight = held.get("PreflightPassed", {})
    if preflight.get("status") == "False":
        yield f"{preflight['reason']}: {preflight['message']}"
    rollout = spec.get("rollout") or {}
    if rollout.get("paused"):
        yield f"the rollout is paused; go on: kubectl kimi resume {name} {where}"
    if rollout.get("toRevision"):
        yield (
            f"it is held at revision {rollout['toRevision']}; go forward again: "
            f"kubectl kimi undo {name} --forward {where}"
        )
    if spec.get("suspend", "None") != "None":
        yield f"spec.suspend is {spec['suspend']}; set it to None to go on"
    for pod, why in known.silent:
        yield f"router {pod} does not say what is in flight: {why}"


def evicted(stateful_set: Manifest) -> bool:
    """Whether a drain was asked for."""
    return (stateful_set["metadata"].get("annotations") or {}).get(EVICT) == "true"
