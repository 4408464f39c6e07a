"""What makes running routers and pool daemons read their lists at once. Pure.

The kubelet writes a changed ConfigMap into a pod's volume when it looks at the pod again, which is
up to a minute and more later. A change of the pod itself makes it look now, so each is annotated
with the list it should have: a router's with workers and pools, a daemon's with its peers.
"""

from collections.abc import Iterable, Mapping

from kimi_operator.desired.labels import COMPONENT_LABEL
from kimi_operator.desired.names import digest_of
from kimi_operator.desired.pool_files import PEERS_FILE
from kimi_operator.desired.router import FLEET_FILE
from kimi_operator.observed import Manifest, ObjectKey

FLEET_ANNOTATION = "kimistack.dev/fleet"
"""On these pods: digest of the list that was written last."""
LISTS = {FLEET_FILE: "router", PEERS_FILE: "umbp"}
"""By file, the component whose pods read it."""


def fleet_patches(
    children: Mapping[ObjectKey, Manifest], wanted: Iterable[Manifest]
) -> dict[ObjectKey, Manifest]:
    """By pod, the merge patch that names the list in `wanted`; none for pods that have it."""
    marks = {
        LISTS[file]: digest_of(text)[:16]
        for manifest in wanted
        if manifest["kind"] == "ConfigMap"
        for file, text in manifest["data"].items()
        if file in LISTS
    }
    patches: dict[ObjectKey, Manifest] = {}
    for key, child in sorted(children.items()):
        metadata = child["metadata"]
        mark = marks.get((metadata.get("labels") or {}).get(COMPONENT_LABEL, ""))
        if key.kind != "Pod" or mark is None or "deletionTimestamp" in metadata:
            continue
        if (metadata.get("annotations") or {}).get(FLEET_ANNOTATION) != mark:
            patches[key] = {"metadata": {"annotations": {FLEET_ANNOTATION: mark}}}
    return patches
