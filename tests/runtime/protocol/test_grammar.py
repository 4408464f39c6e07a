import dataclasses
import json
import random

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.errors import RequestError
from kimi_runtime.protocol.chat import (
    CallArguments,
    CallStarted,
    Chat,
    ContentDelta,
    Message,
    NamedChoice,
    Tool,
)
from kimi_runtime.protocol.codec_k2 import K2Codec
from kimi_runtime.protocol.grammar import (
    MAX_PARALLEL_CALLS,
    GrammarState,
    json_grammar,
    tool_grammar,
)
from kimi_runtime.protocol.schema import read_tools
from kimi_runtime.protocol.vocabulary import open_vocabulary
from kimi_runtime.spec.request import Grammar

VOCABULARY = open_vocabulary()
CODEC = K2Codec(VOCABULARY)

SCHEMAS = {
    "flat": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    },
    "none": {"type": "object", "properties": {}},
    "free": {"type": "object"},
    "short": {
        "type": "object",
        "properties": {"text": {"type": "string", "minLength": 3, "maxLength": 8}},
        "required": ["text"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "file": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "minLength": 1},
                    "mode": {"enum": ["read", "write", 5, None]},
                },
                "required": ["path", "mode"],
            },
            "limits": {
                "type": "array",
                "items": {"type": "number", "minimum": -3, "maximum": 12.5},
                "minItems": 2,
                "maxItems": 5,
            },
            "labels": {"type": "object", "additionalProperties": {"type": "boolean"}},
            "note": {"type": ["string", "null"]},
        },
        "required": ["file", "limits"],
    },
    "choice": {
        "type": "object",
        "properties": {
            "value": {
                "anyOf": [
                    {"type": "string", "maxLength": 3},
                    {"type": "array", "items": {"type": "integer", "multipleOf": 7}},
                    {"$ref": "#/$defs/Node"},
                ]
            },
            "when": {"type": "string", "format": "date-time"},
            "code": {"type": "string", "pattern": "^[a-z]+-[0-9]{4}$"},
        },
        "required": ["value", "when", "code"],
        "$defs": {
            "Node": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
                },
                "required": ["name", "next"],
            }
        },
    },
}
TOOLS, _ = read_tools(
    [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
)
CHAT = Chat((Message("user", "hi"),), TOOLS, "required")


def allowed_ids(mask):
    if mask is None:
        return range(VOCABULARY.size)
    return [i for i in range(len(mask) * 8) if mask[i >> 3] >> (i & 7) & 1]


def sample(grammar, budget, seed):
    """Ids drawn evenly from what is allowed: a model that knows nothing."""
    state = GrammarState(VOCABULARY, grammar, budget)
    draw = random.Random(seed)
    output = []
    while len(output) < budget and not state.ended:
        token = draw.choice(allowed_ids(state.allowed()))
        state.accept(token)
        output.append(token)
    return output, state


def calls_of(chat, output, stopped):
    parser = CODEC.parser(CODEC.render(chat), chat)
    events = [*parser.feed(output), *parser.finish(stopped=stopped)]
    assert parser.problems == ()
    assert not any(isinstance(event, ContentDelta) for event in events)
    calls = {}
    for event in events:
        if isinstance(event, CallStarted):
            calls[event.index] = [event.id, event.name, ""]
        elif isinstance(event, CallArguments):
            calls[event.index][2] += event.text
    assert len(calls) == parser.complete_calls
    return [tuple(call) for call in calls.values()]


@settings(max_examples=120, deadline=None)
@given(
    st.one_of(st.just("required"), st.sampled_from(sorted(SCHEMAS)).map(NamedChoice)),
    st.booleans(),
    st.booleans(),
    st.integers(120, 400),
    st.integers(0, 2**32),
)
def test_a_model_that_knows_nothing_makes_valid_calls_in_its_budget(
    choice, thinking, parallel, budget, seed
):
    chat = dataclasses.replace(CHAT, choice=choice, thinking=thinking, parallel_calls=parallel)
    output, state = sample(tool_grammar(VOCABULARY, chat, CODEC.render(chat)), budget, seed)
    assert state.ended
    assert len(output) < budget
    calls = calls_of(chat, output, True)
    assert 1 <= len(calls) <= (MAX_PARALLEL_CALLS if parallel else 1)
    for number, (call_id, name, arguments) in enumerate(calls):
        assert call_id == f"functions.{name}:{number}"
        assert choice in ("required", NamedChoice(name))
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


STRINGS = st.builds(
    lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
    st.integers(0, 6),
    st.integers(0, 6),
)
ANY_SCHEMA = st.recursive(
    st.one_of(
        STRINGS,
        st.sampled_from(
            [
                {"type": "string"},
                {"type": "integer"},
                {"type": "number", "minimum": 100},
                {"type": "integer", "minimum": -5, "maximum": 5},
                {"type": "boolean"},
                {"type": "null"},
                {"type": ["string", "integer", "null"]},
                {"enum": ["a", 'say "}"', 3.5, None, ["x"]]},
                {"type": "string", "pattern": "^(ab|c)*d$"},
                {"type": "string", "format": "uuid"},
                {},
            ]
        ),
    ),
    lambda inner: st.one_of(
        st.builds(
            lambda item, low, more: {
                "type": "array",
                "items": item,
                "minItems": low,
                "maxItems": low + more,
            },
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
        st.builds(
            lambda fields, needed: {
                "type": "object",
                "properties": fields,
                "required": sorted(fields)[:needed],
            },
            st.dictionaries(st.sampled_from(["a", "b", "long name", 'q"u']), inner, max_size=3),
            st.integers(0, 3),
        ),
    ),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.sampled_from("abc"), ANY_SCHEMA, max_size=3), st.integers(0, 2**32))
def test_any_schema_gives_arguments_that_fit_it(properties, seed):
    schema = {"type": "object", "properties": properties, "required": sorted(properties)[:2]}
    tools, _ = read_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    chat = dataclasses.replace(CHAT, tools=tools, thinking=False, parallel_calls=False)
    output, state = sample(tool_grammar(VOCABULARY, chat, CODEC.render(chat)), 700, seed)
    assert state.ended
    [(_, _, arguments)] = calls_of(chat, output, True)
    jsonschema.validate(json.loads(arguments), schema)


def test_a_budget_for_no_call_at_all_is_no_error():
    output, state = sample(tool_grammar(VOCABULARY, CHAT, CODEC.render(CHAT)), 5, 0)
    assert len(output) == 5
    assert not state.ended


def test_without_steering_only_the_budget_ends_an_output():
    chat = dataclasses.replace(CHAT, choice=NamedChoice("flat"), thinking=False)
    grammar = tool_grammar(VOCABULARY, chat, CODEC.render(chat), finish_in_budget=False)
    assert grammar.closing_margin is None
    endings = [sample(grammar, 60, seed)[1].ended for seed in range(20)]
    assert not all(endings)


def test_ids_a_model_would_write_are_all_allowed():
    chat = dataclasses.replace(CHAT, choice=NamedChoice("nested"))
    rendered = dataclasses.replace(CODEC.render(chat), next_call_number=4)
    state = GrammarState(VOCABULARY, tool_grammar(VOCABULARY, chat, rendered), 4000)
    special = VOCABULARY.special
    arguments = '{"file": {"mode": "read", "path": "/a \\"b\\" 中文🙂"}, "limits": [1, 2.5]}'
    output = [
        *VOCABULARY.encode_text("Let me look.\n\nThe user wants 中文 🙂."),
        special("</think>"),
        special("<|tool_calls_section_begin|>"),
        special("<|tool_call_begin|>"),
        *VOCABULARY.encode_text("functions.nested:4"),
        special("<|tool_call_argument_begin|>"),
        *VOCABULARY.encode_text(arguments),
        special("<|tool_call_end|>"),
        special("<|tool_calls_section_end|>"),
    ]
    for token in output:
        assert not state.ended
        assert token in allowed_ids(state.allowed()), VOCABULARY.name(token)
        state.accept(token)
    assert state.ended
    assert [VOCABULARY.name(i) for i in allowed_ids(state.allowed())] == ["[EOS]", "<|im_end|>"]
    state.accept(special("<|im_end|>"))
    assert state.ended


def test_a_free_choice_is_bound_only_inside_a_section():
    chat = dataclasses.replace(CHAT, choice="auto", tools=TOOLS[:1])
    grammar = tool_grammar(VOCABULARY, chat, CODEC.render(chat))
    begin = VOCABULARY.special("<|tool_calls_section_begin|>")
    assert (grammar.starts_after, grammar.closing_margin) == ((begin,), None)
    state = GrammarState(VOCABULARY, grammar, 100)
    for token in VOCABULARY.encode_text("just text"):
        assert state.allowed() is None
        state.accept(token)
    state.accept(begin)
    assert [VOCABULARY.name(i) for i in allowed_ids(state.allowed())] == ["<|tool_call_begin|>"]


def takes(grammar, arguments, name="f"):
    """Whether a call with exactly these arguments can be written."""
    special = VOCABULARY.special
    output = [
        special("<|tool_calls_section_begin|>"),
        special("<|tool_call_begin|>"),
        *VOCABULARY.encode_text(f"functions.{name}:0"),
        special("<|tool_call_argument_begin|>"),
        *VOCABULARY.encode_text(arguments),
        special("<|tool_call_end|>"),
        special("<|tool_calls_section_end|>"),
    ]
    state = GrammarState(VOCABULARY, grammar)
    for token in output:
        if token not in allowed_ids(state.allowed()):
            return False
        state.accept(token)
    return state.ended


def arguments_grammar(schema, choice):
    tools, _ = read_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    chat = dataclasses.replace(CHAT, tools=tools, choice=choice, thinking=False)
    return tool_grammar(VOCABULARY, chat, CODEC.render(chat))


EDITS = {
    "type": "object",
    "properties": {
        "all": {"type": "boolean"},
        "edits": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"new": {"type": "string"}, "old": {"type": "string"}},
                "required": ["new", "old"],
            },
            "minItems": 1,
            "maxItems": 2,
        },
        "where": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "line": {"$ref": "#/$defs/Line"}},
            "required": ["path"],
        },
    },
    "required": ["where", "edits"],
    "$defs": {"Line": {"type": "integer"}},
}
EDIT = {"old": "a", "new": "b"}
WHERE = {"path": "/p", "line": 3}


