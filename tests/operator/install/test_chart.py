"""The Helm chart: lints, refuses wrong values, renders what `kimistack install` applies."""

import tomllib
from dataclasses import replace
from typing import Any

import pytest
import yaml

from charts import CHART, ROOT, Manifest, is_hook, rendered, without_helm
from kimi_operator.desired.install import Install, crd_objects, install_objects

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PLAIN = Install(image=f"kimistack/operator:{VERSION}", version=VERSION)
CASES: dict[str, tuple[Install, dict[str, Any]]] = {
    "plain": (PLAIN, {}),
    "the whole cluster": (replace(PLAIN, scope="Cluster"), {"scope": "Cluster"}),
    "the whole cluster without nodes": (
        replace(PLAIN, scope="Cluster", node_access=False),
        {"scope": "Cluster", "nodeAccess": False},
    ),
    "other namespaces": (
        replace(PLAIN, namespaces=("b", "a"), node_access=False, user_roles=False),
        {"namespaces": ["b", "a"], "nodeAccess": False, "userRoles": False},
    ),
    "own and other namespaces": (
        replace(PLAIN, namespaces=("kimistack", "a")),
        {"namespaces": ["kimistack", "a"]},
    ),
    "image, secrets, monitor, level": (
        replace(
            PLAIN,
            image="r.example.com/op:7",
            image_pull_policy="Never",
            image_pull_secrets=("pull",),
            pod_monitor=True,
            log_level="debug",
        ),
        {
            "image": {"repository": "r.example.com/op", "tag": "7", "pullPolicy": "Never"},
            "imagePullSecrets": [{"name": "pull"}],
            "podMonitor": {"enabled": True},
            "logLevel": "debug",
        },
    ),
}


def by_name(objects: list[Manifest]) -> dict[tuple[str, str, str], Manifest]:
    found = {
        (o["kind"], o["metadata"].get("namespace", ""), o["metadata"]["name"]): o for o in objects
    }
    assert len(found) == len(objects)
    return found


def test_the_chart_lints_without_a_warning():
    report = helm.lint(CHART, strict=True)
    worse_than_info = [m for m in report["messages"] if m["severity"] > 1]
    assert (worse_than_info, report["errors"]) == ([], [])


@pytest.mark.parametrize("case", CASES)
def test_the_chart_renders_what_install_applies(case: str):
    install, values = CASES[case]
    release = [without_helm(o) for o in rendered(values) if not is_hook(o)]
    assert by_name(release) == by_name(install_objects(install))


@pytest.mark.parametrize(
    "values",
    [
        {"scope": "Everywhere"},
        {"replicas": 2},
        {"scope": "Cluster", "namespaces": ["a"]},
        {"namespaces": ["Not-A-Name"]},
        {"image": {"repository": ""}},
        {"image": {"repository": "a", "digest": "sha256:12"}},
        {"logLevel": "verbose"},
        {"extraEnv": [{"value": "nameless"}]},
    ],
    ids=str,
)
def test_wrong_values_are_refused(values: dict[str, Any]):
    with (
        helm.Chart.load(CHART) as chart,
        pytest.raises((helm.HelmValuesError, helm.HelmRenderError)),
    ):
        chart.render(values, name="kimistack", namespace="kimistack")


def test_a_digest_counts_instead_of_the_tag():
    digest = f"sha256:{'0' * 64}"
    objects = rendered({"image": {"repository": "r/op", "tag": "7", "digest": digest}})
    images = {
        container["image"]
        for o in objects
        if "template" in o.get("spec", {})
        for container in o["spec"]["template"]["spec"]["containers"]
    }
    assert images == {f"r/op@{digest}"}


def test_the_crds_are_those_of_the_api_and_are_kept_at_uninstall():
    files = [yaml.safe_load(path.read_text()) for path in sorted((CHART / "crds").glob("*.yaml"))]
    for crd in files:
        assert crd["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert files == crd_objects()


def test_hooks_write_the_crds_first_and_ask_before_an_uninstall():
    hooks = [o for o in rendered({}) if is_hook(o)]
    jobs = {
        o["metadata"]["annotations"]["helm.sh/hook"]: o["spec"]["template"]["spec"]
        for o in hooks
        if o["kind"] == "Job"
    }
    before, after = jobs["pre-install,pre-upgrade"], jobs["pre-delete"]
    assert before["containers"][0]["args"] == ["install", "--only-crds"]
    assert after["containers"][0]["args"][:2] == ["uninstall", "--check"]
    assert after["serviceAccountName"] == "kimistack-operator"
    weights = {
        o["kind"]: int(o["metadata"]["annotations"]["helm.sh/hook-weight"])
        for o in hooks
        if o["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    }
    assert weights["Job"] > max(weight for kind, weight in weights.items() if kind != "Job")


def test_hooks_can_be_left_out():
    values = {"crdsHook": False, "uninstallCheck": False}
    assert [o for o in rendered(values) if is_hook(o)] == []


def test_every_pod_is_restricted():
    for o in rendered({}):
        if "template" not in o.get("spec", {}):
            continue
        pod = o["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}


def test_a_namespaced_release_without_extras_has_no_right_on_the_cluster():
    values = {"nodeAccess": False, "userRoles": False, "crdsHook": False}
    kinds = {o["kind"] for o in rendered(values)}
    assert not {"ClusterRole", "ClusterRoleBinding"} & kinds


def test_two_releases_share_no_name():
    one, other = (rendered({}, name=name, namespace="n") for name in ("one", "other"))
    assert not set(by_name(one)) & set(by_name(other))


def test_notes_say_what_is_looked_after():
    with helm.Chart.load(CHART) as chart:
        notes = chart.render({"scope": "Cluster"}, name="k", namespace="n")
    assert "all namespaces" in notes["kimistack/templates/NOTES.txt"]
