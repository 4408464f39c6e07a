import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.errors import RequestError
from kimi_runtime.protocol.chat import Tool
from kimi_runtime.protocol.rewrite import rewrite
from kimi_runtime.protocol.schema import deep_sorted, read_object_schema, read_tools


def entry(parameters, name="f"):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def prop(schema, **root):
    """One property's schema rewritten, and the changes."""
    changes = []
    raw = {"type": "object", "properties": {"x": schema}, **root}
    return read_object_schema(raw, "p", changes)["properties"]["x"], changes


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ({}, "tools"),
        (["x"], "tools[0]"),
        ([{"type": "builtin_function"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([entry(None, name="no spaces")], "tools[0].function.name"),
        ([entry(None, name="")], "tools[0].function.name"),
        ([entry(None, name="x" * 257)], "tools[0].function.name"),
        ([entry(None), entry(None)], "tools[1].function.name"),
        ([entry("text")], "tools[0].function.parameters"),
        ([entry([])], "tools[0].function.parameters"),
        ([entry({"type": "string"})], "tools[0].function.parameters.type"),
        ([entry({"$ref": "#/x"})], "tools[0].function.parameters.$ref"),
        ([entry({"properties": []})], "tools[0].function.parameters.properties"),
        ([entry({"properties": {"x": 3}})], "tools[0].function.parameters.properties.x"),
        (
            [entry({"properties": {"x": {"type": "str"}}})],
            "tools[0].function.parameters.properties.x.type",
        ),
        ([entry({"required": "x"})], "tools[0].function.parameters.required"),
        ([entry({"properties": {"\ud800": {}}})], "tools[0].function.parameters.properties"),
        ([entry(None, name=f"t{n}") for n in range(129)], "tools"),
    ],
)
def test_a_wrong_tool_is_refused_where_it_is_wrong(tools, param):
    with pytest.raises(RequestError) as caught:
        read_tools(tools)
    assert caught.value.param == param
    assert caught.value.status == 400


def test_plain_tools_are_taken_as_they_are():
    schema = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    function = {"name": "7-zip.pack_2", "description": "Packs.", "parameters": schema}
    tools, changes = read_tools([{"type": "function", "function": function}])
    assert tools == (Tool("7-zip.pack_2", "Packs.", schema),)
    assert changes == ()
    assert read_tools(None) == ((), ())


@pytest.mark.parametrize("parameters", [None, {}, {"properties": {}}])
def test_a_tool_without_parameters_takes_an_object(parameters):
    (tool,), _ = read_tools([entry(parameters)])
    assert tool.parameters["type"] == "object"


NODE = {"Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"properties": {"a": {"type": "null"}}}, {"type": "object"}),
        ({"items": {"type": "null"}}, {"type": "array"}),
        ({"oneOf": [{"type": "null"}]}, {"anyOf": [{"type": "null"}]}),
        ({"const": 3}, {"enum": [3]}),
        ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
        (
            {"type": "string", "anyOf": [{"minLength": 2}, {"type": "null"}]},
            {"anyOf": [{"type": "string", "minLength": 2}, {"type": "null"}]},
        ),
        (
            {"allOf": [{"properties": {"a": {}}, "required": ["a"]}, {"$ref": "#/$defs/Node"}]},
            {"type": "object", "required": ["a"]},
        ),
        ({"$ref": "#/$defs/Node", "description": "d"}, {"type": "object", "description": "d"}),
        ({"$ref": "#/definitions/Leaf"}, {"$ref": "#/$defs/Leaf"}),
        ({"type": "object", "required": ["a"]}, {"properties": {"a": {}}}),
        ({"type": "string", "if": {}, "then": {}, "not": {}}, {"type": "string"}),
    ],
)
def test_other_dialects_are_rewritten_and_reported(schema, expected):
    got, changes = prop(schema, **{"$defs": NODE, "definitions": {"Leaf": {"type": "null"}}})
    assert {key: got.get(key) for key in expected} == expected
    assert not {"oneOf", "allOf", "const", "if", "nullable"} & set(got)
    assert changes or "const" in schema or "definitions" in str(schema)


def test_a_recursive_reference_with_siblings_is_unfolded_once():
    definitions = {
        "N": {"type": "object", "properties": {"n": {"$ref": "#/$defs/N", "title": "t"}}}
    }
    got, _ = prop({"$ref": "#/$defs/N", "title": "t"}, **{"$defs": definitions})
    assert got["properties"]["n"] == {"$ref": "#/$defs/N"}


def test_a_schema_that_grows_without_end_is_refused():
    deep = {"type": "string"}
    for _ in range(40):
        deep = {"type": "array", "items": deep}
    with pytest.raises(RequestError, match="nested deeper"):
        prop(deep)
    doubling = {
        f"L{n}": {
            "type": "object",
            "properties": {
                side: {"$ref": f"#/$defs/L{n + 1}", "title": side} for side in ("a", "b")
            },
        }
        for n in range(20)
    }
    doubling["L20"] = {"type": "null"}
    with pytest.raises(RequestError, match="nested deeper"):
        prop({"$ref": "#/$defs/L0", "title": "t"}, **{"$defs": doubling})


def test_sorting_reaches_every_level():
    assert list(deep_sorted({"b": [{"d": 1, "c": 2}], "a": 0})) == ["a", "b"]
    assert list(deep_sorted({"b": [{"d": 1, "c": 2}]})["b"][0]) == ["c", "d"]


PLAIN = st.recursive(
    st.sampled_from(
        [
            {"type": "string"},
            {"type": "integer", "minimum": 0},
            {"enum": ["a", 1]},
            {},
            {"const": 2},
        ]
    ),
    lambda inner: st.one_of(
        st.builds(lambda item: {"type": "array", "items": item}, inner),
        st.builds(lambda a, b: {"oneOf": [a, b]}, inner, inner),
        st.builds(lambda a, b: {"anyOf": [a, b], "type": ["string", "integer"]}, inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(
            lambda fields: {"properties": fields, "required": sorted(fields)[:1]}
        ),
    ),
    max_leaves=6,
)
VALUES = st.recursive(
    st.one_of(st.none(), st.integers(-1, 3), st.sampled_from(["a", "b"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(PLAIN, VALUES)
def test_what_a_rewritten_schema_refuses_the_original_refused_or_a_type_was_filled_in(
    schema, value
):
    raw = {"type": "object", "properties": {"x": schema}}
    changes = []
    new = rewrite(raw, "p", changes)
    before = jsonschema.Draft202012Validator(raw).is_valid({"x": value})
    after = jsonschema.Draft202012Validator(new).is_valid({"x": value})
    if not changes:
        assert before == after
    if before and not after:
        assert any("filled in" in change or "beside anyOf" in change for change in changes)


KEYWORDS = ["type", "properties", "items", "anyOf", "allOf", "oneOf", "enum", "$ref", "$defs"]
KEYWORDS += ["required", "const", "nullable", "definitions", "additionalProperties"]
ANY = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(KEYWORDS),
            inner,
            max_size=5,
        ),
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(ANY)
def test_any_json_is_a_schema_or_a_request_error(value):
    param = "tools[0].function.parameters"
    try:
        read_tools([entry(value)])
    except RequestError as error:
        param = error.param or ""
    assert param.startswith("tools[0].function.parameters")
