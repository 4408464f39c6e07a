"""Tool schemas as the grammar wants them, and how much text their smallest values take."""

import json
from collections.abc import Mapping
from typing import Any

from kimi_runtime.protocol.vocabulary import Vocabulary

# Formats the grammar library enforces; by JSON schema's rules any other is only a remark.
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_REMARKS = ("description", "title", "default", "examples", "deprecated", "readOnly", "writeOnly")
_PATTERN_TOKENS = 64
_NUMBER_TOKENS = 24
_ANY_TOKENS = 4


def constrained(schema: Any, *, by_name: bool, closed: bool = True) -> Any:
    """The schema with only what constrains, objects closed and their keys in the prompt's order.

    A tool declaration shows required parameters first and each group by name (`by_name`); a model
    is held to that order only where `grammar_rules` has no rules for any order. An object that
    lists properties and says nothing about others gets no others: what a model invents beyond them
    is never wanted. `closed` is False in branches of an `anyOf` beside properties, which must not
    exclude each other's.
    """
    if not isinstance(schema, Mapping):
        return schema
    node = {key: value for key, value in schema.items() if key not in _REMARKS}
    if node.get("format") not in _FORMATS:
        node.pop("format", None)
    mixed = "anyOf" in node and "properties" in node
    if "properties" in node:
        required = node.get("required", ())
        names = list(node["properties"])
        if by_name:
            names.sort(key=lambda name: (name not in required, name))
        node["properties"] = {
            name: constrained(node["properties"][name], by_name=by_name) for name in names
        }
        open_end = "additionalProperties" in node or "patternProperties" in node
        if closed and names and not mixed and not open_end:
            node["additionalProperties"] = False
    for key in [key for key in ("$defs", "patternProperties") if key in node]:
        node[key] = {k: constrained(v, by_name=by_name) for k, v in node[key].items()}
    for key in [key for key in ("items", "additionalProperties") if key in node]:
        node[key] = constrained(node[key], by_name=by_name)
    for key in [key for key in ("anyOf", "prefixItems") if key in node]:
        node[key] = [
            constrained(value, by_name=by_name, closed=not (mixed and key == "anyOf"))
            for value in node[key]
        ]
    return node


class Sizes:
    """Upper bounds, in tokens, of the smallest value that fits a schema and its parts."""

    def __init__(self, vocabulary: Vocabulary, root: Mapping[str, Any]) -> None:
        self._vocabulary, self._root = vocabulary, root

    def largest_part(self) -> int:
        """The most that starting one more value can add to an output that is to be closed."""
        return max((self._smallest(node, ()) for node in _nodes(self._root)), default=0) + 2

    def _smallest(self, node: Any, refs: tuple[str, ...]) -> int:
        if not isinstance(node, Mapping):
            return _ANY_TOKENS
        if "$ref" in node:
            ref = node["$ref"]
            target = self._root.get("$defs", {}).get(ref.rpartition("/")[2], self._root)
            return _ANY_TOKENS if ref in refs else self._smallest(target, (*refs, ref))
        if "enum" in node:
            return max(self._text(value) for value in node["enum"])
        own = self._of_type(node, refs)
        options = [self._smallest(option, refs) for option in node.get("anyOf", ())]
        return own + max(options, default=0)

    def _of_type(self, node: Mapping[str, Any], refs: tuple[str, ...]) -> int:
        """For a list of types the sum: generous, and never too small."""
        kind = node.get("type")
        kinds = kind if isinstance(kind, list) else [kind]
        total = 0
        for one in kinds:
            if one == "object":
                properties = node.get("properties", {})
                total += 2 + sum(
                    self._text(name) + 3 + self._smallest(properties.get(name), refs)
                    for name in node.get("required", ())
                )
            elif one == "array":
                item = self._smallest(node.get("items"), refs)
                total += 2 + int(node.get("minItems", 0)) * (1 + item)
            elif one == "string":
                hard = "pattern" in node or "format" in node
                total += 2 + int(node.get("minLength", 0)) + hard * _PATTERN_TOKENS
            elif one in ("number", "integer"):
                total += _NUMBER_TOKENS
            else:
                total += _ANY_TOKENS
        return total

    def _text(self, value: Any) -> int:
        text = json.dumps(value, ensure_ascii=False)
        return len(self._vocabulary.encode_text(text))


def _nodes(schema: Any) -> list[Mapping[str, Any]]:
    """Every schema inside a schema, itself first."""
    found: list[Mapping[str, Any]] = []
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, Mapping):
            continue
        found.append(node)
        for key in ("properties", "patternProperties", "$defs"):
            waiting += node.get(key, {}).values()
        for key in ("items", "additionalProperties"):
            waiting.append(node.get(key))
        for key in ("anyOf", "prefixItems"):
            waiting += node.get(key, ())
    return found
