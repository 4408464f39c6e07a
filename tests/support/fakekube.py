"""An API server in memory, with the parts of its behaviour that an operator depends on.

Server-side apply with managedFields, resourceVersion, generation, the status subresource, uids,
ownerReferences and garbage collection, finalizers and foreground deletion, watchers that hear of
every change; faults before or after any request on request. `Controllers` plays kubelet and
StatefulSet controller.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import ssa
from kimi_operator.api import defaults
from kimi_operator.cache import Change
from kimi_operator.changes import FIELD_MANAGER
from kimi_operator.kube import SEED_MANAGER
from kimi_operator.observed import K8S_CURRENT, Capabilities, Manifest, ObjectKey
from kimi_runtime.errors import ClusterBusy, ClusterConflict, ClusterError, ClusterRefused

Watcher = Callable[[Literal["ADDED", "MODIFIED", "DELETED"], Manifest], Any]
CREATED = "2030-01-01T00:00:00Z"
STATUS_KINDS = {
    "DaemonSet",
    "Deployment",
    "HorizontalPodAutoscaler",
    "Job",
    "KimiDeployment",
    "KimiWorkers",
    "Pod",
    "PodDisruptionBudget",
    "Service",
    "StatefulSet",
}


class Killed(BaseException):
    """The operator's process ends here, in the middle of whatever it was doing."""


@dataclass(frozen=True)
class Call:
    """One request; `verb` is that of RBAC."""

    verb: str
    kind: str
    name: str

    @property
    def writes(self) -> bool:
        """Whether it changes anything."""
        return self.verb not in ("get", "list")