@settings(max_examples=60, deadline=None)
@given(st.permutations(["where", "edits", "all"]), st.booleans(), st.booleans(), st.booleans())
def test_arguments_may_come_in_any_order(names, with_all, turned, dense):
    values = {
        "where": dict(reversed(WHERE.items())) if turned else WHERE,
        "edits": [EDIT, dict(reversed(EDIT.items()))],
        "all": True,
    }
    wanted = {name: values[name] for name in names if with_all or name != "all"}
    text = json.dumps(wanted, separators=(",", ":") if dense else None)
    assert takes(arguments_grammar(EDITS, "auto"), text)
    required_first = (not with_all or names[-1] == "all") and not turned  # `line` is optional
    assert takes(arguments_grammar(EDITS, "required"), text) == required_first


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"edits": [EDIT]},
        {"where": WHERE},
        {"where": WHERE, "edits": []},
        {"where": WHERE, "edits": [EDIT, EDIT, EDIT]},
        {"where": WHERE, "edits": [{"new": "b"}]},
        {"where": WHERE, "edits": [EDIT], "every": True},
        {"where": {"path": "/p", "line": "3"}, "edits": [EDIT]},
    ],
)
def test_in_any_order_arguments_are_still_bound_to_their_schema(choice, arguments):
    assert not takes(arguments_grammar(EDITS, choice), json.dumps(arguments))


