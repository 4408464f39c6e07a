"""The CRDs, from the models.

pydantic's JSON schema is not the structural schema Kubernetes wants. `$ref` is inlined; `anyOf [x,
null]` becomes `x` (an API server drops a null of a field that is not nullable, so it reads as
absent; nullable would make CEL's `has` true for it); exclusive bounds are written the boolean way,
or as a plain minimum for integers; `const` becomes an enum; titles and `additionalProperties:
false` go, since unknown fields are pruned or refused by the API server itself. Defaults stay on
leaves that no preset may set. Every list, map and string has a bound, or the API server's cost
estimate of the CEL rules refuses the CRD.
"""

from typing import Annotated, Any

import yaml
from pydantic import BaseModel, TypeAdapter

from kimi_operator.api.base import GROUP, VERSION, ApiModel
from kimi_operator.api.deployment import KimiDeployment
from kimi_operator.api.workers import KimiWorkers

HEADER = "# Generated from operator/kimi_operator/api by scripts/generate; do not edit.\n"
SIZE_CAP_BYTES = 200_000
UNIT_LENGTH = 32
_DROPPED = {"title", "discriminator", "x-presettable", "x-preserve", "$defs"}
_NUMBER_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

Schema = dict[str, Any]


def crds() -> dict[str, str]:
    """File name -> text of each CRD."""
    return {
        "kimideployments.yaml": _text(_deployments()),
        "kimiworkers.yaml": _text(_workers()),
    }


def _deployments() -> Schema:
    columns = [
        _column("Ready", '.status.conditions[?(@.type=="Ready")].status'),
        _column("Engine", ".spec.engine"),
        _column("Model", ".status.model"),
        _column("Prefill", ".status.pools.prefill.summary"),
        _column("Decode", ".status.pools.decode.summary"),
        _column("URL", ".status.url"),
        _column("Reason", '.status.conditions[?(@.type=="Ready")].reason', priority=1),
        _column("Revision", ".status.currentRevision", priority=1),
        _column("GPUs", ".status.gpu.used", kind="integer", priority=1),
        _column("Age", ".metadata.creationTimestamp", kind="date"),
    ]
    return _crd(
        KimiDeployment,
        names={
            "plural": "kimideployments",
            "singular": "kimideployment",
            "kind": "KimiDeployment",
            "listKind": "KimiDeploymentList",
            "shortNames": ["kimi"],
        },
        columns=columns,
        subresources={"status": {}},
    )


def _workers() -> Schema:
    columns = [
        _column("Deployment", ".spec.deployment"),
        _column("Role", ".spec.role"),
        _column("Desired", ".spec.replicas", kind="integer"),
        _column("Current", ".status.replicas", kind="integer"),
        _column("Age", ".metadata.creationTimestamp", kind="date"),
    ]
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    return _crd(
        KimiWorkers,
        names={
            "plural": "kimiworkers",
            "singular": "kimiworkers",
            "kind": "KimiWorkers",
            "listKind": "KimiWorkersList",
            "shortNames": ["kimiw"],
        },
        columns=columns,
        subresources={"status": {}, "scale": scale},
    )


def _column(name: str, path: str, *, kind: str = "string", priority: int = 0) -> Schema:
    column: Schema = {"name": name, "type": kind, "jsonPath": path}
    return {**column, "priority": priority} if priority else column


def _crd(
    model: type[ApiModel], *, names: Schema, columns: list[Schema], subresources: Schema
) -> Schema:
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": structural(model)},
        "subresources": subresources,
        "additionalPrinterColumns": columns,
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names['plural']}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": names,
            "versions": [version],
        },
    }


def structural(model: type[ApiModel]) -> Schema:
    """The structural schema of a resource, with the CEL rules of every model in it."""
    raw = model.model_json_schema(by_alias=True, mode="validation")
    # the API server has its own schema of these and allows no other
    own = {"metadata": {"type": "object"}}
    fixed = {field: {"type": "string", "maxLength": 64} for field in ("apiVersion", "kind")}
    raw = {**raw, "properties": {**raw["properties"], **fixed, **own}, "required": ["spec"]}
    return _node(raw, raw.get("$defs", {}), models_of(model), model.__name__)


def models_of(model: type[BaseModel]) -> dict[str, type[ApiModel]]:
    """Every model the resource is made of, by the name pydantic's `$defs` use."""
    found: dict[str, type[ApiModel]] = {}
    pending: list[Any] = [model]
    while pending:
        annotation = pending.pop()
        if isinstance(annotation, type) and issubclass(annotation, ApiModel):
            if annotation.__name__ not in found:
                found[annotation.__name__] = annotation
                pending += [field.annotation for field in annotation.model_fields.values()]
        else:
            pending += getattr(annotation, "__args__", ())
    return found


