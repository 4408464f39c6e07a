"""What an earlier version made of deployments: kept revisions, and the pods made from them.

`python tests/support/previous_cases.py TAG` writes tests/goldens/previous/TAG.json.gz, by the code
of that tag alone: its render cases, and its presets and examples as they are.
"""

import gzip
import json
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PREVIOUS = ROOT / "tests" / "goldens" / "previous"
WITH_PODS = ("StatefulSet", "Deployment", "DaemonSet")
_WRITE = r'''
import hashlib, json, sys
from pathlib import Path
import yaml
from kimi_operator.api.schema import structural
from kimi_operator.api.deployment import KimiDeployment
from kimi_operator.api.load import validated
from kimi_operator.desired.render import rendered
from kimi_operator.observed import K8S_1_20, K8S_CURRENT
from kimi_operator.presets import preset as presets
from render_cases import CASES, HOST_MODEL, MULTUS

def defaulted(value, schema):
    """As the API server stores it."""
    if isinstance(value, dict) and "properties" in schema:
        fields = schema["properties"]
        found = {k: defaulted(v, fields.get(k, {})) for k, v in value.items()}
        return found | {
            k: f["default"] for k, f in fields.items() if "default" in f and value.get(k) is None
        }
    if isinstance(value, list) and "items" in schema:
        return [defaulted(item, schema["items"]) for item in value]
    return value

def specs():
    for case in CASES:
        yield case.name, case.spec, case.annotations, case.capabilities
    for folder in sorted(Path(presets.__file__).parent.glob("*/*.yaml")):
        name = f"{folder.parent.name}/{folder.stem}"
        spec = {"preset": name}
        if folder.stem != "cpu":
            spec |= {"model": HOST_MODEL, "rdma": MULTUS, "security": {"profile": "RDMA"}}
        yield f"preset {name}", spec, {}, K8S_CURRENT
    for example in sorted(Path("examples").glob("*.yaml")):
        yield f"example {example.stem}", yaml.safe_load(example.read_text())["spec"], {}, K8S_1_20

spec_schema = structural(KimiDeployment)["properties"]["spec"]
for name, spec, annotations, capabilities in specs():
    metadata = {"name": "kimi", "namespace": "llm", "uid": "1-2-3", "annotations": annotations}
    document = {
        "apiVersion": "kimistack.dev/v1alpha1",
        "kind": "KimiDeployment",
        "metadata": metadata | {"generation": 1},
        "spec": defaulted(spec, spec_schema),
    }
    result = rendered(validated(json.loads(json.dumps(document)), name), capabilities)
    revisions = [m for m in result.manifests if m["kind"] == "ControllerRevision"]
    pods = {
        f"{m['kind']} {m['metadata']['name']}": hashlib.sha256(
            json.dumps(m["spec"]["template"], sort_keys=True).encode()
        ).hexdigest()
        for m in result.manifests
        if m["kind"] in ("StatefulSet", "Deployment", "DaemonSet")
    }
    served = "1.20" if capabilities is K8S_1_20 else "current"
    line = {"name": name, "resource": document, "served": served}
    print(json.dumps(line | {"revisions": revisions, "pods": pods}, sort_keys=True))
'''


@dataclass(frozen=True)
class Previous:
    """One deployment under an earlier version. `pods` are hashes of pod templates by child."""

    name: str
    resource: dict[str, Any]
    served: str
    revisions: list[dict[str, Any]]
    pods: dict[str, str]


def previous_cases() -> list[tuple[str, Previous]]:
    """Every case of every kept version, with the version."""
    found = []
    for file in sorted(PREVIOUS.glob("*.json.gz")):
        lines = gzip.decompress(file.read_bytes()).decode().splitlines()
        found += [(file.name.removesuffix(".json.gz"), Previous(**json.loads(x))) for x in lines]
    return found


def write(tag: str) -> Path:
    """Keep what the tag's code makes of its cases."""
    with tempfile.TemporaryDirectory() as made:
        archive, tree = Path(made) / "v.tar", Path(made) / "tree"
        subprocess.run(["git", "archive", "-o", archive, tag], cwd=ROOT, check=True)
        with tarfile.open(archive) as tar:
            tar.extractall(tree, filter="data")
        environment = {"PYTHONPATH": "operator:runtime:tests/support", "PATH": "/usr/bin:/bin"}
        command = [sys.executable, "-c", _WRITE]
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stderr)
    PREVIOUS.mkdir(parents=True, exist_ok=True)
    target = PREVIOUS / f"{tag}.json.gz"
    target.write_bytes(gzip.compress(done.stdout.encode(), mtime=0))
    return target


if __name__ == "__main__":
    write(sys.argv[1])
