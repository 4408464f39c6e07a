"""The CRDs: structural, bounded, fresh, and without defaults that would hide a preset."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kimi_operator.api.schema import SIZE_CAP_BYTES, crds

ROOT = Path(__file__).resolve().parents[3]
CRDS = {name: yaml.safe_load(text) for name, text in crds().items()}
FORBIDDEN = {
    "$ref",
    "$defs",
    "anyOf",
    "oneOf",
    "allOf",
    "title",
    "const",
    "nullable",
    "propertyNames",
}


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key], f"{path}.{key}")


def all_nodes(name: str) -> list[tuple[str, dict[str, Any]]]:
    (version,) = CRDS[name]["spec"]["versions"]
    return list(nodes(version["schema"]["openAPIV3Schema"]))


@pytest.mark.parametrize("name", CRDS)
def test_every_node_is_structural(name: str):
    for path, node in all_nodes(name):
        assert "type" in node, path
        assert not FORBIDDEN & node.keys(), path
        assert node.get("additionalProperties") is not False, path
        for bound in ("exclusiveMinimum", "exclusiveMaximum"):
            assert isinstance(node.get(bound, True), bool), path


@pytest.mark.parametrize("name", CRDS)
def test_every_field_of_spec_and_status_is_described(name: str):
    undescribed = [
        path
        for path, node in all_nodes(name)
        if path.startswith((".spec", ".status"))
        and not path.endswith((".items", ".additionalProperties"))
        and not node.get("description")
    ]
    assert undescribed == []


@pytest.mark.parametrize("name", CRDS)
def test_every_list_map_and_text_has_a_bound(name: str):
    for path, node in all_nodes(name):
        free = node.get("x-kubernetes-preserve-unknown-fields")
        match node["type"]:
            case "array":
                assert "maxItems" in node, path
            case "string":
                assert "enum" in node or "maxLength" in node, path
            case "object":
                known = "properties" in node or free or path == ".metadata"
                assert known or "maxProperties" in node, path


@pytest.mark.parametrize("name", CRDS)
def test_defaults_are_on_leaves_only(name: str):
    for path, node in all_nodes(name):
        assert not ("default" in node and node["type"] in ("object", "array")), path


def test_units_are_texts_with_their_defaults_as_written():
    fields = dict(all_nodes("kimideployments.yaml"))
    timeout = fields[".spec.decode.drain.timeout"]
    assert (timeout["type"], timeout["default"]) == ("string", "30s")
    assert fields[".spec.kvPool.dram"]["type"] == "string"


@pytest.mark.parametrize("field", ["replicas", "parallelism.tp", "limits.maxRunning", "gpu.perPod"])
def test_what_a_preset_may_set_has_no_default_in_the_cluster(field: str):
    assert "default" not in dict(all_nodes("kimideployments.yaml"))[f".spec.decode.{field}"]


def test_lists_of_named_things_merge_by_name():
    env = dict(all_nodes("kimideployments.yaml"))[".spec.decode.env"]
    assert (env["x-kubernetes-list-type"], env["x-kubernetes-list-map-keys"]) == ("map", ["name"])


@pytest.mark.parametrize("name", CRDS)
def test_a_crd_is_small_enough_for_client_side_apply(name: str):
    assert len(crds()[name].encode()) <= SIZE_CAP_BYTES


def test_columns_and_subresources():
    (deployments,) = CRDS["kimideployments.yaml"]["spec"]["versions"]
    (workers,) = CRDS["kimiworkers.yaml"]["spec"]["versions"]
    shown = [c["name"] for c in deployments["additionalPrinterColumns"] if not c.get("priority")]
    assert shown == ["Ready", "Engine", "Model", "Prefill", "Decode", "URL", "Age"]
    assert deployments["subresources"] == {"status": {}}
    assert workers["subresources"]["scale"]["specReplicasPath"] == ".spec.replicas"


def test_generated_files_are_fresh():
    checked = subprocess.run(
        [sys.executable, ROOT / "scripts" / "generate", "--check"], capture_output=True, text=True
    )
    assert (checked.returncode, checked.stderr) == (0, "")
