"""A JSON schema in the form that a prompt shows and a grammar follows.

Rewrites keep the meaning where they can (a reference with siblings is resolved, `oneOf` becomes
`anyOf`, missing types are filled in) and drop what neither side can express; every one is reported.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kimi_runtime.errors import RequestError
from kimi_runtime.protocol.unicode import require_unicode

MAX_DEPTH = 32
MAX_NODES = 20_000

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_SILENT = ("$schema", "definitions", "$defs")
_DROPPED = (*_SILENT, "$id", "$anchor", "$comment", "if", "then", "else", "not")
_DROPPED_TOO = ("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties")
_MAPS = ("properties", "patternProperties")
_SINGLES = ("items", "additionalProperties")
_LISTS = ("anyOf", "prefixItems")

Node = dict[str, Any]


def rewrite(root: Mapping[str, Any], param: str, changes: list[str]) -> Node:
    """The schema rewritten, definitions under `$defs` of its root; appends to `changes`.

    Raises RequestError naming the place, as a path that starts with `param`.
    """
    return _Rewriter(root, param, changes).root()


def json_kind(value: Any) -> str:
    """What JSON calls a value's type, with its article."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
        case _:
            return "an object"


@dataclass(frozen=True, slots=True)
class _At:
    """Where a node is: its path, its depth, and the references it was reached through."""

    place: str
    depth: int = 0
    refs: tuple[str, ...] = ()

    def down(self, step: str) -> "_At":
        return replace(self, place=self.place + step, depth=self.depth + 1)