def _node(raw: Schema, defs: Schema, models: dict[str, type[ApiModel]], path: str) -> Schema:
    """One node of pydantic's schema, and all below it, as a structural node."""
    model = None
    if "$ref" in raw:
        name = raw["$ref"].rsplit("/", 1)[-1]
        raw = {**defs[name], **{key: value for key, value in raw.items() if key != "$ref"}}
        model = models.get(name)
    elif path in models:
        model = models[path]
    if model is not None and "properties" in raw:
        raw = _as_written(model, raw)
    if "anyOf" in raw:
        (inner,) = (option for option in raw["anyOf"] if option.get("type") != "null")
        around = {key: value for key, value in raw.items() if key != "anyOf"}
        return _node({**inner, **around}, defs, models, path)
    if raw.get("x-preserve"):
        return {
            "type": "object",
            "description": raw["description"],
            "x-kubernetes-preserve-unknown-fields": True,
        }
    node = {key: value for key, value in raw.items() if key not in _DROPPED}
    _settle_scalar(node, raw, path)
    _settle_children(node, defs, models, path)
    if model is not None:
        rules = _validations(model)
        if rules:
            node["x-kubernetes-validations"] = rules
    return node


def _settle_scalar(node: Schema, raw: Schema, path: str) -> None:
    """Constants, bounds and defaults of one node, in place."""
    if "const" in node:
        node["enum"] = [node.pop("const")]
    if node.get("type") == "integer":
        node["format"] = "int64"
        if "exclusiveMinimum" in node:
            node["minimum"] = node.pop("exclusiveMinimum") + 1
    elif node.get("type") == "string":
        for bound in _NUMBER_BOUNDS:  # of the number a unit's text stands for
            node.pop(bound, None)
        if "enum" not in node:
            node.setdefault("maxLength", UNIT_LENGTH if "pattern" in node else None)
            if node["maxLength"] is None:
                raise ValueError(f"{path}: a text without max_length")
    # Kubernetes 1.20 reads a default of "" as null and refuses the CRD
    keeps_default = (
        not raw.get("x-presettable")
        and isinstance(raw.get("default"), str | int | float | bool)
        and raw["default"] != ""
    )
    if not keeps_default:
        node.pop("default", None)


def _as_written(model: type[ApiModel], raw: Schema) -> Schema:
    """The model's properties with defaults as people write them: 30s, not 30.0."""
    fields = {str(field.alias): field for field in model.model_fields.values()}
    properties = {}
    for name, child in raw["properties"].items():
        field = fields[name]
        if isinstance(child.get("default"), int | float) and child.get("type") == "string":
            unit: TypeAdapter[Any] = TypeAdapter(Annotated[(field.annotation, *field.metadata)])  # type: ignore[arg-type]
            child = {**child, "default": unit.dump_python(field.default, mode="json")}
        properties[name] = child
    return {**raw, "properties": properties}


def _settle_children(
    node: Schema, defs: Schema, models: dict[str, type[ApiModel]], path: str
) -> None:
    """Lists, maps and fields below one node, in place."""
    if node.get("type") == "array":
        if "maxItems" not in node:
            raise ValueError(f"{path}: a list without max_length")
        node["items"] = _node(node["items"], defs, models, f"{path}[]")
    if node.get("type") != "object":
        return
    values = node.pop("additionalProperties", False)
    node.pop("propertyNames", None)
    if "properties" in node:
        node["properties"] = {
            name: _node(child, defs, models, f"{path}.{name}")
            for name, child in node["properties"].items()
        }
    elif isinstance(values, dict):
        if "maxProperties" not in node:
            raise ValueError(f"{path}: a map without max_length")
        node["additionalProperties"] = _node(values, defs, models, f"{path}{{}}")


def _validations(model: type[ApiModel]) -> list[Schema]:
    rules = [
        {"rule": rule.cel, "message": f"{rule.field}: {rule.message}".removeprefix(": ")}
        for rule in model.rules
        if rule.cel is not None
    ]
    return rules + [{"rule": rule.cel, "message": rule.message} for rule in model.update_rules]


def _text(crd: Schema) -> str:
    text = HEADER + yaml.safe_dump(crd, sort_keys=False, width=100)
    if len(text) > SIZE_CAP_BYTES:
        raise ValueError(f"{crd['metadata']['name']} has {len(text)} bytes, over {SIZE_CAP_BYTES}")
    return text
