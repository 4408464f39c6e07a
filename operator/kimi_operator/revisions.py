"""Kept revisions, as ControllerRevisions have them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from kimi_operator.api.deployment import ROLES
from kimi_operator.api.roles import RoleName
from kimi_operator.desired.revision import Revision, from_controller_revision
from kimi_operator.nodes import quantity
from kimi_operator.observed import Manifest, ObjectKey

FAILED = "kimistack.dev/failed"
"""Annotation, "true": a rollout to this revision failed and was undone."""


def remembered(manifests: Sequence[Manifest]) -> tuple[Revision, ...]:
    """The revisions that are kept, oldest first. One that somebody damaged is not there."""
    found = []
    for manifest in manifests:
        try:
            found.append(from_controller_revision(manifest))
        except ValueError:
            continue  # rendered anew if it is wanted, pruned if not
    return tuple(found)


def numbered(
    rendered: Iterable[Manifest], stored: Sequence[Manifest], failed: str | None
) -> list[Manifest]:
    """The manifests; ControllerRevisions keep their numbers and marks, new ones count on."""
    before = {manifest["metadata"]["name"]: manifest for manifest in stored}
    last = max((manifest["revision"] for manifest in stored), default=0)
    out = []
    for manifest in rendered:
        if manifest["kind"] == "ControllerRevision":
            known = before.get(manifest["metadata"]["name"])
            if known is None:
                last += 1
            manifest = {**manifest, "revision": known["revision"] if known else last}
            was = ((known or {}).get("metadata", {}).get("annotations") or {}).get(FAILED)
            if was == "true" or manifest["data"]["name"] == failed:
                manifest = _marked(manifest)
        out.append(manifest)
    return out


def _marked(manifest: Manifest) -> Manifest:
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), FAILED: "true"}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def shape_of(revision: Revision, resources: Iterable[str]) -> dict[RoleName, int]:
    """GPUs of one instance of each role the revision has; `resources` are names GPUs go by."""
    names = {"amd.com/gpu", *resources}
    shape: dict[RoleName, int] = {}
    for role in ROLES:
        part = revision.templates.get(role)
        if part is None:
            continue
        limits = [
            container.get("resources", {}).get("limits", {})
            for container in part.pod.get("spec", {}).get("containers", ())
        ]
        per_pod = sum(quantity(str(limit.get(name, 0))) for limit in limits for name in names)
        shape[role] = int(per_pod) * part.nodes
    return shape


def pool_addresses(children: Mapping[ObjectKey, Manifest]) -> dict[str, str]:
    """Addresses of the pool's ready daemons, by node."""
    return {node: address for node, address, leaving in _daemons(children) if not leaving}


def pool_peers(children: Mapping[ObjectKey, Manifest]) -> dict[str, str]:
    """The same, and those that leave: what they have moves to the others, who must know them."""
    ordered = sorted(_daemons(children), key=lambda one: not one[2])
    return {node: address for node, address, _ in ordered}


def _daemons(children: Mapping[ObjectKey, Manifest]) -> Iterator[tuple[str, str, bool]]:
    """Node, address, and whether it leaves, of daemons that are ready or leave."""
    for key, child in children.items():
        labels = child["metadata"].get("labels") or {}
        status = child.get("status") or {}
        if key.kind != "Pod" or labels.get("app.kubernetes.io/component") != "umbp":
            continue
        ready = any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for condition in status.get("conditions") or ()
        )
        leaving = "deletionTimestamp" in child["metadata"]
        if status.get("podIP") and (ready or leaving):
            yield child["spec"]["nodeName"], status["podIP"], leaving
