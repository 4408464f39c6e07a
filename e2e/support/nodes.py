"""Two real nodes for the end-to-end tests: started, loaded with images, watched, killed, stopped.

KIMISTACK_CLUSTER names the folder with the `cluster` script. KIMI_E2E_KEEP=1 leaves the cluster up,
so that the next run starts on it.
"""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import Callable, Iterable, Iterator
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
BIN = Path(__file__).parent / "bin"
PRODUCTS = ("AMD_Instinct_MI350X_OAM", "AMD_Instinct_MI355X_OAM")
"""Of each node another one, so that preflight looks at both."""
Manifest = dict[str, Any]


class TookTooLong(AssertionError):
    """What was waited for did not come; says what was there instead."""


@dataclass
class Nodes:
    """The cluster. `run` holds process ids by name, one file each."""

    script: Path
    folder: Path
    server: Server
    figures: dict[str, tuple[float, str]] = field(default_factory=dict)
    """What was measured: number and unit."""
    killed_s: dict[str, float] = field(default_factory=dict)
    """When each node was killed, on the monotonic clock."""

    def command(self, *arguments: str, within_s: float = 300) -> str:
        """Run the cluster script."""
        return _cluster(self.script, self.folder, *arguments, within_s=within_s)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Note how long something took."""
        began = time.monotonic()
        yield
        self.measured(what, time.monotonic() - began, "s")

    def measured(self, what: str, number: float, unit: str) -> None:
        """Note a figure for the table."""
        self.figures[what] = (round(number, 1), unit)

    def table(self) -> str:
        """The figures, one a line."""
        rows = [f"| {what} | {number:g} {unit} |" for what, (number, unit) in self.figures.items()]
        return "\n".join(["| measured on two nodes | |", "| --- | --- |", *rows])

    def load(self, image: str, archive: str) -> None:
        """Import an image on every node that lacks it, on all of them at once."""
        lacking = [node for node in NODES if image not in self.ctr(node, "images", "ls", "-q")]
        imports = [
            subprocess.Popen(
                [*self._ctr(node), "images", "import", archive], stdout=subprocess.DEVNULL
            )
            for node in lacking
        ]
        assert [each.wait(600) for each in imports] == [0] * len(lacking)

    def tag(self, image: str, name: str) -> None:
        """Give an image another name, on every node."""
        for node in NODES:
            self.ctr(node, "images", "tag", "--force", image, name)

    def ctr(self, node: str, *arguments: str) -> list[str]:
        """Lines that containerd's client prints."""
        done = subprocess.run(
            [*self._ctr(node), *arguments], capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout.splitlines()

    def _ctr(self, node: str) -> list[str]:
        return ["ctr", "-a", str(self.folder / node / "containerd.sock"), "-n", "k8s.io"]

    def kubectl(self, *arguments: str, within_s: float = 60) -> str:
        """What a user's kubectl prints; `kubectl kimi …` too."""
        return self.ran("kubectl", *arguments, within_s=within_s)

    def ran(self, *command: str, code: int = 0, within_s: float = 60) -> str:
        """What a program that takes --kubeconfig prints, once it ended with this exit code."""
        ours = Path(sys.executable).parent
        own = command.index("--") if "--" in command else len(command)  # behind it is another's
        done = subprocess.run(
            [*command[:own], "--kubeconfig", str(self.server.kubeconfig), *command[own:]],
            env={**os.environ, "PATH": f"{ours}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=within_s,
        )
        told = f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}"
        assert done.returncode == code, told
        return done.stdout

    def kill(self, node: str) -> None:
        """Take a node off the network without a word, then everything that runs on it."""
        number = node.rpartition("-")[2]
        self.killed_s[node] = time.monotonic()
        subprocess.run(["ip", "link", "set", f"kimi{number}", "down"], check=True)
        socket = str(self.folder / node / "containerd.sock")
        shims = [pid for pid, line in _processes() if "containerd-shim" in line and socket in line]
        for pid in (
            *self.pids(f"kubelet-{number}"),
            *self.pids(f"containerd-{number}"),
            *_descendants(shims),
            *shims,
        ):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def revive(self, node: str) -> None:
        """Start a killed node again."""
        number = node.rpartition("-")[2]
        subprocess.run(["ip", "link", "set", f"kimi{number}", "up"], check=True)
        self.command("up", "--nodes", str(len(NODES)))
        self.command("gpus", node, str(GPUS))

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
        status, answer = self.server.call(
            "DELETE", f"{self.path(key)}?propagationPolicy=Background"
        )
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


def _processes() -> Iterator[tuple[int, str]]:
    """Id and command line of everything that runs."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                yield int(folder.name), line.decode(errors="replace")


def _descendants(roots: Iterable[int]) -> list[int]:
    """Processes whose parent is one of these or a descendant of one."""
    children: dict[int, list[int]] = {}
    for pid, _ in _processes():
        with suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text()
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(pid)
    found: list[int] = []
    todo = list(roots)
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _cluster(script: Path, folder: Path, *arguments: str, within_s: float) -> str:
    """Run the cluster script on a folder, with our containerd in front of the machine's."""
    env = {
        **os.environ,
        "KIMI_CLUSTER_DIR": str(folder),
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        [script, *arguments], env=env, capture_output=True, text=True, timeout=within_s
    )
    if done.returncode:
        raise AssertionError(f"cluster {' '.join(arguments)}: {done.stdout}{done.stderr}")
    return done.stdout


@contextmanager
def two_nodes(folder: Path) -> Iterator[Nodes]:
    """The cluster with its GPUs advertised; stopped at the end unless it is to be kept."""
    script = Path(os.environ["KIMISTACK_CLUSTER"]) / "cluster"
    if not Path("/usr/bin/containerd").exists():  # the script would take ours for it
        subprocess.run(["apt-get", "install", "-y", "-q", "containerd", "runc"], check=True)
    with the_only_cluster(), _shared(folder), _started(script, folder) as nodes:
        yield nodes


@contextmanager
def _shared(folder: Path) -> Iterator[None]:
    """The folder as a mount of its own, so that what is mounted below it is seen in containerd's
    mount namespaces too.
    """
    kept = bool(os.environ.get("KIMI_E2E_KEEP"))
    if not _is_mount(folder):
        subprocess.run(["mount", "--bind", folder, folder], check=True)
        subprocess.run(["mount", "--make-shared", folder], check=True)
    try:
        yield
    finally:
        if not kept and _is_mount(folder):
            subprocess.run(["umount", "--lazy", folder], check=True)


def _is_mount(folder: Path) -> bool:
    """Also of a folder of the same file system, which `os.path.ismount` takes for none."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return str(folder.resolve()) in {line.split()[4] for line in mounts}


@contextmanager
def _started(script: Path, folder: Path) -> Iterator[Nodes]:
    began = time.monotonic()
    try:
        _cluster(script, folder, "up", "--nodes", str(len(NODES)), within_s=300)
        nodes = Nodes(script, folder, Server.of(folder / "kubeconfig"))
        nodes.measured("cluster up", time.monotonic() - began, "s")
        for node, product in zip(NODES, PRODUCTS, strict=True):
            _favour(f"kimi-{node}")
            nodes.command("gpus", node, str(GPUS))
            labels = gpu_labels(product)
            nodes.merge(ObjectKey("v1", "Node", "", node), {"metadata": {"labels": labels}})
        yield nodes
    finally:
        if not os.environ.get("KIMI_E2E_KEEP"):
            _cluster(script, folder, "down", within_s=600)  # removes gigabytes of files


def gpu_labels(product: str) -> dict[str, str]:
    """As Node Feature Discovery and AMD's labeller have them; where the first is, the pool is."""
    return {"feature.node.kubernetes.io/amd-gpu": "true", "amd.com/gpu.product-name": product}


def _favour(group: str) -> None:
    """Let all pods of a node together have the CPU time of twenty processes, not of one."""
    for file, weight in (("cpu/{}/cpu.shares", "20480"), ("{}/cpu.weight", "2000")):
        path = Path("/sys/fs/cgroup") / file.format(group)
        if path.exists():
            path.write_text(weight)


def example(name: str, root: Path = ROOT, **spec: Any) -> Manifest:
    """A KimiDeployment of a checkout's examples/ with `spec` merged into its own."""
    manifest: Manifest = yaml.safe_load((root / "examples" / name).read_text())
    return {**manifest, "spec": _merged(manifest["spec"], spec)}


def _merged(base: Any, over: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return base | {name: _merged(base.get(name), value) for name, value in over.items()}