class _Rewriter:
    def __init__(self, root: Mapping[str, Any], param: str, changes: list[str]) -> None:
        self._root, self._param, self._changes = root, param, changes
        self._nodes = 0

    def root(self) -> Node:
        at = _At(self._param)
        root = dict(self._root)
        if not {"type", "anyOf", "oneOf", "allOf", "$ref"} & set(root):
            root["type"] = "object"
        schema = self._node(root, at)
        assert isinstance(schema, dict)
        definitions = {}
        for key in ("definitions", "$defs"):
            for name, value in _mapping(self._root.get(key, {}), f"{at.place}.{key}"):
                definitions[name] = self._node(value, at.down(f".{key}.{name}"))
        if definitions:
            schema["$defs"] = definitions
        return schema

    def _note(self, at: _At, what: str) -> None:
        self._changes.append(f"{at.place}: {what}")

    def _node(self, raw: Any, at: _At) -> Node | bool:
        self._nodes += 1
        if at.depth > MAX_DEPTH or self._nodes > MAX_NODES:
            raise RequestError(
                f"{self._param} is nested deeper than {MAX_DEPTH} levels or has more than "
                f"{MAX_NODES} parts, references resolved; simplify it",
                param=self._param,
            )
        if isinstance(raw, bool):
            return raw
        node, at = self._resolve(dict(_mapping(raw, at.place)), at)
        for key in [key for key in (*_DROPPED, *_DROPPED_TOO) if key in node]:
            del node[key]
            if key not in _SILENT:
                self._note(at, f"{key} was dropped")
        node = self._merge_all_of(node, at)
        self._unify_alternatives(node, at)
        self._check_type(node, at)
        self._children(node, at)
        return node

    def _resolve(self, node: Node, at: _At) -> tuple[Node, _At]:
        """A reference alone stays; with siblings its target is merged in, unless it recurs."""
        while "$ref" in node:
            ref = node["$ref"]
            target = self._target(ref, at)
            ref = ref.replace("#/definitions/", "#/$defs/")
            siblings = {key: value for key, value in node.items() if key != "$ref"}
            if not siblings:
                return {"$ref": ref}, at
            if ref in at.refs or not isinstance(target, Mapping):
                self._note(at, "keywords beside a recursive $ref were dropped")
                return {"$ref": ref}, at
            self._note(at, "$ref beside other keywords was resolved")
            node, at = {**target, **siblings}, replace(at, refs=(*at.refs, ref))
        return node, at

    def _target(self, ref: Any, at: _At) -> Any:
        """What a reference points to: always inside this schema."""
        target: Any = self._root
        if not isinstance(ref, str) or not ref.startswith("#"):
            raise self._dangling(ref, at)
        for step in ref[1:].split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping) and name in target:
                target = target[name]
            elif isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            else:
                raise self._dangling(ref, at)
        return target

    def _dangling(self, ref: Any, at: _At) -> RequestError:
        return RequestError(
            f"{at.place}.$ref is {ref!r}, which is not in this schema; "
            "only references like '#/$defs/name' work",
            param=f"{at.place}.$ref",
        )

    def _merge_all_of(self, node: Node, at: _At) -> Node:
        """`allOf` merged into the node: properties and required are united, else the first wins."""
        if "allOf" not in node:
            return node
        self._note(at, "allOf was merged")
        for option in _list(node.pop("allOf"), f"{at.place}.allOf"):
            if not isinstance(option, Mapping) or "if" in option:
                continue  # a condition: no grammar here can follow it
            inner, _ = self._resolve({"description": "", **option}, at)
            properties: Node = {}
            required: list[Any] = []
            for source in (inner, node):
                properties |= _mapping(source.get("properties", {}), f"{at.place}.properties")
                required += _list(source.get("required", []), f"{at.place}.required")
            inner = {k: v for k, v in inner.items() if k not in _DROPPED and v != ""}
            node = {**inner, **node}
            if properties:
                node["properties"] = properties
            if required:
                node["required"] = required
        return node

    def _unify_alternatives(self, node: Node, at: _At) -> None:
        """`oneOf` as `anyOf`, `const` as `enum`, OpenAPI's `nullable` as a type."""
        if "oneOf" in node:
            self._note(at, "oneOf became anyOf")
            options = node.pop("oneOf")
            node.setdefault("anyOf", options)
        if "const" in node:
            value = node.pop("const")
            node.setdefault("enum", [value])
        if node.pop("nullable", False) is True and isinstance(node.get("type"), str):
            self._note(at, "nullable became a type")
            node["type"] = [node["type"], "null"]
        if "anyOf" in node and "type" in node and node["type"] != "object":
            kind = node.pop("type")
            self._note(at, "type beside anyOf moved into its branches")
            node["anyOf"] = [
                {"type": kind, **option}
                if isinstance(option, Mapping) and not {"type", "$ref", "enum"} & set(option)
                else option
                for option in _list(node["anyOf"], f"{at.place}.anyOf")
            ]

    def _check_type(self, node: Node, at: _At) -> None:
        """The types are JSON schema's; a missing one that other keywords imply is filled in."""
        kind = node.get("type")
        if kind is None:
            if not {"anyOf", "$ref", "enum"} & set(node):
                implied = {"properties": "object", "items": "array"}
                for key in [key for key in implied if key in node][:1]:
                    self._note(at, f"the missing type was filled in as {implied[key]}")
                    node["type"] = implied[key]
            return
        kinds = kind if isinstance(kind, list) else [kind]
        if not kinds or any(one not in TYPES for one in kinds):
            raise RequestError(
                f"{at.place}.type is {kind!r}; it must be one of {', '.join(TYPES)}",
                param=f"{at.place}.type",
            )

    def _children(self, node: Node, at: _At) -> None:
        for key in [key for key in _MAPS if key in node]:
            node[key] = {
                name: self._node(value, at.down(f".{key}.{name}"))
                for name, value in _mapping(node[key], f"{at.place}.{key}")
            }
        for key in [key for key in _SINGLES if key in node]:
            node[key] = self._node(node[key], at.down(f".{key}"))
        for key in [key for key in _LISTS if key in node]:
            node[key] = [
                self._node(value, at.down(f".{key}[{number}]"))
                for number, value in enumerate(_list(node[key], f"{at.place}.{key}"))
            ]
        if "enum" in node and not _list(node["enum"], f"{at.place}.enum"):
            raise RequestError(f"{at.place}.enum is empty", param=f"{at.place}.enum")
        if "required" in node:
            self._add_required(node, at)

    def _add_required(self, node: Node, at: _At) -> None:
        """Every required name becomes a property, so that prompt and grammar show it."""
        place = f"{at.place}.required"
        names = _list(node["required"], place)
        if not all(isinstance(name, str) for name in names):
            raise RequestError(f"{place} must list names", param=place)
        node["required"] = names = list(dict.fromkeys(names))
        properties = node.get("properties", {})
        missing = [name for name in names if name not in properties]
        for name in missing:
            self._note(at, f"required {require_unicode(name, place)!r} was added to properties")
        if missing:
            node["properties"] = {**properties, **{name: {} for name in missing}}


def _mapping(raw: Any, place: str) -> list[tuple[str, Any]]:
    if not isinstance(raw, Mapping):
        raise RequestError(f"{place} must be an object, got {json_kind(raw)}", param=place)
    return [(require_unicode(name, place), value) for name, value in raw.items()]


def _list(raw: Any, place: str) -> list[Any]:
    if not isinstance(raw, list):
        raise RequestError(f"{place} must be a list, got {json_kind(raw)}", param=place)
    return raw
