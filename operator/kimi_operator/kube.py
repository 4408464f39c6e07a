"""The Kubernetes API as the operator uses it: a handful of calls, and the only I/O of a pass.

`Kube` is the face; `ApiKube` speaks to a server, `FakeKube` of the tests keeps objects in memory.
Library errors become `ClusterBusy`, `ClusterConflict` or `ClusterRefused` here and nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    MutableSequence,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
from kubernetes.aio import client as k8s
from kubernetes.aio import config as k8s_config
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic import DynamicClient
from kubernetes.aio.dynamic.resource import Resource

from kimi_operator.cache import Change
from kimi_operator.changes import FIELD_MANAGER
from kimi_operator.clock import now_s
from kimi_operator.discovery import fields_in, served_kinds, server_version
from kimi_operator.kinds import BY_ID, KINDS, Kind
from kimi_operator.observed import FIELDS, Capabilities, Manifest, ObjectKey
from kimi_operator.sockets import ended_sockets
from kimi_operator.wire import Tenure, Watches, session_options
from kimi_runtime.errors import ClusterBusy, ClusterConflict, ClusterError, ClusterRefused

SEED_MANAGER = "kimi-operator-seed"
"""Owner of what is written once, at creation, and then belongs to others (a replica count)."""
REQUEST_S = 30.0
CONNECT_S = 5.0
LEAST_S = 1.0
PAGE = 500
WATCH_S = 300
SILENT_S = 75.0
MOST_RETRY_AFTER_S = 300.0


class Kube(Protocol):
    """The API server. Every call raises ClusterError; a missing object is a value, no error."""

    async def capabilities(self) -> Capabilities:
        """What the server serves, asked anew."""

    async def get(self, key: ObjectKey) -> Manifest | None:
        """The object."""

    async def list(self, kind: str, namespace: str | None, labels: str = "") -> list[Manifest]:
        """Objects of a kind (`apps/v1/StatefulSet`) that match a label selector; None: anywhere."""

    async def apply(self, manifest: Manifest) -> Manifest:
        """Server-side apply, taking over what others changed of ours; the object after it."""

    async def create(self, manifest: Manifest) -> Manifest | None:
        """POST the object; None if that name is taken already."""

    async def update(self, manifest: Manifest) -> Manifest:
        """PUT the object; ClusterConflict unless its resourceVersion is the newest."""

    async def merge(self, key: ObjectKey, patch: Mapping[str, Any]) -> Manifest | None:
        """JSON merge patch of the object; None if it is gone."""

    async def patch_status(self, key: ObjectKey, status: Mapping[str, Any]) -> Manifest | None:
        """JSON merge patch of its status; None if it is gone."""

    async def delete(
        self, key: ObjectKey, *, uid: str, foreground: bool = False, grace_s: int | None = None
    ) -> None:
        """Ask for the deletion of the object with this uid; one that is gone is no error."""

    async def proxied(self, namespace: str, pod: str, port: int, path: str) -> Any:
        """The JSON that a pod answers to a GET, by way of the API server."""


@dataclass
class TokenBucket:
    """At most `burst` at once and `rate` a second over time. Waiting is the caller's `sleep`."""

    rate: float
    burst: float
    now_s: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    _tokens: float = field(init=False)
    _at_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._tokens, self._at_s = self.burst, self.now_s()

    async def take(self) -> None:
        """Take one token, waiting for it to be there. Waiters are served in their order."""
        now = self.now_s()
        self._tokens = min(self.burst, self._tokens + (now - self._at_s) * self.rate) - 1
        self._at_s = now
        if self._tokens < 0:
            await self.sleep(-self._tokens / self.rate)


@dataclass(frozen=True)
class Credentials:
    """How to reach the API server; files by path."""

    server: str
    token: str | None
    ca_path: str | None
    insecure: bool
    certificate_path: str | None
    private_key_path: str | None