@dataclass
class FakeKube:
    """See the module. `before` and `after` may raise: what the request then did or did not do."""

    served: Capabilities = K8S_CURRENT
    objects: dict[ObjectKey, Manifest] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    pods: dict[tuple[str, int, str], Any] = field(default_factory=dict)
    """What pods answer, by pod, port and path."""
    before: Callable[[Call], None] = lambda _: None
    after: Callable[[Call], None] = lambda _: None
    _watchers: list[Watcher] = field(default_factory=list)
    _version: int = 0

    def forked(self) -> "FakeKube":
        """The same objects in a server of their own, that nobody watches and nothing disturbs."""
        return FakeKube(self.served, ssa.cloned(self.objects), _version=self._version)

    @property
    def version(self) -> int:
        """The newest resourceVersion."""
        return self._version

    def _next_version(self) -> str:
        self._version += 1
        return str(self._version)

    def subscribe(self, watcher: Watcher) -> None:
        """Tell what there is, then every change."""
        for manifest in list(self.objects.values()):
            watcher("ADDED", ssa.cloned(manifest))
        self._watchers.append(watcher)

    def unsubscribe_all(self) -> None:
        """Nobody watches any more, as after a crash."""
        self._watchers.clear()

    @property
    def writes(self) -> list[Call]:
        """Requests that change something."""
        return [call for call in self.calls if call.writes]

    def of_kind(self, kind: str) -> list[Manifest]:
        """Objects of a kind, by name."""
        found = [obj for key, obj in self.objects.items() if key.kind == kind]
        return sorted(found, key=lambda obj: obj["metadata"]["name"])

    async def capabilities(self) -> Capabilities:
        """See `Kube`."""
        return self.served

    async def get(self, key: ObjectKey) -> Manifest | None:
        """See `Kube`."""
        self._enter(call := Call("get", key.kind, key.name))
        self.after(call)
        return ssa.cloned(self.objects.get(key))

    async def list(self, kind: str, namespace: str | None, labels: str = "") -> list[Manifest]:
        """See `Kube`."""
        self._enter(call := Call("list", kind, ""))
        self.after(call)
        return [
            ssa.cloned(obj)
            for key, obj in sorted(self.objects.items())
            if f"{key.api_version}/{key.kind}" == kind
            and namespace in (None, key.namespace)
            and _selected(obj["metadata"].get("labels", {}), labels)
        ]

    async def listing(
        self, kind: str, namespace: str | None, labels: str = ""
    ) -> tuple[Sequence[Manifest], str]:
        """See `reflect.Source`."""
        return await self.list(kind, namespace, labels), str(self._version)

    async def watch(
        self, kind: str, namespace: str | None, labels: str, version: str
    ) -> AsyncGenerator[tuple[Change | None, Manifest]]:
        """See `reflect.Source`. Told is what happens from now on, so `version` is the newest."""
        if version != str(self._version):
            raise ClusterBusy(f"version {version} is not kept", code=410)
        told: asyncio.Queue[tuple[Change, Manifest]] = asyncio.Queue()

        def watcher(change: Change, obj: Manifest) -> None:
            key = ObjectKey.of(obj)
            ours = f"{key.api_version}/{key.kind}" == kind and namespace in (None, key.namespace)
            if ours and _selected(obj["metadata"].get("labels", {}), labels):
                told.put_nowait((change, obj))

        self._watchers.append(watcher)
        try:
            while True:
                yield await told.get()
        finally:
            if watcher in self._watchers:
                self._watchers.remove(watcher)

    async def apply(self, manifest: Manifest) -> Manifest:
        """See `Kube`."""
        key = ObjectKey.of(manifest)
        self._enter(call := Call("apply", key.kind, key.name))
        self._must_serve(key)
        result = self.server_side_apply(manifest, FIELD_MANAGER, force=True)
        self.after(call)
        return result

    async def create(self, manifest: Manifest) -> Manifest | None:
        """See `Kube`."""
        key = ObjectKey.of(manifest)
        self._enter(call := Call("create", key.kind, key.name))
        self._must_serve(key)
        if key in self.objects:
            return None
        created = self.put(manifest, SEED_MANAGER)
        self.after(call)
        return created

    async def update(self, manifest: Manifest) -> Manifest:
        """See `Kube`."""
        key = ObjectKey.of(manifest)
        self._enter(call := Call("update", key.kind, key.name))
        live = self.objects.get(key)
        if live is None:
            raise ClusterRefused(f"{key} is not there", code=404)
        if manifest["metadata"]["resourceVersion"] != live["metadata"]["resourceVersion"]:
            raise ClusterConflict(f"{key} was changed in between", code=409)
        result = self.put(manifest, FIELD_MANAGER)
        self.after(call)
        return result

    async def merge(self, key: ObjectKey, patch: Mapping[str, Any]) -> Manifest | None:
        """See `Kube`."""
        self._enter(call := Call("patch", key.kind, key.name))
        result = self.edit(key, patch, FIELD_MANAGER)
        self.after(call)
        return result

    async def patch_status(self, key: ObjectKey, status: Mapping[str, Any]) -> Manifest | None:
        """See `Kube`."""
        self._enter(call := Call("patch", f"{key.kind}/status", key.name))
        result = self.edit(key, {"status": status}, FIELD_MANAGER, subresource="status")
        self.after(call)
        return result

    async def delete(
        self, key: ObjectKey, *, uid: str, foreground: bool = False, grace_s: int | None = None
    ) -> None:
        """See `Kube`."""
        self._enter(call := Call("delete", key.kind, key.name))
        live = self.objects.get(key)
        if live is not None and live["metadata"]["uid"] == uid:
            self.remove(key, foreground=foreground)
        self.after(call)

    async def proxied(self, namespace: str, pod: str, port: int, path: str) -> Any:
        """See `Kube`."""
        self._enter(Call("get", "Pod/proxy", pod))
        if (pod, port, path) not in self.pods:
            raise ClusterBusy(f"pod {namespace}/{pod} does not answer", code=503)
        return ssa.cloned(self.pods[pod, port, path])

    def _enter(self, call: Call) -> None:
        self.before(call)
        self.calls.append(call)

    def _must_serve(self, key: ObjectKey) -> None:
        if not self.served.serves(f"{key.api_version}/{key.kind}"):
            raise ClusterRefused(f"no kind {key.api_version}/{key.kind} is served", code=404)

    def server_side_apply(self, manifest: Manifest, manager: str, *, force: bool) -> Manifest:
        """Apply as any manager; ClusterConflict where others own what would change."""
        key = ObjectKey.of(manifest)
        wanted = ssa.cloned(manifest)
        if key.kind in STATUS_KINDS:
            wanted.pop("status", None)
        live = self.objects.get(key)
        new = ssa.cloned(live) if live else {**_named(wanted), "metadata": _names(wanted)}
        applied = ssa.fields_of(_applied(wanted))
        entries = _entries(new)
        for entry in list(entries):
            if (entry["manager"], entry["operation"]) == (manager, "Apply"):
                entries.remove(entry)
                others = {path for e in entries for path in ssa.leaves(e["fieldsV1"])}
                for path in set(ssa.leaves(entry["fieldsV1"])) - set(ssa.leaves(applied)) - others:
                    ssa.removed(new, path)
                continue
            lost = ssa.conflicts(new, applied, wanted, entry["fieldsV1"])
            if lost and not force:
                raise ClusterConflict(f"{entry['manager']} owns {lost[0]} of {key}", code=409)
            entry["fieldsV1"] = ssa.from_paths(set(ssa.leaves(entry["fieldsV1"])) - set(lost))
        new = ssa.merged(new, {k: v for k, v in wanted.items() if k != "metadata"})
        new["metadata"] = ssa.merged(new["metadata"], wanted["metadata"])
        entries.append({"manager": manager, "operation": "Apply", "fieldsV1": applied})
        new["metadata"]["managedFields"] = [e for e in entries if e["fieldsV1"]]
        return self._store(key, new)

    def put(self, manifest: Manifest, manager: str) -> Manifest:
        """Create or replace, as a user or a controller does it."""
        key = ObjectKey.of(manifest)
        new = ssa.cloned(manifest)
        live = self.objects.get(key)
        if live is not None and key.kind in STATUS_KINDS and "status" in live:
            new["status"] = ssa.cloned(live["status"])
        entry = {
            "manager": manager,
            "operation": "Update",
            "fieldsV1": ssa.fields_of(_applied(new)),
        }
        new["metadata"]["managedFields"] = [entry]
        return self._store(key, new)

    def edit(
        self,
        key: ObjectKey,
        patch: Mapping[str, Any],
        manager: str = "kubectl",
        *,
        subresource: str = "",
    ) -> Manifest | None:
        """JSON merge patch as any manager, who then owns what it changed."""
        live = self.objects.get(key)
        if live is None:
            return None
        for field_name in ("uid", "resourceVersion"):
            wanted = patch.get("metadata", {}).get(field_name)
            if wanted is not None and wanted != live["metadata"][field_name]:
                raise ClusterConflict(f"precondition failed: {field_name} of {key}", code=409)
        allowed = {k: v for k, v in patch.items() if (k == "status") == (subresource == "status")}
        if key.kind not in STATUS_KINDS:
            allowed = dict(patch)
        new = _merge_patched(live, allowed)
        if new == live:
            return ssa.cloned(live)
        if not subresource:
            _pass_on(live, new, manager)
        stored = self._store(key, new)
        if "deletionTimestamp" in stored["metadata"] and not stored["metadata"].get("finalizers"):
            self._drop(key)
        return stored

    def remove(self, key: ObjectKey, *, foreground: bool = False) -> None:
        """Delete as a user does; with finalizers, or in the foreground, it only begins."""
        live = self.objects.get(key)
        if live is None:
            return
        new = ssa.cloned(live)
        if foreground and self._dependents(live["metadata"]["uid"]):
            finalizers = new["metadata"].setdefault("finalizers", [])
            if "foregroundDeletion" not in finalizers:
                finalizers.append("foregroundDeletion")
        elif "foregroundDeletion" in new["metadata"].get("finalizers", ()):
            new["metadata"]["finalizers"].remove("foregroundDeletion")  # asked for otherwise now
        if new["metadata"].get("finalizers"):
            new["metadata"].setdefault("deletionTimestamp", CREATED)
            self._store(key, new)
        else:
            self._drop(key)

    def collect_garbage(self) -> None:
        """Finish what foreground deletions wait for, and drop what has lost its owner."""
        while True:
            before = len(self.objects)
            uids = {obj["metadata"]["uid"] for obj in self.objects.values()}
            for key, obj in list(self.objects.items()):
                metadata = obj["metadata"]
                owners = metadata.get("ownerReferences", ())
                if owners and not any(owner["uid"] in uids for owner in owners):
                    self.remove(key)
                elif "foregroundDeletion" in metadata.get("finalizers", ()):
                    for dependent in self._dependents(metadata["uid"]):
                        self.remove(dependent)
                    rest = [f for f in metadata["finalizers"] if f != "foregroundDeletion"]
                    if not self._dependents(metadata["uid"]):
                        self.edit(key, {"metadata": {"finalizers": rest}}, "gc")
            if len(self.objects) == before:
                return

    def _dependents(self, uid: str) -> tuple[ObjectKey, ...]:
        return tuple(
            key
            for key, obj in self.objects.items()
            if any(owner["uid"] == uid for owner in obj["metadata"].get("ownerReferences", ()))
        )

    def _drop(self, key: ObjectKey) -> None:
        gone = self.objects.pop(key)
        gone["metadata"]["resourceVersion"] = self._next_version()
        self._tell("DELETED", gone)

    def _store(self, key: ObjectKey, new: Manifest) -> Manifest:
        new = ssa.sorted_by_name(new)
        if key.kind == "KimiDeployment":
            new = defaults.stored(new)
        live = self.objects.get(key)
        metadata = new["metadata"]
        metadata["uid"] = live["metadata"]["uid"] if live else f"uid-{self._next_version()}"
        metadata["creationTimestamp"] = live["metadata"]["creationTimestamp"] if live else CREATED
        metadata["generation"] = live["metadata"]["generation"] if live else 1
        metadata["resourceVersion"] = live["metadata"]["resourceVersion"] if live else ""
        if live is not None:
            if new == live:
                return ssa.cloned(live)
            metadata["generation"] += int(_desired(new) != _desired(live))
        metadata["resourceVersion"] = self._next_version()
        self.objects[key] = new
        self._tell("MODIFIED" if live else "ADDED", new)
        return ssa.cloned(new)

    def _tell(self, change: Literal["ADDED", "MODIFIED", "DELETED"], obj: Manifest) -> None:
        if self._watchers:
            told = ssa.cloned(obj)  # watchers share it: nobody may change what was told
            for watcher in self._watchers:
                watcher(change, told)


