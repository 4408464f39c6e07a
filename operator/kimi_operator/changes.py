"""What to apply and what to prune: wanted objects against the children there are.

An apply is skipped when nothing would change. Values cannot be compared to find that out: a server
fills in defaults and rewrites quantities. Two things tell it instead. The hash of what we last
applied is an annotation of the object, and the server keeps, per field manager, which fields it
owns: whoever changes a value of ours takes the field away from us. So a child is as wanted when
the hash is equal and every field that we would apply is still ours.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kimi_operator.observed import Manifest, ObjectKey

FIELD_MANAGER = "kimi-operator"
HASH_ANNOTATION = "kimistack.dev/applied-hash"
_IDENTITY = {"apiVersion", "kind"}
_IDENTITY_METADATA = {"name", "namespace"}
KEPT_UNTIL_PODS_ARE_GONE = frozenset({"StatefulSet", "DaemonSet", "Deployment"})
"""Deleted in the foreground, so that what still takes GPUs and memory stays visible."""


@dataclass(frozen=True)
class Apply:
    """One server-side apply, and why."""

    manifest: Manifest
    reason: Literal["create", "change", "drift"]

    @property
    def key(self) -> ObjectKey:
        """Of the object."""
        return ObjectKey.of(self.manifest)


@dataclass(frozen=True)
class Delete:
    """One deletion of exactly the object with this uid."""

    key: ObjectKey
    uid: str
    foreground: bool


@dataclass(frozen=True)
class Changes:
    """What one pass writes: `applies` in the order of the rendered objects, then `deletes`.

    `ending` are wanted objects whose deletion has to finish first; `foreign` are wanted names that
    somebody else's object has.
    """

    applies: tuple[Apply, ...]
    deletes: tuple[Delete, ...]
    ending: tuple[ObjectKey, ...]
    foreign: tuple[ObjectKey, ...]


def stamped(manifest: Manifest) -> Manifest:
    """The manifest as it is applied: ports complete, and the hash of itself as an annotation."""
    manifest = _with_protocols(manifest)
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), HASH_ANNOTATION: digest}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def _with_protocols(value: Any) -> Any:
    """`protocol` written in every port: 1.20 merges ports by it and refuses one without."""
    if isinstance(value, Mapping):
        return {
            name: [{"protocol": "TCP", **port} for port in below]
            if name == "ports" and _are_ports(below)
            else _with_protocols(below)
            for name, below in value.items()
        }
    return [_with_protocols(item) for item in value] if isinstance(value, list | tuple) else value


def _are_ports(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(port, Mapping) and ("containerPort" in port or "port" in port) for port in value
    )


def changes(
    wanted: Sequence[Manifest],
    children: Mapping[ObjectKey, Manifest],
    owner_uid: str,
    *,
    kept: frozenset[ObjectKey] = frozenset(),
    settled: Mapping[ObjectKey, str] | None = None,
) -> Changes:
    """What leads from `children` to `wanted`; objects in `kept` are neither wanted nor pruned.

    `settled` has, by key, `fingerprint` of what the server answered to the last apply. A server
    that gives us less than we asked for would otherwise be asked again at every pass.
    """
    applies: list[Apply] = []
    ending: list[ObjectKey] = []
    foreign: list[ObjectKey] = []
    keys = set()
    for manifest in map(stamped, wanted):
        key = ObjectKey.of(manifest)
        keys.add(key)
        child = children.get(key)
        if child is None:
            applies.append(Apply(manifest, "create"))
        elif not is_owned(child, owner_uid):
            foreign.append(key)
        elif "deletionTimestamp" in child["metadata"]:
            ending.append(key)
        elif reason := _reason(manifest, child, (settled or {}).get(key)):
            applies.append(Apply(manifest, reason))
    deletes = tuple(
        deletion(key, child)
        for key, child in sorted(children.items())
        if key not in keys
        and key not in kept
        and is_owned(child, owner_uid)
        and "deletionTimestamp" not in child["metadata"]
    )
    return Changes(tuple(applies), deletes, tuple(ending), tuple(foreign))


def deletion(key: ObjectKey, child: Mapping[str, Any]) -> Delete:
    """The deletion of a child."""
    return Delete(key, child["metadata"]["uid"], key.kind in KEPT_UNTIL_PODS_ARE_GONE)


def is_owned(child: Mapping[str, Any], owner_uid: str) -> bool:
    """Whether the object's controller is the one with this uid."""
    owners = child["metadata"].get("ownerReferences", ())
    return any(owner.get("controller") and owner["uid"] == owner_uid for owner in owners)