@pytest.mark.parametrize(
    ("least", "most", "fits"),
    [
        (0, None, {0, 1, 2, 3}),
        (0, 0, {0}),
        (0, 1, {0, 1}),
        (1, 1, {1}),
        (1, None, {1, 2, 3}),
        (2, 2, {2}),
        (2, 100_000, {2, 3}),
    ],
)
def test_lists_of_objects_have_as_many_as_their_schema_says(least, most, fits):
    items = {"type": "object", "properties": {"a": {"type": "null"}}}
    many = {"type": "array", "items": items, "minItems": least}
    many |= {} if most is None else {"maxItems": most}
    grammar = arguments_grammar({"type": "object", "properties": {"many": many}}, "auto")
    texts = {count: json.dumps({"many": [{"a": None}] * count}) for count in range(4)}
    assert {count for count, text in texts.items() if takes(grammar, text)} == fits


def test_no_argument_is_written_twice():
    twice = (
        '{"where": {"path": "/p"}, "edits": [{"old": "a", "new": "b"}], "where": {"path": "/q"}}'
    )
    assert not takes(arguments_grammar(EDITS, "auto"), twice)


def test_a_mask_has_a_bit_for_every_id_of_the_vocabulary():
    state = GrammarState(VOCABULARY, tool_grammar(VOCABULARY, CHAT, CODEC.render(CHAT)))
    mask = state.allowed()
    assert len(mask) == -(-VOCABULARY.size // 32) * 4
    assert max(allowed_ids(mask)) < VOCABULARY.size


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_there_is_nothing_to_constrain_without_tools_or_with_none(choice):
    chat = Chat(CHAT.messages, TOOLS if choice == "none" else (), choice)
    assert tool_grammar(VOCABULARY, chat, CODEC.render(chat)) is None


@pytest.mark.parametrize(
    ("chat", "claim"),
    [
        (Chat(CHAT.messages, (), "required"), "there are no tools"),
        (Chat(CHAT.messages, TOOLS, NamedChoice("gone")), "names 'gone', but the tools are: flat,"),
    ],
)
def test_a_choice_without_its_tool_is_refused(chat, claim):
    with pytest.raises(RequestError, match=claim) as caught:
        tool_grammar(VOCABULARY, chat, CODEC.render(chat))
    assert caught.value.param == "tool_choice"


BAD = Tool("bad", "", {"type": "object", "properties": {"x": {"type": "array", "contains": {}}}})


def test_a_schema_that_cannot_be_compiled_is_named():
    chat = dataclasses.replace(CHAT, tools=(*TOOLS[:2], BAD))
    with pytest.raises(RequestError, match="contains") as caught:
        tool_grammar(VOCABULARY, chat, CODEC.render(chat))
    assert caught.value.param == "tools[2].function.parameters"


def test_with_a_free_choice_such_a_tool_takes_any_object():
    chat = dataclasses.replace(CHAT, tools=(BAD,), choice="auto")
    assert '"contains"' not in tool_grammar(VOCABULARY, chat, CODEC.render(chat)).text


def test_an_unknown_format_is_only_a_remark():
    schema = {"type": "object", "properties": {"x": {"type": "string", "format": "wkt"}}}
    chat = dataclasses.replace(CHAT, tools=(Tool("f", "", schema),))
    assert tool_grammar(VOCABULARY, chat, CODEC.render(chat))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([None, *SCHEMAS.values()]), st.booleans(), st.integers(0, 2**32))
