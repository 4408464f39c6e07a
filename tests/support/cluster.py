"""A real Kubernetes API for tests marked `cluster`.

KUBECONFIG names one that runs already; otherwise KIMISTACK_CLUSTER names the folder with the
`cluster` script that starts one and stops it at the end. With neither, tests skip, or fail where CI
is set.
"""

import fcntl
import json
import os
import ssl
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from kimi_operator.api.schema import crds

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
ESTABLISHED_S = 20


@dataclass(frozen=True)
class Server:
    """One API server, over plain REST."""

    kubeconfig: Path
    url: str
    token: str

    @classmethod
    def of(cls, kubeconfig: Path) -> "Server":
        """The server of a kubeconfig with a token."""
        config = yaml.safe_load(kubeconfig.read_text())
        url = config["clusters"][0]["cluster"]["server"]
        return cls(kubeconfig, url, config["users"][0]["user"]["token"])

    def open(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """The open answer; HTTPError for a refusal."""
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": kind},
        )
        context = ssl._create_unverified_context()
        return urllib.request.urlopen(request, context=context, timeout=30)

    def call(
        self, method: str, path: str, body: Any = None, kind: str = "application/json"
    ) -> tuple[int, dict[str, Any]]:
        """Status and answer."""
        try:
            with self.open(method, path, body, kind) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, json.load(refused)

    def install_crds(self) -> None:
        """Create or update our CRDs, and wait until they are served.

        Not by server-side apply: 1.20 refuses fields it lacks there, and drops them here.
        """
        for text in crds().values():
            crd = yaml.safe_load(text)
            name = crd["metadata"]["name"]
            status, answer = self.call("POST", CRDS, crd)
            if status == 409:
                status, answer = self.call("PATCH", f"{CRDS}/{name}", crd, MERGE)
            assert status in (200, 201), answer
            watch = (
                f"watch=true&timeoutSeconds={ESTABLISHED_S}&fieldSelector=metadata.name%3D{name}"
            )
            with self.open("GET", f"{CRDS}?{watch}") as events:
                assert any(map(_established, events)), f"the API server did not take {name}"


def _established(line: bytes) -> bool:
    conditions = json.loads(line)["object"].get("status", {}).get("conditions") or []
    return any((c["type"], c["status"]) == ("Established", "True") for c in conditions)


@dataclass(frozen=True)
class Cluster:
    """A control plane, and how to start its CRD server."""

    main: Server
    script: Path | None
    env: dict[str, str]

    def crd_server(self) -> Server:
        """The CRD handling of a current Kubernetes: CEL, defaulting, pruning."""
        if self.script is None:
            pytest.skip("a cluster given by KUBECONFIG has no CRD server of its own")
        started = subprocess.run(
            [self.script, "crd-server"],
            env=self.env,
            check=True,
            capture_output=True,
            timeout=90,
            text=True,
        )
        return Server.of(Path(started.stdout.strip().splitlines()[-1]))


def start_cluster(folder: Path) -> Iterator[Cluster]:
    """The cluster of this test session; a generator, as a fixture is."""
    script = Path(os.environ.get("KIMISTACK_CLUSTER", "/nonexistent")) / "cluster"
    given = os.environ.get("KUBECONFIG")
    if given and Path(given).is_file():
        yield Cluster(
            Server.of(Path(given)), script if script.is_file() else None, dict(os.environ)
        )
        return
    if not script.is_file():
        missing = "no cluster: KUBECONFIG and KIMISTACK_CLUSTER name none"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    env = {**os.environ, "KIMI_CLUSTER_DIR": str(folder)}
    with the_only_cluster(), _up(script, folder, env) as cluster:
        yield cluster


@contextmanager
def the_only_cluster() -> Iterator[None]:
    """Wait for the machine's turn: one that stops takes down the network of every other one."""
    with (Path(tempfile.gettempdir()) / "kimistack-cluster.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _up(script: Path, folder: Path, env: dict[str, str]) -> Iterator[Cluster]:
    try:
        subprocess.run([script, "up"], env=env, check=True, capture_output=True, timeout=180)
        yield Cluster(Server.of(folder / "kubeconfig"), script, env)
    finally:
        subprocess.run([script, "down"], env=env, capture_output=True, timeout=60)
