"""The rules in CEL, judged by a real API server with the same cases as `test_rules.py`.

KIMISTACK_CLUSTER names the folder with the `cluster` script that starts one.
"""

import json
import os
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kimi_operator.api.schema import crds
from rule_cases import CASES, RuleCase, document

SCRIPT = Path(os.environ.get("KIMISTACK_CLUSTER", "/nonexistent")) / "cluster"
OURS = "/apis/kimistack.dev/v1alpha1/namespaces/default"
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not SCRIPT.is_file(), reason="KIMISTACK_CLUSTER names no cluster script"),
]
Call = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    """Requests to an API server that has the CRDs."""
    env = {**os.environ, "KIMI_CLUSTER_DIR": str(tmp_path_factory.mktemp("cluster"))}
    try:
        subprocess.run([SCRIPT, "up"], env=env, check=True, capture_output=True, timeout=180)
        started = subprocess.run(
            [SCRIPT, "crd-server"], env=env, check=True, capture_output=True, timeout=60, text=True
        )
        config = yaml.safe_load(Path(started.stdout.strip().splitlines()[-1]).read_text())
        yield _installed(config)
    finally:
        subprocess.run([SCRIPT, "down"], env=env, capture_output=True, timeout=60)


def _installed(config: dict[str, Any]) -> Call:
    server = config["clusters"][0]["cluster"]["server"]
    token = config["users"][0]["user"]["token"]
    context = ssl._create_unverified_context()

    def call(method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        request = urllib.request.Request(
            server + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {token}", "Content-Type": kind},
        )
        try:
            with urllib.request.urlopen(request, context=context, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, json.load(refused)

    kinds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    for text in crds().values():
        crd = yaml.safe_load(text)
        name = crd["metadata"]["name"]
        apply = f"{kinds}/{name}?fieldManager=test&force=true"
        status, answer = call("PATCH", apply, crd, "application/apply-patch+yaml")
        assert status in (200, 201), answer
        watch = f"{kinds}?watch=true&timeoutSeconds=20&fieldSelector=metadata.name%3D{name}"
        _until_established(server + watch, token, context)
    return call


def _until_established(url: str, token: str, context: ssl.SSLContext) -> None:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, context=context, timeout=30) as events:
        for line in events:
            conditions = json.loads(line)["object"].get("status", {}).get("conditions", [])
            if any((c["type"], c["status"]) == ("Established", "True") for c in conditions):
                return
    raise AssertionError("the API server did not take the CRD")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.says)
def test_the_api_server_says_of_each_case_what_python_says(call: Call, case: RuleCase):
    dry = f"{OURS}/kimideployments?dryRun=All"
    status, answer = call("POST", dry, document(case.bad))
    if case.cel:
        assert (status, case.says in answer["message"]) == (422, True), answer
    else:
        assert status == 201
    status, answer = call("POST", dry, document(case.good))
    assert status == 201, answer


def test_a_name_that_is_too_long_is_refused(call: Call):
    dry = f"{OURS}/kimideployments?dryRun=All"
    status, answer = call("POST", dry, document({"preset": "p"}, "a" * 31))
    assert (status, "metadata.name" in answer["message"]) == (422, True)


def test_the_engine_cannot_be_changed(call: Call):
    status, _ = call("POST", f"{OURS}/kimideployments", document({"preset": "p"}, "fixed"))
    assert status == 201
    status, answer = call(
        "PATCH",
        f"{OURS}/kimideployments/fixed",
        {"spec": {"engine": "vllm"}},
        "application/merge-patch+json",
    )
    assert (status, "engine is immutable" in answer["message"]) == (422, True)


def test_a_null_reads_as_absent_so_that_a_preset_still_counts(call: Call):
    spec = {"preset": "p", "image": None, "decode": {"gpu": None, "replicas": None}}
    status, answer = call("POST", f"{OURS}/kimideployments?dryRun=All", document(spec))
    assert status == 201, answer
    assert "image" not in answer["spec"]
    assert answer["spec"]["decode"] == {"managedCommand": True}


def test_scale_reads_and_writes_the_instances(call: Call):
    workers = {
        "apiVersion": "kimistack.dev/v1alpha1",
        "kind": "KimiWorkers",
        "metadata": {"name": "a-decode"},
        "spec": {"deployment": "a", "role": "decode", "replicas": 2},
    }
    assert call("POST", f"{OURS}/kimiworkers", workers)[0] == 201
    scale = f"{OURS}/kimiworkers/a-decode/scale"
    _, before = call("GET", scale)
    assert before["spec"]["replicas"] == 2
    status, _ = call("PATCH", scale, {"spec": {"replicas": 5}}, "application/merge-patch+json")
    assert status == 200
    assert call("GET", f"{OURS}/kimiworkers/a-decode")[1]["spec"]["replicas"] == 5
