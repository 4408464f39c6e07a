"""What makes running routers read their list of workers at once. Pure.

The kubelet writes a changed ConfigMap into a pod's volume when it looks at the pod again, which is
up to a minute and more later. A change of the pod itself makes it look now, so each router's pod is
annotated with the list it should have.
"""

from collections.abc import Iterable, Mapping

from kimi_operator.desired.labels import COMPONENT_LABEL
from kimi_operator.desired.names import digest_of
from kimi_operator.desired.router import FLEET_FILE
from kimi_operator.observed import Manifest, ObjectKey

FLEET_ANNOTATION = "kimistack.dev/fleet"
"""On routers' pods: digest of the list of workers and pools that was written last."""


def fleet_patches(
    children: Mapping[ObjectKey, Manifest], wanted: Iterable[Manifest]
) -> dict[ObjectKey, Manifest]:
    """By pod, the merge patch that names the list in `wanted`; none for pods that have it."""
    files = (m["data"].get(FLEET_FILE) for m in wanted if m["kind"] == "ConfigMap")
    fleet = next((text for text in files if text is not None), None)
    if fleet is None:
        return {}
    mark = digest_of(fleet)[:16]
    patches: dict[ObjectKey, Manifest] = {}
    for key, child in sorted(children.items()):
        metadata = child["metadata"]
        is_router = (metadata.get("labels") or {}).get(COMPONENT_LABEL) == "router"
        if key.kind != "Pod" or not is_router or "deletionTimestamp" in metadata:
            continue
        if (metadata.get("annotations") or {}).get(FLEET_ANNOTATION) != mark:
            patches[key] = {"metadata": {"annotations": {FLEET_ANNOTATION: mark}}}
    return patches