def _pass_on(live: Manifest, new: Manifest, manager: str) -> None:
    """Give what an update changed to its manager, and take it from all others."""
    changed = {
        path
        for path in ssa.leaves(ssa.fields_of(_applied(new)))
        if ssa.value_at(new, path) != ssa.value_at(live, path)
    }
    for entry in _entries(new):
        owned = set(ssa.leaves(entry["fieldsV1"])) - changed
        kept = {path for path in owned if ssa.value_at(new, path) is not ssa._MISSING}
        entry["fieldsV1"] = ssa.from_paths(kept)
    if changed:
        mine = {"manager": manager, "operation": "Update", "fieldsV1": ssa.from_paths(changed)}
        _entries(new).append(mine)
    new["metadata"]["managedFields"] = [e for e in _entries(new) if e["fieldsV1"]]


def _entries(obj: Manifest) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = obj["metadata"].setdefault("managedFields", [])
    return entries


def _named(manifest: Manifest) -> Manifest:
    return {name: manifest[name] for name in ("apiVersion", "kind")}


def _names(manifest: Manifest) -> Manifest:
    metadata = manifest["metadata"]
    return {name: metadata[name] for name in ("name", "namespace") if name in metadata}


SERVER_METADATA = {
    "creationTimestamp",
    "deletionTimestamp",
    "generation",
    "managedFields",
    "name",
    "namespace",
    "resourceVersion",
    "uid",
}


