"""Tool schemas: what a request may send, and the form the prompt and the grammar can express.

Coding agents send JSON schemas of every origin. `read_tools` refuses what is no schema of an
object, and rewrites the rest without changing what it means where that can be done: references
with siblings are resolved, `oneOf` becomes `anyOf`, missing types are filled in (facts:
models.md §4.3 and §6E). Every rewrite is reported.
"""

import re
from collections.abc import Mapping
from typing import Any

from kimi_runtime.errors import RequestError
from kimi_runtime.protocol.chat import Tool
from kimi_runtime.protocol.rewrite import json_kind, rewrite
from kimi_runtime.protocol.unicode import require_unicode

MAX_TOOLS = 128

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,255}")


def deep_sorted(value: Any) -> Any:
    """The JSON value with the keys of every object in order."""
    if isinstance(value, Mapping):
        return {key: deep_sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [deep_sorted(item) for item in value]
    return value


def read_tools(raw: Any, *, param: str = "tools") -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """OpenAI's `tools` as tools, and what was rewritten. Raises RequestError naming the place."""
    if raw is None:
        return (), ()
    if not isinstance(raw, list):
        raise RequestError(f"{param} must be a list, got {json_kind(raw)}", param=param)
    if len(raw) > MAX_TOOLS:
        raise RequestError(f"{param} has {len(raw)} tools, the limit is {MAX_TOOLS}", param=param)
    changes: list[str] = []
    tools: dict[str, Tool] = {}
    for index, entry in enumerate(raw):
        tool = _read_tool(entry, f"{param}[{index}]", changes)
        if tool.name in tools:
            raise RequestError(
                f"two tools are named {tool.name!r}; give each its own name",
                param=f"{param}[{index}].function.name",
            )
        tools[tool.name] = tool
    return tuple(tools.values()), tuple(changes)


def _read_tool(raw: Any, param: str, changes: list[str]) -> Tool:
    if not isinstance(raw, Mapping):
        raise RequestError(f"{param} must be an object, got {json_kind(raw)}", param=param)
    if raw.get("type", "function") != "function":
        raise RequestError(
            f"{param}.type is {raw['type']!r}; only 'function' is supported", param=f"{param}.type"
        )
    function = raw.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(
            f"{param}.function must be an object, got {json_kind(function)}",
            param=f"{param}.function",
        )
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{param}.function.name must be 1 to 256 letters, digits, '_', '-' or '.', "
            f"got {name!r}",
            param=f"{param}.function.name",
        )
    description = function.get("description")
    if not isinstance(description, str | None):
        raise RequestError(
            f"{param}.function.description must be a string, got {json_kind(description)}",
            param=f"{param}.function.description",
        )
    description = require_unicode(description or "", f"{param}.function.description")
    place = f"{param}.function.parameters"
    return Tool(name, description, read_object_schema(function.get("parameters"), place, changes))


def read_object_schema(raw: Any, param: str, changes: list[str]) -> dict[str, Any]:
    """A schema whose root describes an object, rewritten; appends to `changes`.

    None (a function without parameters) is an object without properties. Raises RequestError.
    """
    if raw is None:
        return {"type": "object", "properties": {}}
    if not isinstance(raw, Mapping):
        raise RequestError(
            f"{param} must be a JSON schema object, got {json_kind(raw)}", param=param
        )
    if raw.get("type", "object") != "object":
        raise RequestError(
            f"{param} must describe an object, but its type is {raw['type']!r}; "
            'wrap it: {"type": "object", "properties": {...}}',
            param=f"{param}.type",
        )
    schema = rewrite(raw, param, changes)
    if schema.get("type") != "object":
        raise RequestError(f"{param} must describe an object", param=f"{param}.type")
    return schema