def test_an_answer_can_be_bound_to_json(schema, thinking, seed):
    chat = Chat(CHAT.messages, thinking=thinking)
    rendered = CODEC.render(chat)
    output, state = sample(json_grammar(VOCABULARY, schema, rendered), 400, seed)
    assert state.ended
    parser = CODEC.parser(rendered, chat)
    events = [*parser.feed(output), *parser.finish(stopped=True)]
    text = "".join(event.text for event in events if isinstance(event, ContentDelta))
    jsonschema.validate(json.loads(text), schema or {"type": "object"})
    assert parser.complete_calls == 0


def test_a_worker_takes_a_bare_json_schema_too():
    grammar = Grammar(kind="json_schema", text=json.dumps(SCHEMAS["short"]), closing_margin=8)
    output, state = sample(grammar, 60, 1)
    assert state.ended
    jsonschema.validate(json.loads(VOCABULARY.decode_text(output)), SCHEMAS["short"])


def test_a_grammar_nobody_can_compile_is_a_request_error():
    with pytest.raises(RequestError, match="constraint failed"):
        GrammarState(VOCABULARY, Grammar(kind="lark", text="start: ("))


def test_an_id_that_was_not_allowed_is_a_request_error():
    state = GrammarState(VOCABULARY, tool_grammar(VOCABULARY, CHAT, CODEC.render(CHAT)))
    with pytest.raises(RequestError, match="constraint failed"):
        state.accept(VOCABULARY.special("<|im_user|>"))
