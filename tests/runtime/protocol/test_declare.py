import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.protocol.chat import Tool
from kimi_runtime.protocol.declare import declare
from kimi_runtime.protocol.schema import deep_sorted


def body(parameters, description="", name="f"):
    """The lines of one declared tool."""
    text = declare([Tool(name, description, parameters)])
    head, tail = "# Tools\n\n## functions\nnamespace functions {\n", "\n}\n"
    assert text.startswith(head), text
    assert text.endswith(tail)
    return text[len(head) : -len(tail)]


def fields(**properties):
    return body({"type": "object", "properties": properties})


def test_required_parameters_come_first_and_each_group_by_name():
    schema = {
        "type": "object",
        "properties": {name: {"type": "string"} for name in ("z", "b", "y", "a")},
        "required": ["z", "y"],
    }
    assert body(schema) == (
        "type f = (_: {\n  y: string,\n  z: string,\n  a?: string,\n  b?: string\n}) => any;"
    )


def test_descriptions_limits_and_defaults_are_comments_above():
    schema = {"type": "integer", "description": "How many.\n\nAt most 9.", "default": 3}
    assert fields(n={**schema, "maximum": 9, "minimum": 1}) == (
        "type f = (_: {\n  // How many.\n\n  // At most 9.\n  // maximum: 9, minimum: 1\n"
        "  // Default: 3\n  n?: number\n}) => any;"
    )


@pytest.mark.parametrize(
    ("schema", "shown"),
    [
        ({"type": "integer"}, "number"),
        ({"type": ["string", "null"]}, "string | null"),
        ({"type": ["object", "array"]}, "{} | Array<any>"),
        ({"enum": ["a", 1, True, None]}, '"a" | 1 | True | None'),
        ({"type": "array"}, "Array<any>"),
        ({"type": "array", "items": {"type": "integer"}}, "Array<number>"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string | null"),
        ({"type": "object"}, "{}"),
        ({"type": "object", "additionalProperties": False}, "{\n    [k: string]: never\n  }"),
        (
            {"type": "object", "additionalProperties": {"type": "number"}},
            "{\n    [k: string]: number\n  }",
        ),
        ({}, "any"),
        (True, "any"),
        (
            {"type": "array", "items": {"type": "string", "description": "A path."}},
            "Array<\n    // A path.\n    string\n  >",
        ),
    ],
)
def test_types_read_like_typescript(schema, shown):
    assert fields(x=schema) == f"type f = (_: {{\n  x?: {shown}\n}}) => any;"


def test_defaults_print_as_python_and_json_do():
    assert "// Default: True\n" in fields(x={"type": "boolean", "default": True})
    assert '// Default: "é"\n' in fields(x={"type": "string", "default": "é"})


def test_definitions_are_interfaces_and_a_self_reference_names_the_root():
    schema = {
        "type": "object",
        "properties": {"child": {"$ref": "#"}, "node": {"$ref": "#/$defs/Node"}},
        "$defs": {"Node": {"type": "object", "description": "One.", "properties": {"v": {}}}},
    }
    assert body(schema, "Walks.") == (
        "interface parameters {\n  child?: parameters,\n  node?: Node\n}\n"
        "// One.\ninterface Node {\n  v?: any\n}\n"
        "// Walks.\ntype f = (_: parameters) => any;"
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"x": {"description": "no type"}}},
        {"properties": {"x": {"$ref": "#/$defs/Gone"}}},
        {"properties": {"x": {"type": "string", "enum": [1]}}},
        {"properties": {"x": {"type": ["string", "odd"]}}},
    ],
)
def test_what_has_no_typescript_form_falls_back_to_compact_json(schema):
    tool = Tool("f", "é", schema)
    function = {"description": "é", "name": "f", "parameters": deep_sorted(schema)}
    expected = [{"function": function, "type": "function"}]
    text = declare([tool])
    assert text == json.dumps(expected, separators=(",", ":"), ensure_ascii=False)


def test_key_order_of_a_schema_does_not_change_the_prompt():
    a = {"type": "object", "properties": {"x": {"type": "string", "minLength": 1}, "y": {}}}
    b = {"properties": {"y": {}, "x": {"minLength": 1, "type": "string"}}, "type": "object"}
    assert declare([Tool("f", "", a)]) == declare([Tool("f", "", b)])


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                ["type", "properties", "items", "anyOf", "enum", "$ref", "$defs", "required"]
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["type", "properties", "$defs", "required"]), JSON))
def test_any_json_is_declared_somehow(schema):
    assert declare([Tool("f", "", schema)])
