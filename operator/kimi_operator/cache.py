"""What watches have told: every object the operator looks at, by the deployment it belongs to.

A pass reads only here, so that a quiet cluster costs no request. Own writes are put in at once:
otherwise the next pass, started before the watch has told of them, would decide from the past.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, Self

from kimi_operator.api.base import API_VERSION
from kimi_operator.observed import DEPLOYMENT_LABEL, Manifest, ObjectKey

Change = Literal["ADDED", "MODIFIED", "DELETED"]
TOMBSTONES = 10_000


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


class Cache:
    """Deployments and their children. Objects are shared, so they must not be changed."""

    def __init__(self) -> None:
        self._deployments: dict[ObjectKey, Manifest] = {}
        self._children: dict[Key, dict[ObjectKey, Manifest]] = {}
        self._gone: dict[str, None] = {}

    def deployment(self, key: Key) -> Manifest | None:
        """The KimiDeployment."""
        return self._deployments.get(key.object)

    def deployments(self) -> tuple[Key, ...]:
        """All of them."""
        return tuple(Key(at.namespace, at.name) for at in self._deployments)

    def children(self, key: Key) -> dict[ObjectKey, Manifest]:
        """A deployment's children, pods included."""
        return dict(self._children.get(key, {}))

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
        store = self._deployments if ours else self._children.setdefault(owner, {})
        index = ObjectKey.of(manifest)
        known = store.get(index)
        if change == "DELETED":
            self._bury(metadata["uid"])
            if known is not None and known["metadata"]["uid"] == metadata["uid"]:
                del store[index]
        elif metadata["uid"] not in self._gone and _is_newer(manifest, known):
            store[index] = manifest
        if not ours and not store:
            del self._children[owner]
        return owner

    def condemn(self, owner: Key, key: ObjectKey, uid: str, now: str) -> None:
        """Take a child for one whose deletion has begun, until the watch tells more of it."""
        children = self._children.get(owner, {})
        child = children.get(key)
        if child is not None and child["metadata"]["uid"] == uid:
            metadata = {"deletionTimestamp": now, **child["metadata"]}
            children[key] = {**child, "metadata": metadata}

    def known(self, kind: str, namespace: str | None) -> dict[ObjectKey, str]:
        """Uids of the objects of a kind there are now, in one namespace or (None) in all."""
        stores = (self._deployments, *self._children.values())
        return {
            key: manifest["metadata"]["uid"]
            for store in stores
            for key, manifest in store.items()
            if namespace in (None, key.namespace) and f"{key.api_version}/{key.kind}" == kind
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
        for key, uid in known.items():
            if key not in listed:
                told |= self._lost(key, uid)
        for key, manifest in listed.items():
            if f"{key.api_version}/{key.kind}" != kind:
                continue
            before = self._at(key, manifest["metadata"])
            owner = self.saw("MODIFIED", manifest)
            after = self._at(key, manifest["metadata"])
            if owner is not None and after is not before:
                told.add(owner)
        return told

    def _lost(self, key: ObjectKey, uid: str) -> set[Key]:
        for store in (self._deployments, *self._children.values()):
            gone = store.get(key)
            if gone is not None and gone["metadata"]["uid"] == uid:
                owner = self.saw("DELETED", gone)
                return {owner} if owner is not None else set()
        return set()

    def _at(self, key: ObjectKey, metadata: Mapping[str, Any]) -> Manifest | None:
        if key.kind == "KimiDeployment":
            return self._deployments.get(key)
        owner = Key.of_owner(metadata)
        return self._children.get(owner, {}).get(key) if owner is not None else None

    def _bury(self, uid: str) -> None:
        self._gone[uid] = None
        while len(self._gone) > TOMBSTONES:
            del self._gone[next(iter(self._gone))]


def _is_newer(manifest: Manifest, known: Manifest | None) -> bool:
    if known is None or known["metadata"]["uid"] != manifest["metadata"]["uid"]:
        return True
    old, new = (m["metadata"].get("resourceVersion", "") for m in (known, manifest))
    if old.isdigit() and new.isdigit():
        return int(new) > int(old)
    return bool(new != old)  # not numbers: the API promises no order, so the last word counts