def fingerprint(child: Mapping[str, Any]) -> str:
    """What we own of an object, and under which hash, as one comparable digest."""
    text = json.dumps([_applied_hash(child), owned_fields(child)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _reason(
    manifest: Manifest, child: Mapping[str, Any], settled: str | None
) -> Literal["change", "drift"] | None:
    if _applied_hash(child) != manifest["metadata"]["annotations"][HASH_ANNOTATION]:
        return "change"
    if _scaled(manifest, child):
        return "drift"
    if settled is not None and settled == fingerprint(child):
        return None
    owned = owned_fields(child)
    return None if owned and owns(owned, applied_fields(manifest)) else "drift"


def _scaled(manifest: Manifest, child: Mapping[str, Any]) -> bool:
    """Whether somebody scaled what we scale: 1.20 leaves `/scale` out of managedFields."""
    wanted = (manifest.get("spec") or {}).get("replicas")
    return wanted is not None and (child.get("spec") or {}).get("replicas") != wanted


def _applied_hash(child: Mapping[str, Any]) -> str | None:
    return (child["metadata"].get("annotations") or {}).get(HASH_ANNOTATION)


def applied_fields(manifest: Manifest) -> Manifest:
    """What of a manifest a server keeps an owner of: all but what identifies the object."""
    metadata = {k: v for k, v in manifest["metadata"].items() if k not in _IDENTITY_METADATA}
    return {**{k: v for k, v in manifest.items() if k not in _IDENTITY}, "metadata": metadata}


def owned_fields(child: Mapping[str, Any]) -> Mapping[str, Any]:
    """`fieldsV1` of our own applies to the object; empty if we own nothing of it."""
    for entry in child["metadata"].get("managedFields", ()):
        ours = entry.get("manager") == FIELD_MANAGER and entry.get("operation") == "Apply"
        if ours and not entry.get("subresource"):
            fields: Mapping[str, Any] = entry.get("fieldsV1", {})
            return fields
    return {}


def owns(fields: Mapping[str, Any], value: Any) -> bool:
    """Whether `fieldsV1` covers every field of a value.

    In `fieldsV1`, `f:name` is a field, `k:{...}` an element of a list told apart by those keys,
    `v:...` an element of a set; nothing below an entry means that it is owned as a whole. Empty
    maps (`emptyDir: {}`) are in it on some servers only, so they do not count.
    """
    below = {key: rest for key, rest in fields.items() if key != "."}
    if not below:
        return True
    if isinstance(value, Mapping):
        return all(
            f"f:{k}" in below and owns(below[f"f:{k}"], v) for k, v in value.items() if v != {}
        )
    if isinstance(value, list | tuple):
        return all(_owns_element(below, element) for element in value)
    return False


def _owns_element(fields: Mapping[str, Any], element: Any) -> bool:
    if not isinstance(element, Mapping):
        return any(key[:2] == "v:" and json.loads(key[2:]) == element for key in fields)
    for key, rest in fields.items():
        # a key that the element leaves out has the server's default (a port's protocol)
        if key[:2] == "k:" and all(
            element.get(name, wanted) == wanted for name, wanted in json.loads(key[2:]).items()
        ):
            return owns(rest, element)
    return False
