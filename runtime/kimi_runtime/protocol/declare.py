"""Tools as a K2 prompt declares them: TypeScript-like types, compact JSON where that fails.

The models are trained on exactly this text, so its oddities are part of the format: required
parameters come first and each group by name, `integer` reads `number`, a default prints as Python
would, a self-referring root becomes the interface `parameters` (facts: K2.5's tool declarations).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kimi_runtime.protocol.chat import Tool
from kimi_runtime.protocol.schema import deep_sorted

_INDENT = "  "
_DEFINITIONS = "#/$defs/"
_CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("minItems", "maxItems"),
}
_UNION = {"integer": "number", "object": "{}", "array": "Array<any>"}
_UNION |= {name: name for name in ("string", "number", "boolean", "null")}


class _Undeclarable(ValueError):
    """A schema the TypeScript form has no words for."""


@dataclass(frozen=True, slots=True)
class _Type:
    """A parsed schema: its text at an indent, and what its comment says."""

    text: Callable[[str], str]
    description: str = ""
    constraints: tuple[tuple[str, Any], ...] = ()

    def comment(self, indent: str) -> str:
        lines = [_comment(self.description, indent)] if self.description else []
        if self.constraints:
            pairs = ", ".join(f"{key}: {value}" for key, value in sorted(self.constraints))
            lines.append(f"{indent}// {pairs}")
        return "".join(f"{line}\n" for line in lines)


@dataclass(slots=True)
class _Scope:
    """What references of one tool may point to."""

    definitions: dict[str, Any] = field(default_factory=dict)
    refers_to_root: bool = False


def declare(tools: Sequence[Tool]) -> str:
    """The body of the tool declaration message. `tools` must not be empty."""
    sorted_tools = [
        deep_sorted(
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": dict(tool.parameters),
                },
            }
        )
        for tool in tools
    ]
    try:
        functions = [_function(tool["function"]) for tool in sorted_tools]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        # Any schema may arrive here; what the typed form cannot say, JSON can.
        return json.dumps(sorted_tools, ensure_ascii=False, separators=(",", ":"))
    return "# Tools\n\n## functions\nnamespace functions {\n" + "\n".join(functions) + "\n}\n"


def _function(function: Mapping[str, Any]) -> str:
    scope = _Scope()
    parameters = function["parameters"]
    fields, root = _object(parameters, scope)
    lines = []
    argument = root.text("")
    if scope.refers_to_root:
        body = ",\n".join(one(_INDENT) for one in fields)
        lines.append(f"interface parameters {{\n{body}\n}}" if body else "interface parameters {}")
        argument = "parameters"
    for name, schema in tuple(scope.definitions.items()):
        described = _comment(schema["description"], "") + "\n" if schema.get("description") else ""
        lines.append(f"{described}interface {name} {_parse(schema, scope).text('')}")
    if function["description"]:
        lines.append(_comment(function["description"], ""))
    lines.append(f"type {function['name']} = (_: {argument}) => any;")
    return "\n".join(lines)


def _comment(text: str, indent: str) -> str:
    return "\n".join(f"{indent}// {line}" if line else "" for line in text.split("\n"))


def _parse(schema: Any, scope: _Scope) -> _Type:
    if isinstance(schema, bool) or schema == {}:
        return _constant("null" if schema is False else "any")
    description = schema.get("description", "")
    if "$ref" in schema:
        return _constant(_reference(schema["$ref"], scope), description)
    if "anyOf" in schema:
        options = [_parse(option, scope) for option in schema["anyOf"]]
        return _Type(lambda at: " | ".join(option.text(at) for option in options), description)
    if "enum" in schema:
        return _constant(_enum(schema), description)
    kind = schema.get("type")
    if isinstance(kind, list):
        return _constant(" | ".join(_UNION[name] for name in kind), description)
    if kind == "object":
        return _object(schema, scope)[1]
    if not isinstance(kind, str):
        raise _Undeclarable(f"no type in {schema}")
    limits = tuple((key, schema[key]) for key in _CONSTRAINTS.get(kind, ()) if key in schema)
    if kind == "array":
        return _Type(_array(schema, scope), description, limits)
    name = "number" if kind == "integer" else kind
    return _Type(lambda _: name, description, limits)


def _constant(text: str, description: str = "") -> _Type:
    return _Type(lambda _: text, description)


def _reference(target: str, scope: _Scope) -> str:
    if target == "#":
        scope.refers_to_root = True
        return "parameters"
    name = target.rpartition("/")[2]
    if not target.startswith(_DEFINITIONS) or name not in scope.definitions:
        raise _Undeclarable(f"reference {target}")
    return name


def _enum(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        kinds = [name for name in kind if name != "null"]
        if len(kind) > 2 or (len(kind) == 2 and len(kinds) == 2):
            raise _Undeclarable(f"enum of {kind}")
        kind = kinds[0] if kinds else "null"
    types: dict[str, Any] = {"string": str, "number": (int, float), "integer": int, "boolean": bool}
    for value in schema["enum"]:
        if value is not None and kind in types and not isinstance(value, types[kind]):
            raise _Undeclarable(f"{value!r} is no {kind}")
    return " | ".join(f'"{v}"' if isinstance(v, str) else str(v) for v in schema["enum"])


def _array(schema: Mapping[str, Any], scope: _Scope) -> Callable[[str], str]:
    item = _parse(schema["items"], scope) if schema.get("items") else _constant("any")

    def text(at: str) -> str:
        inner = at + _INDENT
        comment = item.comment(inner)
        if comment:
            return f"Array<\n{comment}{inner}{item.text(inner)}\n{at}>"
        return f"Array<{item.text(at)}>"

    return text


def _object(schema: Mapping[str, Any], scope: _Scope) -> tuple[list[Callable[[str], str]], _Type]:
    """The fields in their own order, and the type with them in declaration order."""
    scope.definitions.update(schema.get("$defs") or {})
    rest = schema.get("additionalProperties")
    rest_type = _parse(rest, scope) if isinstance(rest, Mapping) else None
    required = set(schema.get("required", ()))
    fields = {
        name: _field(name, value, name not in required, scope)
        for name, value in schema.get("properties", {}).items()
    }
    ordered = [fields[name] for name in sorted(fields, key=lambda n: (n not in required, n))]

    def text(at: str) -> str:
        inner = at + _INDENT
        lines = [one(inner) for one in ordered]
        if rest_type is not None:
            lines.append(f"{inner}[k: string]: {rest_type.text(inner)}")
        elif rest is not None:
            lines.append(f"{inner}[k: string]: {'any' if rest else 'never'}")
        return "{\n" + ",\n".join(lines) + f"\n{at}}}" if lines else "{}"

    return list(fields.values()), _Type(text, schema.get("description", ""))


def _field(name: str, schema: Any, optional: bool, scope: _Scope) -> Callable[[str], str]:
    kind = _parse(schema, scope)
    default = schema.get("default") if isinstance(schema, Mapping) else None

    def text(at: str) -> str:
        comment = kind.comment(at)
        if default is not None:
            shown = (
                repr(default)
                if isinstance(default, int | float)
                else json.dumps(default, ensure_ascii=False)
            )
            comment += f"{at}// Default: {shown}\n"
        return f"{comment}{at}{name}{'?' if optional else ''}: {kind.text(at)}"

    return text
