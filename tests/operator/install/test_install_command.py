"""`kimistack install` and `uninstall`: what they print, write, refuse and leave."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from fakekube import FakeKube
from kimi_operator.cli import main
from kimi_operator.desired.install import Install, all_objects, install_objects
from kimi_operator.installing import check_unused, put, take_out
from kimi_operator.kinds import INSTALLED
from kimi_operator.observed import K8S_CURRENT, ObjectKey
from kimi_runtime.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
SERVED = replace(K8S_CURRENT, kinds=K8S_CURRENT.kinds | {kind.id for kind in INSTALLED})
PLAIN = Install(image="kimistack/operator:1")
DEPLOYMENT = {
    "apiVersion": "kimistack.dev/v1alpha1",
    "kind": "KimiDeployment",
    "metadata": {"name": "a", "namespace": "kimistack"},
    "spec": {"preset": "kimi-nano/cpu"},
}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_a_dry_run_prints_crds_namespace_and_operator_in_the_order_to_apply(capsys):
    code, out, _ = run(capsys, "install", "--dry-run", "--scope", "Cluster", "--image", "a/b:1")
    objects = list(yaml.safe_load_all(out))
    kinds = [o["kind"] for o in objects]
    assert code == 0
    assert kinds[:3] == ["CustomResourceDefinition", "CustomResourceDefinition", "Namespace"]
    assert kinds[-1] == "Deployment"
    assert objects[-1]["spec"]["template"]["spec"]["containers"][0]["image"] == "a/b:1"


def test_the_plain_manifests_are_what_a_dry_run_prints(capsys):
    _, out, _ = run(capsys, "install", "--dry-run")
    printed = [o for o in yaml.safe_load_all(out) if o["kind"] != "CustomResourceDefinition"]
    files = [ROOT / "deploy" / name for name in ("namespace.yaml", "operator.yaml")]
    written = [o for file in files for o in yaml.safe_load_all(file.read_text())]
    assert printed == written


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--scope", "Cluster", "--watch", "a"), "--watch"),
        (("--pull-policy", "Sometimes"), "--pull-policy"),
        (("--kubeconfig", "/nonexistent/config"), "/nonexistent/config"),
    ],
)
def test_what_cannot_be_installed_is_one_line_and_exit_code_2(capsys, arguments, says):
    code, _, err = run(capsys, "install", *arguments)
    assert (code, len(err.strip().splitlines())) == (2, 1)
    assert says in err


async def test_what_was_put_can_be_put_again_and_taken_out():
    kube, said = FakeKube(SERVED), []
    objects = install_objects(PLAIN)
    await put(kube, objects, said.append)
    await put(kube, objects, said.append)
    assert len(said) == 2 * len(objects)
    await take_out(kube, PLAIN, said.append)
    assert [await kube.get(ObjectKey.of(o)) for o in objects] == [None] * len(objects)


async def test_the_operator_is_not_taken_out_from_under_a_deployment():
    kube = FakeKube(SERVED)
    await put(kube, install_objects(PLAIN), str)
    await kube.create(DEPLOYMENT)
    with pytest.raises(ConfigError, match="kimistack/a"):
        await take_out(kube, PLAIN, str)
    for o in install_objects(PLAIN):
        assert await kube.get(ObjectKey.of(o)) is not None


async def test_a_deployment_elsewhere_does_not_count():
    kube = FakeKube(SERVED)
    await kube.create({**DEPLOYMENT, "metadata": {"name": "a", "namespace": "other"}})
    await check_unused(kube, PLAIN)
    with pytest.raises(ConfigError, match="kubectl -n other delete kimideployments --all"):
        await check_unused(kube, Install(image="", scope="Cluster"))


def test_the_command_needs_no_cluster_library_until_it_speaks_to_a_cluster():
    code = (
        "import sys; sys.modules['kubernetes'] = None\n"
        "from kimi_operator.cli import main\n"
        "main(['install', '--dry-run'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_all_objects_have_distinct_names():
    names = [(o["kind"], o["metadata"]["name"]) for o in all_objects(PLAIN)]
    assert len(set(names)) == len(names)
