"""What a server serves, read out of its discovery and OpenAPI documents."""

from collections.abc import Iterable, Mapping
from typing import Any


def server_version(answer: Mapping[str, Any]) -> tuple[int, int]:
    """`(1, 20)` of the answer of `/version`, whose minor may end in `+`."""
    digits = "".join(c for c in str(answer["minor"]) if c.isdigit())
    return int(answer["major"]), int(digits)


def served_kinds(api_version: str, answer: Mapping[str, Any]) -> set[str]:
    """`apps/v1/StatefulSet` and so on of the answer of `/apis/apps/v1`."""
    return {
        f"{api_version}/{resource['kind']}"
        for resource in answer.get("resources", ())
        if "/" not in resource["name"]
    }


def fields_in(document: Mapping[str, Any], paths: Iterable[str]) -> set[str]:
    """Which of the paths (`StatefulSet.spec.minReadySeconds`) an OpenAPI document describes.

    Version 2 has its schemas in `definitions`, version 3 in `components.schemas`.
    """
    schemas = document.get("definitions") or document.get("components", {}).get("schemas", {})
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for schema in schemas.values():
        for kind in schema.get("x-kubernetes-group-version-kind", ()):
            kinds.setdefault(kind["kind"], []).append(schema)
    return {
        path
        for path in paths
        for kind, *steps in [path.split(".")]
        if any(_has(schema, steps, schemas) for schema in kinds.get(kind, ()))
    }


def _has(schema: Mapping[str, Any], steps: list[str], schemas: Mapping[str, Any]) -> bool:
    node: Mapping[str, Any] = schema
    for step in steps:
        node = _resolved(node, schemas)
        if "items" in node:
            node = _resolved(node["items"], schemas)
        below = node.get("properties", {}).get(step)
        if below is None:
            return False
        node = below
    return True


def _resolved(node: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    while True:
        reference = node.get("$ref") or next(
            (part["$ref"] for part in node.get("allOf", ()) if "$ref" in part), None
        )
        if reference is None:
            return node
        node = schemas[reference.rsplit("/", 1)[-1]]
