"""The rules in CEL, judged by a real API server with the same cases as `test_rules.py`."""

from collections.abc import Callable
from typing import Any

import pytest

from cluster import Cluster
from rule_cases import CASES, RuleCase, document

OURS = "/apis/kimistack.dev/v1alpha1/namespaces/default"
pytestmark = pytest.mark.cluster
Call = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def call(cluster: Cluster) -> Call:
    """Requests to an API server that has the CRDs and evaluates CEL."""
    server = cluster.crd_server()
    server.install_crds()
    return server.call


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
