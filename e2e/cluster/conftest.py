"""One cluster for all tests of this folder; they run in the order they are written in."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from charts import CHART
from kimi_operator.observed import ObjectKey
from nodes import Manifest, Nodes, images, two_nodes

NAMESPACE = "kimistack"
OPERATOR = ObjectKey("apps/v1", "Deployment", NAMESPACE, "kimistack-operator")
OPERATOR_READY_S = 120


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
    with two_nodes(folder) as nodes:
        for image in built.values():
            with nodes.timed(f"load {image['name']} ({image['bytes'] / 2**20:.0f} MiB)"):
                nodes.load(image["image"], image["archive"])
        yield nodes
        for what, seconds in nodes.timings.items():
            print(f"{seconds:7.1f} s  {what}")


@pytest.fixture(scope="session")
def image_names(built: dict[str, Manifest]) -> dict[str, str]:
    """operator and runtime: their images' names."""
    return {name: str(image["image"]) for name, image in built.items()}


@pytest.fixture(scope="session")
def operator(
    nodes: Nodes, image_names: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Manifest]:
    """The operator, installed by Helm; its Deployment.

    By a copy of the chart without crds/: Helm 4 applies those by server-side apply, which a server
    without CEL refuses. The chart's own hook writes them whatever the server.
    """
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
    repository, _, tag = image_names["operator"].rpartition(":")
    values = {"image": {"repository": repository, "tag": tag, "pullPolicy": "Never"}}
    kubeconfig = nodes.server.kubeconfig
    chart = tmp_path_factory.mktemp("chart") / "kimistack"
    shutil.copytree(CHART, chart, ignore=shutil.ignore_patterns("crds"))
    with helm.Config(kubeconfig_path=kubeconfig, namespace=NAMESPACE) as config:
        with nodes.timed("helm install"):
            installed = any(item["name"] == "kimistack" for item in config.list())
            act = config.upgrade if installed else config.install
            made = {} if installed else {"create_namespace": True}
            act(chart, "kimistack", values, namespace=NAMESPACE, timeout=300, **made)
        with nodes.timed("operator ready"):
            ready = nodes.until(OPERATOR, _available, OPERATOR_READY_S, "available")
        assert ready is not None
        yield ready


def _available(deployment: Manifest | None) -> bool:
    status = (deployment or {}).get("status", {})
    spec = (deployment or {}).get("metadata", {}).get("generation")
    current = status.get("observedGeneration") == spec and status.get("updatedReplicas") == 1
    return bool(current and status.get("availableReplicas") == 1)
