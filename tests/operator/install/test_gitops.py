"""Argo CD's health script, and the files of the GitOps examples."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from kimi_operator.api.load import load_deployment

ROOT = Path(__file__).resolve().parents[3]
GITOPS = ROOT / "examples" / "gitops"
DATA = yaml.safe_load((GITOPS / "argocd" / "argocd-cm.yaml").read_text())["data"]
HEALTH = "resource.customizations.health.kimistack.dev_"


def health(obj: dict[str, Any], kind: str = "KimiDeployment") -> tuple[str, str]:
    """Run the script as Argo CD does: `obj` is a global, the answer a table."""
    lupa = pytest.importorskip("lupa", reason="lupa is not installed")
    lua = lupa.LuaRuntime(unpack_returned_tuples=True)
    lua.globals().obj = lua.table_from(obj, recursive=True)
    answer = lua.execute(DATA[HEALTH + kind])
    return answer["status"], answer["message"]


def deployment(*conditions: tuple[str, str, str], seen: int = 3, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"generation": 3},
        "spec": spec,
        "status": {
            "observedGeneration": seen,
            "conditions": [
                {"type": kind, "status": status, "reason": reason, "message": f"about {reason}"}
                for kind, status, reason in conditions
            ],
        },
    }


READY = ("Ready", "True", "Serving")
NOT_READY = ("Ready", "False", "Loading")


@pytest.mark.parametrize(
    ("obj", "wanted"),
    [
        ({"metadata": {"generation": 1}, "spec": {}}, "Progressing"),
        ({"metadata": {"generation": 1}, "spec": {}, "status": {}}, "Progressing"),
        (deployment(READY), "Healthy"),
        (deployment(READY, seen=2), "Progressing"),
        (deployment(NOT_READY, ("Reconciling", "True", "Loading")), "Progressing"),
        (deployment(NOT_READY, ("Stalled", "True", "TooBig")), "Degraded"),
        (deployment(READY, ("Stalled", "True", "TooBig")), "Degraded"),
        (deployment(NOT_READY, ("Degraded", "True", "NodeLost")), "Degraded"),
        (deployment(READY, ("Degraded", "True", "NodeLost")), "Healthy"),
        (deployment(NOT_READY, suspend="Scale"), "Suspended"),
        (deployment(READY, suspend="None"), "Healthy"),
        (
            deployment(NOT_READY, ("Progressing", "True", "Step"), rollout={"paused": True}),
            "Suspended",
        ),
        (deployment(READY, rollout={"paused": True}), "Healthy"),
    ],
)
def test_argo_cd_sees_the_state(obj: dict[str, Any], wanted: str):
    assert health(obj)[0] == wanted


def test_argo_cd_shows_reason_and_message():
    assert health(deployment(NOT_READY))[1] == "Loading: about Loading"
    stalled = health(deployment(NOT_READY, ("Stalled", "True", "TooBig")))
    assert stalled == ("Degraded", "TooBig: about TooBig")


def test_workers_are_healthy_by_themselves():
    assert health({"metadata": {}}, "KimiWorkers")[0] == "Healthy"


def test_flux_waits_for_the_deployments_it_applies():
    documents = list(yaml.safe_load_all((GITOPS / "flux" / "kimistack.yaml").read_text()))
    (applied,) = [d for d in documents if d["kind"] == "Kustomization"]
    assert applied["spec"]["wait"] is True
    sources = {d["metadata"]["name"] for d in documents if d["kind"] == "GitRepository"}
    releases = [d for d in documents if d["kind"] == "HelmRelease"]
    used = [d["spec"]["chart"]["spec"]["sourceRef"]["name"] for d in releases]
    assert {applied["spec"]["sourceRef"]["name"], *used} == sources
    assert (ROOT / releases[0]["spec"]["chart"]["spec"]["chart"] / "Chart.yaml").is_file()


@pytest.mark.parametrize(
    "folder", [ROOT / "crds", ROOT / "deploy", GITOPS / "kustomize"], ids=lambda p: p.name
)
def test_a_kustomization_names_files_that_are_there(folder: Path):
    for resource in yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]:
        target = folder / resource
        assert (target / "kustomization.yaml" if target.is_dir() else target).is_file()


def test_what_the_kustomization_changes_exists_in_what_it_stands_on():
    overlay = yaml.safe_load((GITOPS / "kustomize" / "kustomization.yaml").read_text())
    base = list(yaml.safe_load_all((ROOT / "deploy" / "operator.yaml").read_text()))
    (patched,) = overlay["patches"]
    (found,) = [o for o in base if o["kind"] == "Deployment"]
    assert found["metadata"]["name"] == patched["target"]["name"]
    node: Any = found
    for step in yaml.safe_load(patched["patch"])[0]["path"].strip("/").split("/"):
        node = node[int(step)] if isinstance(node, list) else node[step]
    image = found["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image.rpartition(":")[0] == overlay["images"][0]["name"]


def test_the_example_deployment_is_valid():
    assert load_deployment(GITOPS / "kustomize" / "kimi-k26.yaml").name == "kimi-k26"
