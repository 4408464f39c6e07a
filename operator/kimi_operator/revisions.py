"""Kept revisions, as ControllerRevisions have them."""

from collections.abc import Iterable, Sequence

from kimi_operator.api.deployment import ROLES
from kimi_operator.api.roles import RoleName
from kimi_operator.desired.revision import Revision, from_controller_revision
from kimi_operator.nodes import quantity
from kimi_operator.observed import Manifest

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
