"""What a person asks of a deployment: pause, resume, undo, drain, unblock.

Everything is asked for in the resource or on an instance's StatefulSet, and the operator does it:
nothing here deletes a pod or writes a replica count.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_operator.changes import is_owned
from kimi_operator.instances import instance_id, instance_views
from kimi_operator.kube import Kube
from kimi_operator.kubectl.report import evicted, instance_name, kept_revisions
from kimi_operator.kubectl.sight import Sight, key_of
from kimi_operator.observed import EVICT, InstanceId, InstanceView, Manifest, ObjectKey
from kimi_operator.revisions import FAILED
from kimi_runtime.errors import ClusterConflict, ConfigError

Tell = Callable[[str], None]


async def patch_rollout(kube: Kube, resource: Manifest, fields: dict[str, Any]) -> bool:
    """Write fields of spec.rollout (None removes one); whether anything changed."""
    before = (resource.get("spec") or {}).get("rollout") or {}
    defaults = {"paused": False, "toRevision": None}
    if all(before.get(name, defaults.get(name)) == value for name, value in fields.items()):
        return False
    metadata = resource["metadata"]
    patch = {"spec": {"rollout": fields}}
    key = key_of(metadata["namespace"], metadata["name"])
    if await kube.merge(key, patch) is None:
        raise ConfigError(f"KimiDeployment {metadata['name']} was deleted meanwhile")
    return True


async def pause(kube: Kube, resource: Manifest, tell: Tell) -> None:
    """Have the rollout stop after the step under way."""
    name = resource["metadata"]["name"]
    changed = await patch_rollout(kube, resource, {"paused": True})
    tell(
        f"{name}: the rollout pauses after the step under way"
        if changed
        else f"{name}: the rollout is paused already"
    )


async def resume(kube: Kube, resource: Manifest, tell: Tell) -> None:
    """Have it go on."""
    name = resource["metadata"]["name"]
    changed = await patch_rollout(kube, resource, {"paused": False})
    tell(f"{name}: the rollout goes on" if changed else f"{name}: the rollout is not paused")


async def undo(kube: Kube, sight: Sight, revision: str | None, tell: Tell) -> None:
    """Go back to a kept revision: the named one, else the newest other one that did not fail.

    The spec keeps what it says and `rollout.toRevision` overrules it, until `forward`.
    """
    assert sight.resource is not None
    name = sight.resource["metadata"]["name"]
    target = revision_to_undo_to(sight, revision)
    if await patch_rollout(kube, sight.resource, {"toRevision": target}):
        tell(f"{name}: it goes back to revision {target}; forward again: undo {name} --forward")
    else:
        tell(f"{name}: it is held at revision {target} already")


async def forward(kube: Kube, resource: Manifest, tell: Tell) -> None:
    """Take back an undo: run what the spec asks for."""
    name = resource["metadata"]["name"]
    changed = await patch_rollout(kube, resource, {"toRevision": None})
    tell(f"{name}: it goes to what its spec asks for" if changed else f"{name}: nothing is undone")


def revision_to_undo_to(sight: Sight, asked: str | None) -> str:
    """Raises ConfigError where there is nothing to go back to, naming what is kept."""
    assert sight.resource is not None
    kept = kept_revisions(sight)
    names = list(dict.fromkeys(manifest["data"]["name"] for manifest in kept))
    if asked is not None:
        if asked not in names:
            raise ConfigError(
                f"revision {asked} is not kept; there are: {', '.join(names) or 'none'}"
            )
        return asked
    status = sight.resource.get("status") or {}
    held = ((sight.resource.get("spec") or {}).get("rollout") or {}).get("toRevision")
    running = held or status.get("updateRevision") or (names[-1] if names else None)
    failed = {
        manifest["data"]["name"]
        for manifest in kept
        if (manifest["metadata"].get("annotations") or {}).get(FAILED) == "true"
    }
    older = [one for one in names if one != running and one not in failed]
    if not older:
        raise ConfigError(
            f"there is no revision to go back to: {running} runs, and the kept ones are "
            f"{', '.join(names) or 'none'}"
        )
    return str(older[-1])


@dataclass(frozen=True)
class DrainTarget:
    """An instance to drain, and its StatefulSet as it is now."""

    view: InstanceView
    stateful_set: Manifest

    @property
    def key(self) -> ObjectKey:
        """Of the StatefulSet."""
        return ObjectKey.of(self.stateful_set)

    @property
    def name(self) -> str:
        """Of the instance."""
        return instance_name(self.view)


def drain_targets(sight: Sight, asked: Sequence[str], node: str | None) -> list[DrainTarget]:
    """Instances by their names (or those of their StatefulSets or pods), or those on a node.

    Raises ConfigError naming the instances there are.
    """
    assert sight.resource is not None
    uid = sight.resource["metadata"]["uid"]
    views = {view.id: view for view in instance_views(sight.children, uid, sight.loads)}
    sets = [
        (found, child)
        for at, child in sorted(sight.children.items())
        if at.kind == "StatefulSet" and is_owned(child, uid)
        if (found := instance_id(child["metadata"].get("labels") or {})) in views
    ]
    all_of = [DrainTarget(views[found], child) for found, child in sets if found is not None]
    there = ", ".join(target.name for target in all_of) or "none"
    if node is not None:
        on_node = [target for target in all_of if node in target.view.nodes]
        if not on_node:
            raise ConfigError(f"no instance runs on node {node}; there are: {there}")
        return on_node
    chosen = []
    for name in asked:
        named = next((target for target in all_of if _is(target, name)), None)
        if named is None:
            raise ConfigError(f"there is no instance {name}; there are: {there}")
        chosen.append(named)
    return chosen


def _is(target: DrainTarget, name: str) -> bool:
    stateful_set = target.stateful_set["metadata"]["name"]
    head, _, ordinal = name.rpartition("-")
    return name in (target.name, stateful_set) or (head == stateful_set and ordinal.isdigit())


def left_without(sight: Sight, targets: Sequence[DrainTarget]) -> list[str]:
    """Roles of which nothing would serve any more while these are replaced."""
    assert sight.resource is not None
    uid = sight.resource["metadata"]["uid"]
    gone = {target.view.id for target in targets}
    serving = [view.id for view in instance_views(sight.children, uid, {}) if view.serving]
    before = {one.role for one in serving}
    return sorted(before - {one.role for one in serving if one not in gone})


async def ask_to_drain(
    kube: Kube, sight: Sight, targets: Sequence[DrainTarget], *, force: bool, tell: Tell
) -> None:
    """Mark instances to be drained and replaced. Raises ConfigError for an outage without force."""
    roles = left_without(sight, targets)
    if roles and not force:
        raise ConfigError(
            f"no {' and no '.join(roles)} instance would serve until the new one is loaded; scale "
            "up first, or accept that with --force"
        )
    for target in targets:
        if evicted(target.stateful_set):
            tell(f"{target.name}: it drains already")
            continue
        if await _annotate(kube, target, "true"):
            tell(f"{target.name}: it drains, and a new instance takes its place")


async def cancel_drain(kube: Kube, targets: Sequence[DrainTarget], tell: Tell) -> None:
    """Take the marks away from what has not gone yet."""
    for target in targets:
        if not evicted(target.stateful_set):
            tell(f"{target.name}: nobody asked for a drain")
        elif await _annotate(kube, target, None):
            tell(f"{target.name}: it stays")


async def _annotate(kube: Kube, target: DrainTarget, value: str | None) -> bool:
    uid = target.stateful_set["metadata"]["uid"]
    # the uid in a patch is a precondition: a new StatefulSet of this name is another instance
    patch = {"metadata": {"uid": uid, "annotations": {EVICT: value}}}
    try:
        return await kube.merge(target.key, patch) is not None
    except ClusterConflict:
        return False


def drain_progress(sight: Sight, uids: frozenset[str]) -> tuple[int, str]:
    """How many of the marked StatefulSets are left, and a line about all of it."""
    assert sight.resource is not None
    uid = sight.resource["metadata"]["uid"]
    left: list[InstanceId] = [
        found
        for at, child in sight.children.items()
        if at.kind == "StatefulSet" and child["metadata"]["uid"] in uids
        if (found := instance_id(child["metadata"].get("labels") or {})) is not None
    ]
    views = instance_views(sight.children, uid, sight.loads)
    busy = [view for view in views if view.id in left and view.in_flight]
    parts = [f"{len(left)} of {len(uids)} left"]
    if busy:
        parts.append(f"{sum(view.in_flight or 0 for view in busy)} requests in flight on them")
    serving = {role: sum(v.serving for v in views if v.id.role == role) for role in _roles(views)}
    parts.append(", ".join(f"{n} {role} serving" for role, n in serving.items()) or "none serving")
    return len(left), "; ".join(parts)


def _roles(views: Sequence[InstanceView]) -> list[str]:
    return sorted({view.id.role for view in views})
