"""Put the operator into a cluster, or take it out: `kimistack install` and `uninstall`.

Both end at the first refusal with one line that says of which object; to run them again goes on.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from kimi_operator.api.base import API_VERSION
from kimi_operator.clock import now_s
from kimi_operator.desired.install import Install, install_objects
from kimi_operator.kube import ApiKube, Kube, TokenBucket, open_kube
from kimi_operator.observed import Manifest, ObjectKey
from kimi_runtime.errors import ClusterBusy, ClusterError, ClusterRefused, ConfigError

ESTABLISHED_WITHIN_S = 30.0
POLL_S = 0.2
TRIES, BACKOFF_S = 5, 1.0
IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
Tell = Callable[[str], None]


def kubeconfig_path(given: Path | None) -> str | None:
    """The kubeconfig file to use: the given one, else None in a pod, else ~/.kube/config."""
    if given is None and IN_POD.exists():
        return None
    path = given or Path.home() / ".kube" / "config"
    if not path.is_file():
        raise ConfigError(f"{path} is no file; name a kubeconfig by --kubeconfig")
    return str(path)


@asynccontextmanager
async def cluster(kubeconfig: str | None) -> AsyncIterator[ApiKube]:
    """The cluster that a kubeconfig file names, or the pod's own."""
    writes = TokenBucket(rate=20, burst=40, now_s=now_s, sleep=asyncio.sleep)
    async with open_kube(writes, kubeconfig=kubeconfig) as kube:
        yield kube


async def put(kube: Kube, objects: Sequence[Manifest], tell: Tell) -> None:
    """Apply objects in their order; after CRDs, wait until they are served."""
    for manifest in objects:
        await _patiently(kube, manifest)
        tell(f"{_title(manifest)} applied")
    for manifest in objects:
        if manifest["kind"] == "CustomResourceDefinition":
            await _served(kube, manifest)


async def take_out(kube: Kube, install: Install, tell: Tell) -> None:
    """Delete what `put` wrote but for CRDs and namespace, the last first."""
    await check_unused(kube, install)
    for manifest in reversed(install_objects(install)):
        key = ObjectKey.of(manifest)
        found = await kube.get(key)
        if found is not None:
            await kube.delete(key, uid=found["metadata"]["uid"])
            tell(f"{_title(manifest)} deleted")


async def check_unused(kube: Kube, install: Install) -> None:
    """Raise ConfigError while there are KimiDeployments that only the operator can end."""
    where = [None] if install.scope == "Cluster" else list(install.watched)
    left: list[str] = []
    for namespace in where:
        try:
            found = await kube.list(f"{API_VERSION}/KimiDeployment", namespace)
        except ClusterError as exc:
            if exc.code != 404:  # there is no such kind, so there are none
                raise
            found = []
        left += [f"{item['metadata']['namespace']}/{item['metadata']['name']}" for item in found]
    if left:
        some = ", ".join(sorted(left)[:10])
        namespaces = sorted({one.partition("/")[0] for one in left})
        where_to = f"-n {namespaces[0]}" if len(namespaces) == 1 else "-n NAMESPACE"
        raise ConfigError(
            f"{len(left)} KimiDeployments are still there ({some}) and end only with the operator "
            f"running; delete them first: kubectl {where_to} delete kimideployments --all"
        )


async def _patiently(kube: Kube, manifest: Manifest) -> None:
    """Apply, again while the server is busy."""
    for attempt in range(1, TRIES + 1):
        try:
            await _write(kube, manifest)
        except ClusterBusy as exc:
            if attempt == TRIES:
                raise
            await asyncio.sleep(exc.retry_after_s or BACKOFF_S * attempt)
        except ClusterError as exc:
            raise type(exc)(f"{_title(manifest)}: {exc}", code=exc.code) from exc
        else:
            return


async def _write(kube: Kube, manifest: Manifest) -> None:
    """Server-side apply; of a CRD that the server only partly understands, create or merge.

    A server without CEL answers 500 to an apply with rules, and otherwise drops them.
    """
    try:
        await kube.apply(manifest)
    except ClusterRefused as exc:
        if manifest["kind"] != "CustomResourceDefinition" or exc.code != 500:
            raise
        if await kube.create(manifest) is None:
            await kube.merge(ObjectKey.of(manifest), manifest)


async def _served(kube: Kube, crd: Manifest) -> None:
    deadline_s = now_s() + ESTABLISHED_WITHIN_S
    while now_s() < deadline_s:
        if _established(await kube.get(ObjectKey.of(crd))):
            return
        await asyncio.sleep(POLL_S)
    raise ClusterBusy(
        f"{_title(crd)} is stored but not served after {ESTABLISHED_WITHIN_S:.0f} s; its "
        "conditions say why"
    )


def _established(crd: Manifest | None) -> bool:
    conditions = ((crd or {}).get("status") or {}).get("conditions") or ()
    return any((c["type"], c["status"]) == ("Established", "True") for c in conditions)


def _title(manifest: Manifest) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"