def _applied(manifest: Manifest) -> Manifest:
    metadata = {k: v for k, v in manifest["metadata"].items() if k not in SERVER_METADATA}
    body = {k: v for k, v in manifest.items() if k not in ("apiVersion", "kind", "metadata")}
    return {**body, "metadata": metadata} if metadata else body


def _desired(obj: Manifest) -> Manifest:
    return {k: v for k, v in obj.items() if k not in ("metadata", "status")}


def _merge_patched(live: Any, patch: Any) -> Any:
    if not isinstance(patch, Mapping):
        return ssa.cloned(patch)
    out = ssa.cloned(live) if isinstance(live, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            out.pop(name, None)
        else:
            out[name] = _merge_patched(out.get(name), value)
    return out


def _selected(labels: Mapping[str, str], selector: str) -> bool:
    for term in filter(None, selector.split(",")):
        name, equals, value = term.partition("=")
        if name not in labels or (equals and labels[name] != value):
            return False
    return True


@dataclass
class Faults:
    """Answers to give instead of serving, by the number of the write; each is given once."""

    by_write: dict[int, ClusterError]
    count: int = 0

    def __call__(self, call: Call) -> None:
        """As `FakeKube.before`."""
        if call.writes:
            self.count += 1
            if error := self.by_write.pop(self.count, None):
                raise error


def busy(code: int = 503, retry_after_s: float | None = None) -> ClusterBusy:
    """What an overloaded server answers."""
    return ClusterBusy(f"the API server answers {code}", code=code, retry_after_s=retry_after_s)


@dataclass
class KilledAfter:
    """End the process right after this many writes."""

    writes: int
    count: int = 0

    def __call__(self, call: Call) -> None:
        """As `FakeKube.after`."""
        self.count += int(call.writes)
        if call.writes and self.count == self.writes:
            raise Killed


@dataclass
class Snapshots:
    """What the server holds after each write: where a kill right after that write leaves it."""

    kube: FakeKube
    taken: list[FakeKube] = field(default_factory=list)

    def __call__(self, call: Call) -> None:
        """As `FakeKube.after`."""
        if call.writes:
            self.taken.append(self.kube.forked())


@dataclass
class Controllers:
    """The built-in controllers and kubelets: what is asked for soon is."""

    kube: FakeKube
    ready: bool = True
    node: str = "node-1"
    daemon_nodes: tuple[str, ...] = ()
    """Where DaemonSets have pods; none: only their status says that they do."""

    def settle(self) -> None:
        """Make pods of StatefulSets, DaemonSets and Deployments, and their status; collect."""
        self.kube.collect_garbage()
        for obj in self.kube.of_kind("StatefulSet"):
            if "deletionTimestamp" not in obj["metadata"]:
                self._stateful_set(obj)
        for obj in self.kube.of_kind("DaemonSet"):
            for number, node in enumerate(self.daemon_nodes, 1):
                self._pod(obj, node, node=node, address=f"10.0.1.{number}")
            count = len(self.daemon_nodes) or 1
            self._status(obj, desiredNumberScheduled=count, numberReady=count * self.ready)
        for obj in self.kube.of_kind("Deployment"):
            ready = obj["spec"]["replicas"] if self.ready else 0
            self._status(
                obj,
                replicas=obj["spec"]["replicas"],
                readyReplicas=ready,
                availableReplicas=ready,
                updatedReplicas=obj["spec"]["replicas"],
            )

    def _stateful_set(self, obj: Manifest) -> None:
        replicas = obj["spec"].get("replicas", 1)
        ready = replicas if self.ready else 0
        self._status(obj, replicas=replicas, readyReplicas=ready, currentReplicas=replicas)
        for ordinal in range(replicas):
            self._pod(obj, ordinal)

    def _pod(
        self,
        owner: Manifest,
        ordinal: int | str,
        *,
        node: str | None = None,
        address: str = "10.0.0.1",
    ) -> None:
        template = owner["spec"]["template"]
        name = f"{owner['metadata']['name']}-{ordinal}"
        namespace = owner["metadata"].get("namespace", "default")
        key = ObjectKey("v1", "Pod", namespace, name)
        if key not in self.kube.objects:
            reference = {
                "apiVersion": owner["apiVersion"],
                "kind": owner["kind"],
                "name": owner["metadata"]["name"],
                "uid": owner["metadata"]["uid"],
                "controller": True,
                "blockOwnerDeletion": True,
            }
            metadata = {
                **ssa.cloned(template.get("metadata", {})),
                "name": name,
                "namespace": namespace,
                "ownerReferences": [reference],
            }
            spec = {**ssa.cloned(template["spec"]), "nodeName": node or self.node}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
            self.kube.put(pod, "statefulset-controller")
        condition = {
            "type": "Ready",
            "status": "True" if self.ready else "False",
            "lastTransitionTime": CREATED,
        }
        phase = "Running" if self.ready else "Pending"
        status = {"phase": phase, "podIP": address, "conditions": [condition]}
        self.kube.edit(key, {"status": status}, "kubelet", subresource="status")

    def _status(self, obj: Manifest, **status: Any) -> None:
        status["observedGeneration"] = obj["metadata"]["generation"]
        self.kube.edit(ObjectKey.of(obj), {"status": status}, "controller", subresource="status")
