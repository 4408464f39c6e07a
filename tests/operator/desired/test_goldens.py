"""What a dozen deployments become, kept as YAML; `render_cases` says how it is written anew."""

from collections.abc import Mapping
from typing import Any

import pytest

from kimi_operator.desired.render import render_all
from kimi_operator.kinds import BY_ID
from kimi_operator.observed import FIELDS, K8S_1_20, Manifest, ObjectKey
from render_cases import CASES, GOLDENS, Case, golden, render_case

Names = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@Names
def test_a_deployment_renders_to_what_is_kept(case: Case):
    kept = (GOLDENS / f"{case.name}.yaml").read_text("utf-8")
    assert golden(render_case(case)) == kept, "if this is meant, run render_cases and review"


def test_there_is_a_golden_for_every_case_and_no_other():
    assert {path.stem for path in GOLDENS.glob("*.yaml")} == {case.name for case in CASES}


@Names
def test_every_object_is_of_a_kind_the_server_serves_and_the_operator_may_write(case: Case):
    for manifest in render_case(case).manifests:
        kind = f"{manifest['apiVersion']}/{manifest['kind']}"
        assert kind in BY_ID
        assert case.capabilities.serves(kind)


def test_a_server_of_1_20_gets_no_field_that_it_lacks():
    for case in CASES:
        if case.capabilities is K8S_1_20:
            for manifest in render_case(case).manifests:
                assert not used(manifest) & (FIELDS - K8S_1_20.fields)


def used(manifest: Manifest) -> set[str]:
    """Which of `FIELDS` a manifest writes."""
    return {path for path in FIELDS if has(manifest, path.split(".")[1:], manifest["kind"], path)}


def has(value: Any, steps: list[str], kind: str, path: str) -> bool:
    if not path.startswith(f"{kind}."):
        return False
    if isinstance(value, list):
        return any(has(item, steps, kind, path) for item in value)
    if not steps:
        return True
    return (
        isinstance(value, Mapping)
        and steps[0] in value
        and has(value[steps[0]], steps[1:], kind, path)
    )


@Names
def test_an_object_comes_after_what_it_refers_to(case: Case):
    seen: set[ObjectKey] = set()
    for manifest in render_case(case).manifests:
        for api_version, kind, name in references(manifest):
            assert ObjectKey(api_version, kind, "llm", name) in seen, (manifest["kind"], kind, name)
        seen.add(ObjectKey.of(manifest))


OF_THE_USER = {"weights", "hub", "kimi-api-keys", "pool-tls"}


def references(manifest: Manifest) -> list[tuple[str, str, str]]:
    """What the pods of a workload need: accounts, ConfigMaps, Secrets, its Service."""
    template = manifest["spec"].get("template") if "spec" in manifest else None
    if not template:
        return []
    pod = template["spec"]
    found = [("v1", "ServiceAccount", pod["serviceAccountName"])]
    for volume in pod["volumes"]:
        if "configMap" in volume:
            found.append(("v1", "ConfigMap", volume["configMap"]["name"]))
        if "secret" in volume and volume["secret"]["secretName"] not in OF_THE_USER:
            found.append(("v1", "Secret", volume["secret"]["secretName"]))
    if "serviceName" in manifest["spec"]:
        found.append(("v1", "Service", manifest["spec"]["serviceName"]))
    found += [
        ("resource.k8s.io/v1", "ResourceClaimTemplate", claim["resourceClaimTemplateName"])
        for claim in pod.get("resourceClaims", [])
    ]
    return found


def test_offline_rendering_needs_no_uid():
    case = CASES[0]
    metadata = case.deployment.metadata.model_copy(update={"uid": None})
    deployment = case.deployment.model_copy(update={"metadata": metadata})
    for manifest in render_all(deployment, case.capabilities):
        assert "ownerReferences" not in manifest["metadata"]
        assert "kimistack.dev/owner-uid" not in manifest["metadata"]["labels"]
