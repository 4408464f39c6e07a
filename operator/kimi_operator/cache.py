"""What watches have told: every object the operator looks at, by the deployment it belongs to.

A pass reads only here, so that a quiet cluster costs no request. Own writes are put in at once:
otherwise the next pass, started before the watch has told of them, would decide from the past.

Children are kept as compressed text: as dicts, with their managedFields, those of one deployment
take half a megabyte, and most of them are not looked at for hours.
"""

import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, Self

from kimi_operator.api.base import API_VERSION
from kimi_operator.nodes import Claim, claim_of
from kimi_operator.observed import DEPLOYMENT_LABEL, Manifest, ObjectKey

Change = Literal["ADDED", "MODIFIED", "DELETED"]
TOMBSTONES = 10_000
UNPACKED = 16
"""Deployments of which the children are kept as dicts too, those looked at last."""


class Key(NamedTuple):
    """A KimiDeployment."""

    namespace: str
    name: str

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Self:
        """Of the deployment's own metadata."""
        return cls(metadata.get("namespace") or "", metadata["name"])

    @classmethod
    def of_owner(cls, metadata: Mapping[str, Any]) -> Self | None:
        """The deployment a child belongs to, by its label."""
        name = (metadata.get("labels") or {}).get(DEPLOYMENT_LABEL)
        return cls(metadata.get("namespace") or "", name) if name else None

    @property
    def object(self) -> ObjectKey:
        """The resource itself."""
        return ObjectKey(API_VERSION, "KimiDeployment", self.namespace, self.name)

    def __str__(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"


class _Packed:
    """A child as text, and what every event is compared with."""

    __slots__ = ("metadata", "text")

    def __init__(self, manifest: Manifest) -> None:
        named = manifest["metadata"]
        self.metadata = {name: named.get(name, "") for name in ("uid", "resourceVersion")}
        self.text = zlib.compress(json.dumps(manifest, separators=(",", ":")).encode(), 1)

    def unpacked(self) -> Manifest:
        """The object."""
        manifest: Manifest = json.loads(zlib.decompress(self.text))
        return manifest


class Cache:
    """Deployments and their children. Objects are shared, so they must not be changed."""

    def __init__(self) -> None:
        self._deployments: dict[ObjectKey, Manifest] = {}
        self._children: dict[Key, dict[ObjectKey, _Packed]] = {}
        self._unpacked: dict[Key, dict[ObjectKey, Manifest]] = {}
        self._claims: dict[Key, dict[ObjectKey, Claim]] = {}
        self._changes: dict[Key, int] = {}
        self._count = 0
        self._gone: dict[str, None] = {}

    def deployment(self, key: Key) -> Manifest | None:
        """The KimiDeployment."""
        return self._deployments.get(key.object)

    def deployments(self) -> tuple[Key, ...]:
        """All of them."""
        return tuple(Key(at.namespace, at.name) for at in self._deployments)

    def children(self, key: Key) -> dict[ObjectKey, Manifest]:
        """A deployment's children, pods included."""
        unpacked = self._unpacked.pop(key, None)
        if unpacked is None:
            packed = self._children.get(key, {})
            unpacked = {at: child.unpacked() for at, child in packed.items()}
        self._unpacked[key] = unpacked
        while len(self._unpacked) > UNPACKED:
            del self._unpacked[next(iter(self._unpacked))]
        return dict(unpacked)

    def changes(self, key: Key) -> int:
        """A number that is another one after every change of a deployment's children."""
        return self._changes.get(key, 0)

    def taken(self, but: Key) -> dict[str, dict[str, dict[str, float]]]:
        """What pods of all deployments but one request: amounts by resource, deployment, node."""
        found: dict[str, dict[str, dict[str, float]]] = {}
        for owner, claims in self._claims.items():
            for claim in () if owner == but else claims.values():
                amounts = found.setdefault(claim.node, {}).setdefault(str(owner), {})
                for resource, amount in claim.amounts.items():
                    amounts[resource] = amounts.get(resource, 0.0) + amount
        return found

    def saw(self, change: Change, manifest: Manifest) -> Key | None:
        """Take in one event, or the answer to a write. The deployment it concerns, if any.

        What is older than what is known is ignored: a watch tells of our own writes once more, and
        an answer may come later than the watch's word of the deletion.
        """
        metadata = manifest["metadata"]
        ours = manifest["kind"] == "KimiDeployment"
        owner = Key.of(metadata) if ours else Key.of_owner(metadata)
        if owner is None:
            return None
        index = ObjectKey.of(manifest)
        known = self._version_of(owner, index, ours=ours)
        if change == "DELETED":
            self._bury(metadata["uid"])
            if known is not None and known["uid"] == metadata["uid"]:
                self._drop(owner, index, ours=ours)
        elif metadata["uid"] not in self._gone and _is_newer(metadata, known):
            self._keep(owner, index, manifest, ours=ours)
        return owner

    def condemn(self, owner: Key, key: ObjectKey, uid: str, now: str) -> None:
        """Take a child for one whose deletion has begun, until the watch tells more of it."""
        child = self.children(owner).get(key)
        if child is not None and child["metadata"]["uid"] == uid:
            metadata = {"deletionTimestamp": now, **child["metadata"]}
            self._keep(owner, key, {**child, "metadata": metadata}, ours=False)

    def _version_of(self, owner: Key, at: ObjectKey, *, ours: bool) -> Mapping[str, Any] | None:
        """uid and resourceVersion of what is known."""
        if ours:
            resource = self._deployments.get(at)
            return None if resource is None else resource["metadata"]
        child = self._children.get(owner, {}).get(at)
        return None if child is None else child.metadata

    def _keep(self, owner: Key, at: ObjectKey, manifest: Manifest, *, ours: bool) -> None:
        if ours:
            self._deployments[at] = manifest
            return
        self._children.setdefault(owner, {})[at] = _Packed(manifest)
        self._count_change(owner)
        if owner in self._unpacked:
            self._unpacked[owner][at] = manifest
        claim = claim_of(manifest) if at.kind == "Pod" else None
        if claim is not None:
            self._claims.setdefault(owner, {})[at] = claim
        else:
            self._unclaim(owner, at)

    def _drop(self, owner: Key, at: ObjectKey, *, ours: bool) -> None:
        if ours:
            del self._deployments[at]
            return
        self._unpacked.get(owner, {}).pop(at, None)
        self._unclaim(owner, at)
        children = self._children[owner]
        del children[at]
        self._count_change(owner)
        if not children:
            del self._children[owner], self._changes[owner]

    def _count_change(self, owner: Key) -> None:
        self._count += 1
        self._changes[owner] = self._count

    def _unclaim(self, owner: Key, at: ObjectKey) -> None:
        claims = self._claims.get(owner)
        if claims is not None and claims.pop(at, None) is not None and not claims:
            del self._claims[owner]

    def known(self, kind: str, namespace: str | None) -> dict[ObjectKey, str]:
        """Uids of the objects of a kind there are now, in one namespace or (None) in all."""
        found = {at: str(o["metadata"]["uid"]) for at, o in self._deployments.items()}
        for children in self._children.values():
            found |= {at: str(child.metadata["uid"]) for at, child in children.items()}
        return {
            at: uid
            for at, uid in found.items()
            if namespace in (None, at.namespace) and f"{at.api_version}/{at.kind}" == kind
        }

    def replace(
        self, kind: str, found: Iterable[Manifest], known: Mapping[ObjectKey, str]
    ) -> set[Key]:
        """Take in a whole listing of a kind; the deployments for which it told something new.

        Watches lose deletions that happen while they are broken off. `known` is what was known of
        the kind before the listing was asked for: only that can have been deleted by then, and not
        what was created since.
        """
        listed = {ObjectKey.of(manifest): manifest for manifest in found}
        told: set[Key] = set()
        for at, uid in known.items():
            if at not in listed:
                told |= self._lost(at, uid)
        for manifest in listed.values():
            metadata = manifest["metadata"]
            ours = manifest["kind"] == "KimiDeployment"
            owner = Key.of(metadata) if ours else Key.of_owner(metadata)
            if owner is not None and metadata["uid"] not in self._gone:
                at = ObjectKey.of(manifest)
                if _is_newer(metadata, self._version_of(owner, at, ours=ours)):
                    self._keep(owner, at, manifest, ours=ours)
                    told.add(owner)
        return told

    def _lost(self, at: ObjectKey, uid: str) -> set[Key]:
        """Forget an object that is no more; whose it was."""
        resource = self._deployments.get(at)
        if resource is not None and resource["metadata"]["uid"] == uid:
            self._bury(uid)
            owner = Key(at.namespace, at.name)
            self._drop(owner, at, ours=True)
            return {owner}
        for owner, children in self._children.items():
            if at in children and children[at].metadata["uid"] == uid:
                self._bury(uid)
                self._drop(owner, at, ours=False)
                return {owner}
        return set()

    def _bury(self, uid: str) -> None:
        self._gone[uid] = None
        while len(self._gone) > TOMBSTONES:
            del self._gone[next(iter(self._gone))]


def _is_newer(metadata: Mapping[str, Any], known: Mapping[str, Any] | None) -> bool:
    if known is None or known["uid"] != metadata["uid"]:
        return True
    old, new = (str(m.get("resourceVersion", "")) for m in (known, metadata))
    if old.isdigit() and new.isdigit():
        return int(new) > int(old)
    return bool(new != old)  # not numbers: the API promises no order, so the last word counts