class ApiKube:
    """A real API server, through the dynamic client of `kubernetes.aio`.

    `manager` owns the fields that are written, but for the seeds. It writes while `tenure` lasts.
    """

    def __init__(
        self,
        client: DynamicClient,
        writes: TokenBucket,
        tenure: Tenure,
        manager: str = FIELD_MANAGER,
    ) -> None:
        self._client, self._writes, self._manager = client, writes, manager
        self._tenure = tenure

    async def credentials(self) -> Credentials:
        """As they are now: a token is refreshed where that is due."""
        configuration = self._client.configuration
        # in a pod the library writes the scheme in lower case
        header = await configuration.get_api_key_with_prefix("BearerToken")
        return Credentials(
            server=configuration.host,
            token=header.rpartition(" ")[2] if header else None,
            ca_path=configuration.ssl_ca_cert,
            insecure=not configuration.verify_ssl,
            certificate_path=configuration.cert_file,
            private_key_path=configuration.key_file,
        )

    async def capabilities(self) -> Capabilities:
        """See `Kube`. Fields come from the server's OpenAPI document, asked for group by group."""
        version = server_version(await self._read("/version"))
        groups = sorted({kind.api_version for kind in KINDS})
        served: set[str] = set()
        fields: set[str] = set()
        for group in groups:
            path = f"/api/{group}" if "/" not in group else f"/apis/{group}"
            resources = await self._read(path, absent={})
            served |= served_kinds(group, resources)
        document = await self._read("/openapi/v3/apis/apps/v1", absent=None)
        if document is not None:
            for group in ("api/v1", "apis/policy/v1"):
                other = await self._read(f"/openapi/v3/{group}", absent={})
                fields |= fields_in(other, FIELDS)
        else:
            document = await self._read("/openapi/v2", absent={})
        return Capabilities(
            version, frozenset(served), frozenset(fields | fields_in(document, FIELDS))
        )

    async def get(self, key: ObjectKey) -> Manifest | None:
        """See `Kube`."""
        resource = self._resource(f"{key.api_version}/{key.kind}")
        call = self._client.get(resource, name=key.name, namespace=key.namespace or None, **_PLAIN)
        found: Manifest | None = await _or_none(call)
        return found

    async def list(self, kind: str, namespace: str | None, labels: str = "") -> list[Manifest]:
        """See `Kube`."""
        found, _ = await self.listing(kind, namespace, labels)
        return [*found]

    async def listing(
        self, kind: str, namespace: str | None, labels: str = ""
    ) -> tuple[Sequence[Manifest], str]:
        """See `reflect.Source`. Asked for in pages; at once where the pages ran out of date."""
        try:
            return await self._pages(kind, namespace, labels, PAGE)
        except ClusterError as exc:
            if exc.code != 410:
                raise
            return await self._pages(kind, namespace, labels, None)

    async def _pages(
        self, kind: str, namespace: str | None, labels: str, limit: int | None
    ) -> tuple[Sequence[Manifest], str]:
        resource = self._resource(kind)
        api_version, _, name = kind.rpartition("/")
        query: dict[str, Any] = {"limit": limit} if limit else {}
        found: MutableSequence[Manifest] = []
        while True:
            call = self._client.get(
                resource, namespace=namespace, label_selector=labels or None, **query, **_PLAIN
            )
            answer = await _answer(call)
            found += [{"apiVersion": api_version, "kind": name, **i} for i in answer["items"] or ()]
            metadata = answer["metadata"]
            if not metadata.get("continue"):
                return found, str(metadata.get("resourceVersion", ""))
            query["_continue"] = metadata["continue"]

    async def watch(
        self, kind: str, namespace: str | None, labels: str, version: str
    ) -> AsyncGenerator[tuple[Change | None, Manifest]]:
        """See `reflect.Source`. Servers send a bookmark a minute; without one it is asked anew."""
        asked = {"allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S)}
        query = [("watch", "true"), *asked.items(), ("resourceVersion", version)]
        timeout = aiohttp.ClientTimeout(
            total=WATCH_S + REQUEST_S, sock_connect=CONNECT_S, sock_read=SILENT_S
        )
        call = self._client.request(
            "get",
            str(self._resource(kind).path(namespace=namespace)),
            query_params=[*query, *([("labelSelector", labels)] if labels else [])],
            serialize=False,
            _request_timeout=timeout,
        )
        try:
            response = await _answer(call)
        except ClusterBusy as exc:
            if isinstance(exc.__cause__, TimeoutError):
                return
            raise
        async with response:
            async for line in _lines(response):
                if (event := _event(line)) is not None:
                    yield event

    async def apply(self, manifest: Manifest) -> Manifest:
        """See `Kube`."""
        await self._writes.take()
        applied: Manifest = await _answer(
            self._client.server_side_apply(
                self._resource_of(manifest),
                body=manifest,
                field_manager=self._manager,
                force_conflicts=True,
                **self._writing(),
            )
        )
        return applied

    async def create(self, manifest: Manifest) -> Manifest | None:
        """See `Kube`."""
        await self._writes.take()
        call = self._client.create(
            self._resource_of(manifest),
            body=manifest,
            field_manager=SEED_MANAGER,
            **self._writing(),
        )
        try:
            created: Manifest = await _answer(call)
        except ClusterConflict:
            return None
        return created

    async def update(self, manifest: Manifest) -> Manifest:
        """See `Kube`."""
        call = self._client.replace(
            self._resource_of(manifest),
            body=manifest,
            field_manager=self._manager,
            **self._writing(),
        )
        updated: Manifest = await _answer(call)
        return updated

    async def merge(self, key: ObjectKey, patch: Mapping[str, Any]) -> Manifest | None:
        """See `Kube`."""
        return await self._merge(self._path(key), patch)

    async def patch_status(self, key: ObjectKey, status: Mapping[str, Any]) -> Manifest | None:
        """See `Kube`."""
        return await self._merge(f"{self._path(key)}/status", {"status": status})

    def _path(self, key: ObjectKey) -> str:
        resource = self._resource(f"{key.api_version}/{key.kind}")
        return str(resource.path(name=key.name, namespace=key.namespace or None))

    async def _merge(self, path: str, patch: Mapping[str, Any]) -> Manifest | None:
        await self._writes.take()
        call = self._client.request(
            "patch",
            path,
            body=dict(patch),
            content_type="application/merge-patch+json",
            field_manager=self._manager,
            **self._writing(),
        )
        patched: Manifest | None = await _or_none(call)
        return patched

    async def delete(
        self, key: ObjectKey, *, uid: str, foreground: bool = False, grace_s: int | None = None
    ) -> None:
        """See `Kube`."""
        await self._writes.take()
        options: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Foreground" if foreground else "Background",
        }
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        call = self._client.delete(
            self._resource(f"{key.api_version}/{key.kind}"),
            name=key.name,
            namespace=key.namespace or None,
            body=options,
            **self._writing(),
        )
        try:
            await _or_none(call)
        except ClusterConflict:
            return  # another object has the name by now: ours is gone

    async def proxied(self, namespace: str, pod: str, port: int, path: str) -> Any:
        """See `Kube`. An answer that is no JSON raises ClusterRefused."""
        at = f"/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy/{path.lstrip('/')}"
        try:
            return await _answer(self._text(at))
        except ValueError as exc:
            raise ClusterRefused(f"pod {pod} answers {path} with something else than JSON") from exc

    async def _read(self, path: str, **absent: Any) -> Any:
        call = self._text(path)
        found = await _or_none(call) if "absent" in absent else await _answer(call)
        return absent.get("absent") if found is None else found

    async def _text(self, path: str) -> Any:
        """JSON whatever it is declared to be: 1.20 serves its OpenAPI document as plain text."""
        response = await self._client.request(
            "get", path, serialize=False, _request_timeout=_PLAIN["_request_timeout"]
        )
        return json.loads(await response.read())

    def _writing(self) -> dict[str, Any]:
        """As `_PLAIN`; a write is given up before another operator can lead."""
        within_s = min(REQUEST_S, max(self._tenure.remaining_s, 0.0) + self._tenure.late_s)
        within_s = max(within_s, LEAST_S)
        timeout = aiohttp.ClientTimeout(total=within_s, connect=min(CONNECT_S, within_s))
        return {**_PLAIN, "_request_timeout": timeout}

    def _resource_of(self, manifest: Manifest) -> Resource:
        return self._resource(f"{manifest['apiVersion']}/{manifest['kind']}")

    def _resource(self, kind_id: str) -> Resource:
        kind: Kind = BY_ID[kind_id]
        return Resource(
            prefix="apis" if kind.group else "api",
            group=kind.group,
            api_version=kind.api_version.rpartition("/")[2],
            kind=kind.kind,
            namespaced=kind.namespaced,
            name=kind.plural,
            client=self._client,
        )


