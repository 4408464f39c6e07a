"""Which cluster and namespace a command speaks to, as kubectl itself finds them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kubernetes.aio import config as k8s_config

from kimi_operator.clock import now_s
from kimi_operator.kube import ApiKube, Kube, TokenBucket, open_kube
from kimi_runtime.errors import ClusterError, ClusterRefused, ConfigError

MANAGER = "kubectl-kimi"
"""Owner of the fields these commands write; the operator's own are never taken over."""
IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")
T = TypeVar("T")


@dataclass(frozen=True)
class Access:
    """What the flags said; None: as the kubeconfig, or the pod, has it.

    `kubeconfig` may be several paths with colons between them, as in KUBECONFIG.
    """

    kubeconfig: str | None = None
    context: str | None = None
    namespace: str | None = None

    @property
    def files(self) -> str | None:
        """The kubeconfig to use; None in a pod without one. Raises ConfigError."""
        if self.kubeconfig:
            found = [p for p in self.kubeconfig.split(":") if p and Path(p).expanduser().is_file()]
            if not found:
                raise ConfigError(
                    f"there is no kubeconfig at {self.kubeconfig}; name one by --kubeconfig or "
                    "KUBECONFIG"
                )
            return ":".join(found)
        home = Path.home() / ".kube" / "config"
        if home.is_file():
            return str(home)
        if (IN_POD / "token").is_file():
            return None
        raise ConfigError(
            f"there is no cluster to talk to: no {home}, and this is no pod; name a kubeconfig by "
            "--kubeconfig or KUBECONFIG"
        )

    def where(self) -> str:
        """The namespace: the flag's, else the context's, else the pod's, else `default`."""
        if self.namespace:
            return self.namespace
        files = self.files
        if files is None:
            return (IN_POD / "namespace").read_text().strip() or "default"
        context = self._context(files)
        return str(context.get("namespace") or "default")

    def _context(self, files: str) -> dict[str, str]:
        try:
            contexts, current = k8s_config.list_kube_config_contexts(files)
        except (k8s_config.ConfigException, AttributeError, TypeError, ValueError) as exc:
            raise ConfigError(f"{files} is no usable kubeconfig: {exc}") from exc
        if self.context is None:
            found = current
        else:
            found = next((c for c in contexts if c["name"] == self.context), None)
        if found is None:
            names = ", ".join(sorted(c["name"] for c in contexts)) or "none"
            raise ConfigError(f"{files} has no context {self.context}; there are: {names}")
        inner: dict[str, str] = found.get("context") or {}
        return inner

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[ApiKube]:
        """A client for the cluster. Raises ConfigError where none is named."""
        files = self.files
        if files is not None:
            self._context(files)
        writes = TokenBucket(rate=20, burst=40, now_s=now_s, sleep=asyncio.sleep)
        async with open_kube(
            writes, kubeconfig=files, context=self.context, manager=MANAGER
        ) as kube:
            yield kube

    def run(self, command: Callable[[Kube, str], Awaitable[T]]) -> T:
        """Run one command against the cluster, in the namespace meant."""

        async def connected() -> T:
            namespace = self.where()
            async with self.opened() as kube:
                return await command(kube, namespace)

        try:
            return asyncio.run(connected())
        except ClusterRefused as exc:
            raise explained(exc) from exc


def explained(exc: ClusterRefused) -> ClusterError:
    """A refusal with what to do about it, where that is known."""
    if exc.code == 403:
        return ClusterRefused(f"{exc}; ask for that right, or use another --context", code=403)
    if exc.code == 401:
        return ClusterRefused(f"{exc}; log in again, or use another --context", code=401)
    return exc
