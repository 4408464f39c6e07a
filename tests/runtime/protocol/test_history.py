import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.errors import RequestError
from kimi_runtime.protocol.chat import Message, ToolCall
from kimi_runtime.protocol.history import normalise


def made(call_id="c", arguments='{"a": 1}', name="f"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(**more):
    return {"role": "assistant", **more}


USER = {"role": "user", "content": "hi"}
CALL = assistant(tool_calls=[made()])


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ({}, "messages"),
        ([], "messages"),
        ([USER, "x"], "messages[1]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "function", "content": "x"}], "messages[0].role"),
        ([{"role": 3}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": "a\ud800"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [USER, 3]}], "messages[0].content[0].type"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
        ([{**USER, "name": 3}], "messages[0].name"),
        ([{**USER, "partial": True}], "messages[0].partial"),
        ([{"role": "system", "content": "", "tools": [1]}], "messages[0].tools"),
        ([assistant(reasoning_content=3)], "messages[0].reasoning_content"),
        ([assistant(tool_calls={"a": 1})], "messages[0].tool_calls"),
        ([assistant(tool_calls=[3])], "messages[0].tool_calls[0]"),
        ([assistant(tool_calls=[{"id": "x"}])], "messages[0].tool_calls[0].function"),
        ([assistant(tool_calls=[made(name="")])], "messages[0].tool_calls[0].function.name"),
        ([assistant(tool_calls=[made("x" * 257)])], "messages[0].tool_calls[0].id"),
        (
            [assistant(tool_calls=[made(arguments=[1])])],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([USER, {"role": "tool", "content": "x"}], "messages[1].tool_call_id"),
        ([CALL, {"role": "tool", "tool_call_id": "d", "content": ""}], "messages[1].tool_call_id"),
    ],
)
def test_a_wrong_message_is_refused_where_it_is_wrong(messages, param):
    with pytest.raises(RequestError) as caught:
        normalise(messages)
    assert caught.value.param == param


def test_plain_messages_change_nothing():
    messages = [
        {"role": "system", "content": "s", "name": None},
        {**USER, "name": "ann"},
        assistant(content=None, reasoning_content=" r\n", tool_calls=[made("c" * 256)]),
        {"role": "tool", "tool_call_id": "c" * 256, "content": "ok"},
        assistant(content="done", refusal=None, annotations=[]),
    ]
    history = normalise(messages)
    assert history.messages == (
        Message("system", "s"),
        Message("user", "hi", "ann"),
        Message("assistant", reasoning=" r\n", calls=(ToolCall("c" * 256, "f", '{"a": 1}'),)),
        Message("tool", "ok", call_id="c" * 256),
        Message("assistant", "done"),
    )
    assert history.changes == ()


@pytest.mark.parametrize(
    ("message", "expected", "change"),
    [
        (assistant(reasoning="r"), Message("assistant", reasoning="r"), "messages[0].reasoning"),
        (
            assistant(reasoning_details=[{"type": "reasoning.text", "text": "r"}, {"text": "s"}]),
            Message("assistant", reasoning="rs"),
            "reasoning_details was read",
        ),
        ({"role": "developer", "content": "d"}, Message("system", "d"), "'developer' was read"),
        (assistant(content="a", audio_id="x"), Message("assistant", "a"), "audio_id was ignored"),
    ],
)
def test_what_clients_do_differently_is_understood_and_reported(message, expected, change):
    history = normalise([message])
    assert history.messages == (expected,)
    assert any(change in line for line in history.changes)


@pytest.mark.parametrize(
    ("arguments", "expected", "changed"),
    [
        ('{"a": 1}', '{"a": 1}', False),
        ('{"a":1}', '{"a":1}', False),
        ("not json", "not json", False),
        ('"text"', '"text"', False),
        ('"not closed', '"not closed', False),
        (json.dumps('{"a":  1}'), '{"a":  1}', True),
        ({"a": "é"}, '{"a": "é"}', True),
        ("", "{}", True),
        (None, "{}", True),
    ],
)
def test_arguments_keep_their_bytes_unless_they_are_encoded_twice(arguments, expected, changed):
    history = normalise([assistant(tool_calls=[made(arguments=arguments)])])
    assert history.messages[0].calls[0].arguments == expected
    assert bool(history.changes) == changed


def test_text_parts_are_joined_without_a_separator():
    parts = [{"type": "text", "text": "a"}, "b", {"type": "text", "text": "c"}]
    assert normalise([{"role": "user", "content": parts}]).messages[0].content == "abc"


def test_a_call_without_an_id_gets_one():
    history = normalise([assistant(tool_calls=[made(None), made(None)])])
    ids = [call.id for call in history.messages[0].calls]
    assert len(set(ids)) == 2
    assert len(history.changes) == 2


def test_missing_reasoning_on_a_call_is_refused_only_if_asked():
    assert normalise([CALL]).messages[0].reasoning == ""
    assert normalise([{**CALL, "reasoning_content": ""}], require_reasoning=True)
    with pytest.raises(RequestError, match=r"messages\[1\] has tool calls but no reasoning"):
        normalise([USER, CALL], require_reasoning=True)


KEYS = ["role", "content", "type", "text", "tool_calls", "function", "name", "id"]
KEYS += ["arguments", "tool_call_id", "reasoning", "partial"]
ANY = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(KEYS),
            st.one_of(inner, st.sampled_from(["user", "assistant", "tool", "text", "function"])),
            max_size=6,
        ),
    ),
    max_leaves=15,
)


@settings(max_examples=300, deadline=None)
@given(ANY)
def test_any_json_is_a_history_or_a_request_error(value):
    param = "messages"
    try:
        normalise(value if isinstance(value, list) else [value])
    except RequestError as error:
        param = error.param or ""
    assert param.startswith("messages")