_PLAIN: dict[str, Any] = {
    "serializer": lambda _, data: data,
    "_request_timeout": aiohttp.ClientTimeout(total=REQUEST_S, connect=CONNECT_S),
}


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Lines of any length, until the server ends them, breaks off, or says nothing for long."""
    rest = b""
    try:
        async for piece in response.content.iter_chunked(2**20):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield line
    except (aiohttp.ClientError, TimeoutError, OSError):
        return  # what came before stands, and the next watch goes on from there


_CHANGES: dict[str, Change | None] = {
    "ADDED": "ADDED",
    "MODIFIED": "MODIFIED",
    "DELETED": "DELETED",
    "BOOKMARK": None,
}


def _event(line: bytes) -> tuple[Change | None, Manifest] | None:
    """One line of a watch; None for an empty one or one of a type we do not know."""
    if not line.strip():
        return None
    try:
        event = json.loads(line)
    except ValueError as exc:
        raise ClusterBusy("a watch was cut off in the middle of a line") from exc
    if event["type"] == "ERROR":
        status = event["object"]
        message = f"a watch ends: {status.get('message', '')}"
        raise ClusterBusy(message, code=int(status.get("code") or 0))
    if event["type"] not in _CHANGES:
        return None
    return _CHANGES[event["type"]], event["object"]


async def _or_none(call: Awaitable[Any]) -> Any:
    try:
        return await _answer(call)
    except ClusterError as exc:
        if exc.code == 404:
            return None
        raise


async def _answer(call: Awaitable[Any]) -> Any:
    """The answer of a call, its errors mapped."""
    try:
        return await call
    except ApiException as exc:
        raise _mapped(exc) from exc
    except (aiohttp.ClientError, TimeoutError, OSError) as exc:
        what = str(exc) or type(exc).__name__
        raise ClusterBusy(f"the API server cannot be reached: {what}") from exc


def _mapped(exc: ApiException) -> ClusterError:
    code = int(exc.status or 0)
    message = f"the API server answers {code}: {_message(exc)}"
    if code == 409:
        return ClusterConflict(message, code=code)
    unknown_field = code == 500 and "failed to create typed patch object" in message
    if not unknown_field and (code in (0, 408, 410, 429) or code >= 500):
        return ClusterBusy(message, code=code, retry_after_s=_retry_after_s(exc))
    return ClusterRefused(message, code=code)


def _message(exc: ApiException) -> str:
    try:
        text = json.loads(exc.body or "")["message"]
    except (ValueError, KeyError, TypeError):
        text = exc.reason or ""
    return " ".join(str(text).split())[:1000]


def _retry_after_s(exc: ApiException) -> float | None:
    value = (exc.headers or {}).get("Retry-After")
    try:
        seconds = float(value) if value else 0.0
    except ValueError:
        return None  # a date: the caller's own backoff does
    return min(seconds, MOST_RETRY_AFTER_S) if seconds > 0 else None


@asynccontextmanager
async def open_kube(
    writes: TokenBucket,
    *,
    kubeconfig: str | None = None,
    context: str | None = None,
    manager: str = FIELD_MANAGER,
    tenure: Tenure | None = None,
    watches: Watches | None = None,
) -> AsyncIterator[ApiKube]:
    """A client for the pod's own cluster, or for the one a kubeconfig file names.

    `context` is one of that file's, without it its current one. It writes while `tenure` lasts,
    without one for ever, and reports to `watches`.

    Raises ClusterBusy if neither is there.
    """
    tenure = tenure or Tenure(now_s)
    configuration = k8s.Configuration()
    try:
        if kubeconfig is None:
            k8s_config.load_incluster_config(client_configuration=configuration)
        else:
            await k8s_config.load_kube_config(
                config_file=kubeconfig, context=context, client_configuration=configuration
            )
    except k8s_config.ConfigException as exc:
        raise ClusterBusy(
            f"there is no cluster to talk to: {exc}; set KUBECONFIG or run in a pod"
        ) from exc
    configuration.retries = False  # whether to try again is decided by the caller
    async with (
        ended_sockets() as socket_factory,
        k8s.ApiClient(configuration) as api,
        aiohttp.TCPConnector(
            limit=0,  # a watch keeps its connection
            ssl=api.rest_client.ssl_context,
            socket_factory=socket_factory,
        ) as connector,
    ):
        configuration.client_session_kwargs = {
            "connector": connector,
            **session_options(tenure, watches or Watches(now_s)),
        }
        # without discovery of its own: it would cache in a file that all users can write
        yield ApiKube(DynamicClient(api), writes, tenure, manager)
