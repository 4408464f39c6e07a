"""The defaults an API server fills into a resource, from the same schema as the CRDs."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from kimi_operator.api.deployment import KimiDeployment
from kimi_operator.api.schema import Schema, structural


@lru_cache
def _schema() -> Schema:
    return structural(KimiDeployment)


def stored(document: Mapping[str, Any]) -> dict[str, Any]:
    """A KimiDeployment as the API server would store it: a new one, with its defaults.

    A default is filled into objects that are there and makes none, as structural defaulting has it.
    """
    spec = _defaulted(document.get("spec", {}), _schema()["properties"]["spec"])
    return {**document, "spec": spec}


def _defaulted(value: Any, schema: Schema) -> Any:
    if isinstance(value, Mapping) and "properties" in schema:
        fields: Schema = schema["properties"]
        filled = {
            name: field["default"]
            for name, field in fields.items()
            if "default" in field and value.get(name) is None
        }
        below = {
            name: _defaulted(inner, fields.get(name, {}))
            for name, inner in value.items()
            if inner is not None
        }
        return {**below, **filled}
    if isinstance(value, list | tuple) and "items" in schema:
        return [_defaulted(item, schema["items"]) for item in value]
    return value
