"""One cluster for all tests of this folder; they run in the order they are written in."""

import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from built import images
from charts import CHART
from kimi_operator.observed import DEPLOYMENT_LABEL, ROLE_LABEL, ObjectKey
from nano import DEPLOYMENT, NAME, NAMESPACE, READY_S, ready, router_url
from nodes import ROOT, Manifest, Nodes, example, two_nodes

OPERATOR = ObjectKey("apps/v1", "Deployment", NAMESPACE, "kimistack-operator")
OPERATOR_READY_S = 120
Install = Callable[[Path, str], Manifest]


@pytest.fixture(scope="session")
def built() -> dict[str, Manifest]:
    """Both images by name, as images/build describes them."""
    script = Path(os.environ.get("KIMISTACK_CLUSTER", "/nonexistent")) / "cluster"
    if not script.is_file():
        pytest.skip("KIMISTACK_CLUSTER names no folder with a cluster script")
    if os.geteuid() != 0:
        pytest.skip("starting nodes needs root")
    return images()


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory, built: dict[str, Manifest]) -> Iterator[Nodes]:
    """Two nodes with GPUs and both images."""
    given = os.environ.get("KIMI_CLUSTER_DIR")
    folder = Path(given) if given else tmp_path_factory.mktemp("cluster")
    folder.mkdir(parents=True, exist_ok=True)
    with two_nodes(folder) as nodes:
        for image in built.values():
            nodes.measured(f"image {image['name']}, packed", image["bytes"] / 2**20, "MiB")
            with nodes.timed(f"load image {image['name']} on both nodes"):
                nodes.load(image["image"], image["archive"])
        yield nodes


@pytest.fixture(scope="session", autouse=True)
def table(nodes: Nodes, request: pytest.FixtureRequest) -> Iterator[None]:
    """What was measured, at the end."""
    yield
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\n\n" + nodes.table())


@pytest.fixture(scope="session")
def image_names(built: dict[str, Manifest]) -> dict[str, str]:
    """operator and runtime: their images' names."""
    return {name: str(image["image"]) for name, image in built.items()}


@pytest.fixture(scope="session")
def install(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Install:
    """Install a chart with an operator's image by Helm, or upgrade to it; the ready Deployment.

    By a copy of the chart without crds/: Helm 4 applies those by server-side apply, which a server
    without CEL refuses. The chart's own hook writes them whatever the server. The operator stays
    off the node that is killed.
    """
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")

    def installed(chart: Path, image: str) -> Manifest:
        repository, _, tag = image.rpartition(":")
        values = {
            "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
            "nodeSelector": {"kubernetes.io/hostname": "node-1"},
        }
        copy = tmp_path_factory.mktemp("chart") / "kimistack"
        shutil.copytree(chart, copy, ignore=shutil.ignore_patterns("crds"))
        kubeconfig = nodes.server.kubeconfig
        with helm.Config(kubeconfig_path=kubeconfig, namespace=NAMESPACE) as config:
            there = any(item["name"] == "kimistack" for item in config.list())
            act = config.upgrade if there else config.install
            made = {} if there else {"create_namespace": True}
            act(copy, "kimistack", values, namespace=NAMESPACE, timeout=300, **made)
        ready = nodes.until(OPERATOR, _available, OPERATOR_READY_S, "available")
        assert ready is not None
        return ready

    return installed


@pytest.fixture(scope="session")
def operator(nodes: Nodes, install: Install, image_names: dict[str, str]) -> Manifest:
    """The operator of this version."""
    with nodes.timed("helm install to operator available"):
        return install(CHART, image_names["operator"])


@pytest.fixture(scope="session")
def deployment(nodes: Nodes, operator: Manifest, image_names: dict[str, str]) -> Manifest:
    """The example, Ready; on a kept cluster as earlier tests left it, if its image is this one."""
    manifest = nano(image_names["runtime"])
    kept = nodes.get(DEPLOYMENT)
    with nodes.timed("kubectl apply to Ready"):
        if kept is None or kept["spec"]["image"] != manifest["spec"]["image"]:
            nodes.apply(manifest)
        nodes.kubectl(
            *("wait", "--for=condition=Ready", f"--timeout={READY_S:.0f}s"),
            *("kimideployment/kimi-nano", "-n", NAMESPACE),
            within_s=READY_S + 30,
        )
    found = nodes.get(DEPLOYMENT)
    assert ready(found)
    assert found is not None
    return found


def nano(image: str) -> Manifest:
    """The example with an image that is on the nodes.

    Its routers are given the node that is not killed: Kubernetes alone decides how long a Service
    goes on naming a router that is gone with its node. Each role is spread over both nodes.
    """
    return example(
        "kimi-nano-cluster.yaml",
        image=image,
        imagePullPolicy="Never",
        preflight="Require",
        prefill={"drain": {"preStop": "5s"}, "placement": _spread("prefill")},
        decode={"drain": {"preStop": "5s"}, "placement": _spread("decode")},
        router={"placement": {"nodeSelector": {"kubernetes.io/hostname": "node-1"}}},
    )


def _spread(role: str) -> Manifest:
    """Away from instances of the same role, and from other engines where that is possible too."""
    away = [(100, {ROLE_LABEL: role}), (50, {"app.kubernetes.io/component": "engine"})]
    terms = [
        {
            "weight": weight,
            "podAffinityTerm": {
                "topologyKey": "kubernetes.io/hostname",
                "labelSelector": {"matchLabels": {DEPLOYMENT_LABEL: NAME, **labels}},
            },
        }
        for weight, labels in away
    ]
    preferred = "preferredDuringSchedulingIgnoredDuringExecution"
    return {"affinity": {"podAntiAffinity": {preferred: terms}}}


@pytest.fixture
def client(nodes: Nodes, deployment: Manifest) -> Iterator[openai.OpenAI]:
    """An outside client of the router's Service."""
    with openai.OpenAI(
        base_url=router_url(nodes), api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


@pytest.fixture(scope="session")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of the version before this one."""
    folder = tmp_path_factory.mktemp("previous")
    archive = folder / "v.tar"
    subprocess.run(["git", "archive", "-o", archive, PREVIOUS], cwd=ROOT, check=True, timeout=60)
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "tree", filter="data")
    return folder / "tree"


PREVIOUS = "205adda55e3c6f05337e9bb19e51300d5830bc9f"  # 0.3.0; not every clone has the tags


def _available(deployment: Manifest | None) -> bool:
    status = (deployment or {}).get("status", {})
    spec = (deployment or {}).get("metadata", {}).get("generation")
    current = status.get("observedGeneration") == spec and status.get("updatedReplicas") == 1
    return bool(current and status.get("availableReplicas") == 1)
