"""Rendering the Helm chart with Helm's own code, by the package `helm-python-sdk`."""

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "kimistack"
ADDED_BY_HELM = ("helm.sh/chart", "app.kubernetes.io/managed-by")
Manifest = dict[str, Any]


def rendered(
    values: Manifest, *, name: str = "kimistack", namespace: str = "kimistack"
) -> list[Manifest]:
    """All objects the chart renders, hooks included, in no particular order."""
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name=name, namespace=namespace)
    return [
        manifest
        for path, text in files.items()
        if path.endswith(".yaml")
        for manifest in yaml.safe_load_all(text)
        if manifest
    ]


def is_hook(manifest: Manifest) -> bool:
    """Whether Helm runs it around a release and it is no part of the release."""
    return "helm.sh/hook" in manifest["metadata"].get("annotations", {})


def without_helm(manifest: Manifest) -> Manifest:
    """The object without the labels that say Helm wrote it."""
    bare = {**manifest, "metadata": _unlabelled(manifest["metadata"])}
    template = manifest.get("spec", {}).get("template")
    if template:
        metadata = _unlabelled(template["metadata"])
        bare["spec"] = {**manifest["spec"], "template": {**template, "metadata": metadata}}
    return bare


def _unlabelled(metadata: Manifest) -> Manifest:
    labels = {k: v for k, v in metadata.get("labels", {}).items() if k not in ADDED_BY_HELM}
    return {**metadata, "labels": labels}
