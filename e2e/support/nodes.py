"""Two real nodes for the end-to-end tests: started, loaded with images, watched and stopped.

KIMISTACK_CLUSTER names the folder with the `cluster` script. KIMI_E2E_KEEP=1 leaves the cluster up,
so that the next run starts on it.
"""

import http.client
import json
import os
import subprocess
import sys
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cluster import APPLY, MERGE, Server, the_only_cluster
from kimi_operator.kinds import BY_ID
from kimi_operator.observed import ObjectKey

ROOT = Path(__file__).resolve().parents[2]
NODES = ("node-1", "node-2")
GPUS = 8
GPU_LABELS = {"feature.node.kubernetes.io/amd-gpu": "true"}
"""As Node Feature Discovery labels nodes with GPUs; where they are, the pool is."""
Manifest = dict[str, Any]


class TookTooLong(AssertionError):
    """What was waited for did not come; says what was there instead."""


@dataclass
class Nodes:
    """The cluster. `run` holds process ids by name, one file each."""

    script: Path
    folder: Path
    server: Server
    timings: dict[str, float] = field(default_factory=dict)

    def command(self, *arguments: str, within_s: float = 600) -> str:
        """Run the cluster script."""
        env = {**os.environ, "KIMI_CLUSTER_DIR": str(self.folder)}
        done = subprocess.run(
            [self.script, *arguments], env=env, capture_output=True, text=True, timeout=within_s
        )
        if done.returncode:
            raise AssertionError(f"cluster {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Note how long something took."""
        began = time.monotonic()
        yield
        self.timings[what] = round(time.monotonic() - began, 1)

    def load(self, image: str, archive: str) -> None:
        """Import an image on every node that lacks it."""
        for node in NODES:
            socket = self.folder / node / "containerd.sock"
            ctr = ["ctr", "-a", str(socket), "-n", "k8s.io", "images"]
            have = subprocess.run([*ctr, "ls", "-q"], capture_output=True, text=True, check=True)
            if image not in have.stdout.split():
                subprocess.run(
                    [*ctr, "import", archive], capture_output=True, check=True, timeout=600
                )

    def pids(self, name: str) -> list[int]:
        """Process ids of a part of a node or of the control plane, e.g. `kubelet-2`."""
        file = self.folder / "run" / f"{name}.pid"
        return [int(file.read_text())] if file.exists() else []

    def get(self, key: ObjectKey) -> Manifest | None:
        """The object, or None."""
        status, found = self.server.call("GET", self.path(key))
        if status == 404:
            return None
        assert status == 200, found
        return found

    def list(self, kind: str, namespace: str, labels: str = "") -> list[Manifest]:
        """Objects of a kind (`apps/v1/StatefulSet`); none if the kind is not served."""
        api_version, _, name = kind.rpartition("/")
        path = self.path(ObjectKey(api_version, name, namespace, ""))
        try:
            with self.server.open("GET", f"{path}?labelSelector={labels}") as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as refused:
            with refused:
                if refused.code == 404:  # of a group that is not served: a page of plain text
                    return []
                raise
        return [{"apiVersion": api_version, "kind": name, **item} for item in found["items"]]

    def apply(self, manifest: Manifest) -> Manifest:
        """Server-side apply, as `kubectl apply --server-side` does."""
        path = self.path(ObjectKey.of(manifest))
        status, answer = self.server.call(
            "PATCH", f"{path}?fieldManager=e2e&force=true", manifest, APPLY
        )
        assert status in (200, 201), answer
        return answer

    def merge(self, key: ObjectKey, patch: Manifest, subresource: str = "") -> Manifest:
        """JSON merge patch."""
        status, answer = self.server.call("PATCH", self.path(key) + subresource, patch, MERGE)
        assert status == 200, answer
        return answer

    def delete(self, key: ObjectKey) -> None:
        """Ask for a deletion, as `kubectl delete --wait=false` does."""
        status, answer = self.server.call("DELETE", self.path(key))
        assert status in (200, 202, 404), answer

    def until(
        self,
        key: ObjectKey,
        holds: Callable[[Manifest | None], bool],
        within_s: float,
        what: str,
    ) -> Manifest | None:
        """The object once `holds` is true of it (None: it is gone), by watching it."""
        deadline = time.monotonic() + within_s
        seen: Manifest | None = None
        while (left := deadline - time.monotonic()) > 0:
            seen = self.get(key)
            if holds(seen):
                return seen
            for changed in self._changes(key, seen, left):
                seen = changed
                if holds(seen):
                    return seen
        raise TookTooLong(f"{key} after {within_s:.0f} s: not {what}, but {_summary(seen)}")

    def _changes(
        self, key: ObjectKey, seen: Manifest | None, within_s: float
    ) -> Iterator[Manifest | None]:
        """What becomes of one object, until the server ends the watch."""
        collection = self.path(ObjectKey(key.api_version, key.kind, key.namespace, ""))
        version = f"&resourceVersion={seen['metadata']['resourceVersion']}" if seen else ""
        query = (
            f"?watch=true&timeoutSeconds={max(1, int(min(within_s, 20)))}"
            f"&fieldSelector=metadata.name%3D{key.name}{version}"
        )
        with (
            suppress(urllib.error.URLError, TimeoutError, http.client.HTTPException),
            self.server.open("GET", collection + query) as events,
        ):
            for line in events:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                yield None if event["type"] == "DELETED" else event["object"]

    def path(self, key: ObjectKey) -> str:
        """Of an object, or with an empty name of its collection."""
        kind = BY_ID[f"{key.api_version}/{key.kind}"]
        base = f"/apis/{key.api_version}" if kind.group else f"/api/{key.api_version}"
        inside = f"/namespaces/{key.namespace}" if kind.namespaced else ""
        name = f"/{key.name}" if key.name else ""
        return f"{base}{inside}/{kind.plural}{name}"


def _summary(obj: Manifest | None) -> str:
    if obj is None:
        return "not there"
    conditions = obj.get("status", {}).get("conditions")
    if conditions is None:
        return json.dumps(obj.get("status", {}))[:2000]
    return "; ".join(
        f"{c['type']}={c['status']} {c.get('reason', '')}: {c.get('message', '')}"
        for c in conditions
    )[:4000]


def images() -> dict[str, Manifest]:
    """Both images, built unless they are there already: name -> what images/build says of it."""
    done = subprocess.run(
        ["nice", sys.executable, ROOT / "images" / "build"],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    if done.returncode:
        raise AssertionError(f"images/build: {done.stderr[-4000:]}")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {str(line["name"]): line for line in lines}


@contextmanager
def two_nodes(folder: Path) -> Iterator[Nodes]:
    """The cluster with its GPUs advertised; stopped at the end unless it is to be kept."""
    script = Path(os.environ["KIMISTACK_CLUSTER"]) / "cluster"
    env = {**os.environ, "KIMI_CLUSTER_DIR": str(folder)}
    with the_only_cluster(), _started(script, folder, env) as nodes:
        yield nodes


@contextmanager
def _started(script: Path, folder: Path, env: dict[str, str]) -> Iterator[Nodes]:
    began = time.monotonic()
    try:
        up = [script, "up", "--nodes", str(len(NODES))]
        done = subprocess.run(up, env=env, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise AssertionError(f"cluster up: {done.stdout}{done.stderr}")
        nodes = Nodes(script, folder, Server.of(folder / "kubeconfig"))
        nodes.timings["cluster up"] = round(time.monotonic() - began, 1)
        for node in NODES:
            nodes.command("gpus", node, str(GPUS))
            nodes.merge(ObjectKey("v1", "Node", "", node), {"metadata": {"labels": GPU_LABELS}})
        yield nodes
    finally:
        if not os.environ.get("KIMI_E2E_KEEP"):
            subprocess.run([script, "down"], env=env, capture_output=True, timeout=180)


def example(name: str, **spec: Any) -> Manifest:
    """A KimiDeployment of examples/ with `spec` merged into its own."""
    manifest: Manifest = yaml.safe_load((ROOT / "examples" / name).read_text())
    return {**manifest, "spec": _merged(manifest["spec"], spec)}


def _merged(base: Any, over: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return base | {name: _merged(base.get(name), value) for name, value in over.items()}
