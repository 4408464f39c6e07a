"""`FakeKube` over HTTP, as much of the REST API as the operator and kopf speak.

Discovery, listings in pages, watches with bookmarks from any version, apply, merge and JSON
patches, optimistic replacement, deletion. Built-in controllers act after every write.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

import ssa
from fakekube import Controllers, FakeKube, _selected
from kimi_operator.cache import Change
from kimi_operator.kinds import BY_ID, INSTALLED, KINDS, Kind
from kimi_operator.observed import Manifest, ObjectKey
from kimi_runtime.errors import ClusterConflict, ClusterError, ClusterRefused
from served import served

BOOKMARK_S = 1.0
ALL_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


@dataclass
class HttpKube:
    """See the module. `history` has every change; `kept_from` is the oldest version to watch.

    `settles`: the built-in controllers act after every write.
    """

    kube: FakeKube
    settles: bool = True
    history: list[tuple[int, Change, Manifest]] = field(default_factory=list)
    kept_from: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.kube.subscribe(self._saw)
        self.controllers = Controllers(self.kube)
        self.by_plural = {
            (kind.api_version, kind.plural): kind
            for kind in (*KINDS, *INSTALLED)  # kopf waits for ever for namespaces and CRDs
            if self.kube.served.serves(kind.id) or kind.kind == "Lease" or kind in INSTALLED
        }

    def _saw(self, change: Change, manifest: Manifest) -> None:
        self.history.append((int(manifest["metadata"]["resourceVersion"]), change, manifest))
        self._changed.set()
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        """Its address while it answers."""
        async with served(self._answered) as address:
            yield address

    async def _answered(self, request: web.Request) -> web.StreamResponse:
        try:
            answer = await self._routed(request)
        except ClusterError as exc:
            return status(exc.code or 500, str(exc))
        if self.settles and request.method not in ("GET", "HEAD"):
            self.controllers.settle()
        return answer

    async def _routed(self, request: web.Request) -> web.StreamResponse:
        steps = request.path.strip("/").split("/")
        if steps[0] in ("version", "api", "apis", "openapi"):
            known = self._documents(request.path.rstrip("/"))
            if known is not None:
                return web.json_response(known)
        api_version, rest = (
            (steps[1], steps[2:]) if steps[0] == "api" else ("/".join(steps[1:3]), steps[3:])
        )
        namespace = ""
        if len(rest) > 2 and rest[0] == "namespaces":
            namespace, rest = rest[1], rest[2:]
        kind = self.by_plural.get((api_version, rest[0])) if rest else None
        if kind is None:
            return status(404, f"no {request.path}")
        if len(rest) == 1:
            return await self._collection(request, kind, namespace)
        key = ObjectKey(api_version, kind.kind, namespace, rest[1])
        return await self._object(request, key, rest[2] if len(rest) > 2 else "")

    def _documents(self, path: str) -> Any:
        groups: dict[str, list[str]] = {}
        for api_version, _ in self.by_plural:
            group, _, version = api_version.rpartition("/")
            groups.setdefault(group, [])
            if version not in groups[group]:
                groups[group].append(version)
        if path == "/version":
            major, minor = self.kube.served.version
            return {"major": str(major), "minor": str(minor)}
        if path == "/api":
            return {"versions": groups.get("", [])}
        if path == "/apis":
            listed = [
                {
                    "name": group,
                    "versions": [{"groupVersion": f"{group}/{v}", "version": v} for v in versions],
                    "preferredVersion": {"version": versions[0]},
                }
                for group, versions in groups.items()
                if group
            ]
            return {"groups": listed}
        if path == "/openapi/v2":
            return {"definitions": _schemas(self.kube.served.fields)}
        found = [k for (v, _), k in self.by_plural.items() if path in (f"/api/{v}", f"/apis/{v}")]
        return {"resources": [r for kind in found for r in _resources(kind)]} if found else None

    async def _collection(
        self, request: web.Request, kind: Kind, namespace: str
    ) -> web.StreamResponse:
        if request.method == "POST":
            manifest = {
                "apiVersion": kind.api_version,
                "kind": kind.kind,
                **await request.json(),
            }
            manifest["metadata"].setdefault("namespace", namespace)
            if ObjectKey.of(manifest) in self.kube.objects:
                raise ClusterConflict(f"{ObjectKey.of(manifest)} already exists", code=409)
            manager = request.query.get("fieldManager", "unknown")
            return web.json_response(self.kube.put(manifest, manager), status=201)
        labels = request.query.get("labelSelector", "")
        if request.query.get("watch"):
            return await self._watch(request, kind, namespace, labels)
        found = [
            obj
            for key, obj in sorted(self.kube.objects.items())
            if (key.api_version, key.kind) == (kind.api_version, kind.kind)
            and namespace in ("", key.namespace)
            and _selected(obj["metadata"].get("labels", {}), labels)
        ]
        begin = int(request.query.get("continue") or 0)
        end = begin + int(request.query.get("limit") or len(found) or 1)
        metadata = {"resourceVersion": str(self.kube.version)}
        if end < len(found):
            metadata["continue"] = str(end)
        bare = [{k: v for k, v in o.items() if k not in ("apiVersion", "kind")} for o in found]
        answer = {"kind": f"{kind.kind}List", "apiVersion": kind.api_version}
        return web.json_response({**answer, "metadata": metadata, "items": bare[begin:end]})

    async def _watch(
        self, request: web.Request, kind: Kind, namespace: str, labels: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        since = int(request.query.get("resourceVersion") or 0)
        if since < self.kept_from:
            gone = {"kind": "Status", "code": 410, "message": "too old resource version"}
            await _write(response, "ERROR", gone)
            return response
        with suppress(ConnectionError):
            await self._told(response, kind, namespace, labels, since)
        return response

    async def _told(
        self, response: web.StreamResponse, kind: Kind, namespace: str, labels: str, since: int
    ) -> None:
        """Tell what happens until the other end goes."""
        at = 0
        while True:
            changed = self._changed
            while at < len(self.history):
                version, change, obj = self.history[at]
                at += 1
                key = ObjectKey.of(obj)
                ours = (key.api_version, key.kind) == (kind.api_version, kind.kind)
                if not ours or version <= since or namespace not in ("", key.namespace):
                    continue
                if _selected(obj["metadata"].get("labels", {}), labels):
                    await _write(response, change, obj)
            try:
                async with asyncio.timeout(BOOKMARK_S):
                    await changed.wait()
            except TimeoutError:
                metadata = {"resourceVersion": str(self.kube.version)}
                told = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}
                await _write(response, "BOOKMARK", told)

    async def _object(self, request: web.Request, key: ObjectKey, sub: str) -> web.StreamResponse:
        live = self.kube.objects.get(key)
        manager = request.query.get("fieldManager", "unknown")
        media = request.content_type
        body = await request.json() if request.can_read_body else {}
        if request.method == "PATCH" and media == "application/apply-patch+yaml":
            forced = request.query.get("force", "").lower() == "true"
            return web.json_response(self.kube.server_side_apply(body, manager, force=forced))
        if live is None:
            return status(404, f"{key} not found")
        if request.method == "GET":
            return web.json_response(live)
        if request.method == "PUT":
            if body["metadata"].get("resourceVersion") != live["metadata"]["resourceVersion"]:
                raise ClusterConflict(f"{key}: the object has been modified", code=409)
            return web.json_response(self.kube.put(body, manager))
        if request.method == "DELETE":
            wanted = (body.get("preconditions") or {}).get("uid", live["metadata"]["uid"])
            if wanted != live["metadata"]["uid"]:
                raise ClusterConflict(f"{key}: the uid is another one", code=409)
            self.kube.remove(key, foreground=body.get("propagationPolicy") == "Foreground")
            return web.json_response({"kind": "Status", "status": "Success"})
        patch = _as_merge_patch(live, body) if media == "application/json-patch+json" else body
        patched = self.kube.edit(key, patch, manager, subresource=sub)
        return web.json_response(patched)


def status(code: int, message: str, **headers: str) -> web.Response:
    """A refusal as the API server words it."""
    body = {"kind": "Status", "status": "Failure", "code": code, "message": message}
    return web.json_response(body, status=code, headers=headers)


async def _write(response: web.StreamResponse, change: str, obj: Manifest) -> None:
    await response.write(json.dumps({"type": change, "object": obj}).encode() + b"\n")


def _as_merge_patch(live: Manifest, operations: list[dict[str, Any]]) -> Manifest:
    """What a JSON patch of fields and lists does, as a merge patch; 422 where a test fails."""
    new = ssa.cloned(live)
    for operation in operations:
        *steps, last = operation["path"].strip("/").split("/")
        steps = [step.replace("~1", "/").replace("~0", "~") for step in steps]
        last = last.replace("~1", "/").replace("~0", "~")
        at = new
        for step in steps:
            at = at[int(step)] if isinstance(at, list) else at.setdefault(step, {})
        index: Any = int(last) if isinstance(at, list) and last != "-" else last
        match operation["op"]:
            case "test":
                if at[index] != operation["value"]:
                    raise ClusterRefused("the test of the patch failed", code=422)
            case "add" if isinstance(at, list):
                at.insert(len(at) if last == "-" else index, operation["value"])
            case "add" | "replace":
                at[index] = operation["value"]
            case "remove":
                del at[index]
            case other:
                raise ClusterRefused(f"operation {other} is not known here", code=422)
    return _merge_patch(live, new)


def _merge_patch(old: Manifest, new: Manifest) -> Manifest:
    patch: Manifest = dict.fromkeys(old.keys() - new.keys())
    for name, value in new.items():
        before = old.get(name)
        if isinstance(before, dict) and isinstance(value, dict):
            below = _merge_patch(before, value)
            if below:
                patch[name] = below
        elif before != value:
            patch[name] = value
    return patch


def _resources(kind: Kind) -> list[dict[str, Any]]:
    one = {
        "name": kind.plural,
        "singularName": kind.kind.lower(),
        "kind": kind.kind,
        "namespaced": kind.namespaced,
        "verbs": ALL_VERBS,
    }
    below = {**one, "name": f"{kind.plural}/status"}
    return [one, below]


def _schemas(fields: frozenset[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in fields:
        kind, *steps = path.split(".")
        group = next((k.group for k in BY_ID.values() if k.kind == kind), "")
        schema = found.setdefault(
            kind, {"x-kubernetes-group-version-kind": [{"group": group, "kind": kind}]}
        )
        for step in steps:
            schema = schema.setdefault("properties", {}).setdefault(step, {})
    return found
