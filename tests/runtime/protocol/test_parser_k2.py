import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.protocol.chat import (
    CallArguments,
    CallEnded,
    CallStarted,
    Chat,
    ContentDelta,
    Message,
    ReasoningDelta,
    Tool,
    ToolCall,
)
from kimi_runtime.protocol.codec_k2 import K2Codec
from kimi_runtime.protocol.parser_k2 import join_deltas
from kimi_runtime.protocol.vocabulary import open_vocabulary

VOCABULARY = open_vocabulary()
CODEC = K2Codec(VOCABULARY)


def tool(name, *keys):
    return Tool(name, "", {"type": "object", "properties": {key: {} for key in keys}})


TOOLS = (tool("get-weather.v2", "city", "days"), tool("search", "query"))
CHAT = Chat((Message("user", "hi"),), TOOLS, thinking=False)
THINKING = Chat((Message("user", "hi"),), TOOLS)

MARKS = {
    "SB": "<|tool_calls_section_begin|>",
    "SE": "<|tool_calls_section_end|>",
    "CB": "<|tool_call_begin|>",
    "AB": "<|tool_call_argument_begin|>",
    "CE": "<|tool_call_end|>",
    "T": "<think>",
    "/T": "</think>",
    "END": "<|im_end|>",
    "EOS": "[EOS]",
    "USER": "<|im_user|>",
    "RES": f"<|reserved_token_{VOCABULARY.rank_count + 100}|>",
}


def ids_of(*items):
    """Special ids by their short name, text by its ids."""
    ids = []
    for item in items:
        mark = MARKS.get(item)
        ids += [VOCABULARY.special(mark)] if mark else VOCABULARY.encode_text(item)
    return ids


def parse(ids, chat=CHAT, *, stopped=False, size=None):
    parser = CODEC.parser(CODEC.render(chat), chat)
    size = size or max(1, len(ids))
    events = []
    for at in range(0, len(ids), size):
        events += parser.feed(ids[at : at + size])
    events += parser.finish(stopped=stopped)
    return join_deltas(events), parser


def calls_of(events):
    calls = {}
    for event in events:
        if isinstance(event, CallStarted):
            calls[event.index] = [event.id, event.name, ""]
        elif isinstance(event, CallArguments):
            calls[event.index][2] += event.text
    return [tuple(call) for call in calls.values()]


def text_of(events, kind):
    return "".join(event.text for event in events if isinstance(event, kind))


WEATHER = ("functions.get-weather.v2:0", "get-weather.v2", '{"city": "Paris"}')


@pytest.mark.parametrize("size", [None, 1, 2, 3])
def test_reasoning_content_and_calls_come_apart(size):
    ids = ids_of("why", "/T", "so", "SB", "CB", WEATHER[0], "AB", WEATHER[2], "CE")
    ids += ids_of("CB", "functions.search:1", "AB", '{"query": "中文🙂"}', "CE", "SE", "END")
    events, parser = parse(ids, THINKING, size=size)
    assert events == [
        ReasoningDelta("why"),
        ContentDelta("so"),
        CallStarted(0, WEATHER[0], WEATHER[1]),
        CallArguments(0, WEATHER[2]),
        CallEnded(0),
        CallStarted(1, "functions.search:1", "search"),
        CallArguments(1, '{"query": "中文🙂"}'),
        CallEnded(1),
    ]
    assert (parser.complete_calls, parser.ended, parser.problems) == (2, True, ())
    assert parser.reasoning_tokens == len(ids_of("why"))


def test_a_section_ends_reasoning_that_was_never_closed():
    ids = ids_of("hm", "SB", "CB", "functions.search:0", "AB", "{}", "CE", "SE", "END")
    events, _ = parse(ids, THINKING)
    assert events[0] == ReasoningDelta("hm")
    assert calls_of(events) == [("functions.search:0", "search", "{}")]


def test_a_call_needs_no_section_around_it():
    events, parser = parse(ids_of("go", "CB", "functions.search:0", "AB", "{}", "CE", "END"))
    assert text_of(events, ContentDelta) == "go"
    assert parser.complete_calls == 1


def test_text_between_and_behind_calls_is_dropped():
    call = ("CB", "functions.search:0", "AB", "{}", "CE")
    events, _ = parse(ids_of("a", "SB", "x", *call, "y", *call, "z", "SE", "tail", "END", "more"))
    assert text_of(events, ContentDelta) == "a"
    assert len(calls_of(events)) == 2


@pytest.mark.parametrize("extra", [("/T",), ("T",), ("/T", "/T"), ("SE",), ("CE",), ("AB",)])
def test_stray_markers_in_content_are_ignored(extra):
    events, parser = parse(ids_of("a", *extra, "b", "END"))
    assert events == [ContentDelta("ab")]
    assert parser.complete_calls == 0


def test_a_model_that_thinks_unasked_is_heard_as_reasoning():
    events, _ = parse(ids_of("T", "hm", "/T", "a", "END"))
    assert events == [ReasoningDelta("hm"), ContentDelta("a")]


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("functions.get-weather.v2:0", "get-weather.v2"),
        ("\n functions.get-weather.v2 : 12 \n", "get-weather.v2"),
        ("get-weather.v2:7", "get-weather.v2"),
        ("get-weather.v2", "get-weather.v2"),
        ("functions.search", "search"),
        ("functions.other_tool:3", "other_tool"),
    ],
)
def test_a_header_names_the_tool_and_the_counter_goes_on(header, name):
    chat = Chat(
        (
            Message("assistant", calls=(ToolCall("x", "search", "{}"), ToolCall("y", "f", "{}"))),
            Message("tool", "", call_id="x"),
        ),
        TOOLS,
        thinking=False,
    )
    events, _ = parse(ids_of("SB", "CB", header, "AB", "{}", "CE", "SE", "END"), chat)
    assert calls_of(events) == [(f"functions.{name}:2", name, "{}")]


@pytest.mark.parametrize("header", ["0", "call_12", "call3", "functions.:1", ":2", ""])
@pytest.mark.parametrize(
    ("arguments", "name"), [('{"city": 1}', "get-weather.v2"), ('{"query": 2}', "search")]
)
def test_a_bare_counter_means_the_tool_with_those_parameters(header, arguments, name):
    events, _ = parse(ids_of("SB", "CB", header, "AB", arguments, "CE", "SE", "END"))
    assert calls_of(events) == [(f"functions.{name}:0", name, arguments)]


def test_a_bare_counter_means_the_only_tool():
    chat = Chat((Message("user", "hi"),), TOOLS[:1], thinking=False)
    events, _ = parse(ids_of("SB", "CB", "call_0", "AB", "{}", "CE", "SE", "END"), chat)
    assert calls_of(events) == [("functions.get-weather.v2:0", "get-weather.v2", "{}")]


@pytest.mark.parametrize("arguments", ["{}", '{"x": 1}', "[1", "7", "[[]]"])
def test_a_call_that_fits_no_tool_is_a_problem_not_a_crash(arguments):
    events, parser = parse(ids_of("SB", "CB", "call_0", "AB", arguments, "CE", "SE", "END"))
    assert (events, parser.complete_calls) == ([], 0)
    assert "fits none of the tools" in parser.problems[0]


@pytest.mark.parametrize("ending", [("SE", "END"), ("END",), ("EOS",), ("USER", "user")])
def test_a_missing_end_of_call_is_forgiven_when_the_turn_ends(ending):
    events, parser = parse(ids_of("SB", "CB", "functions.search:0", "AB", '{"query": 1}', *ending))
    assert calls_of(events) == [("functions.search:0", "search", '{"query": 1}')]
    assert parser.complete_calls == 1


def test_an_open_call_is_complete_if_the_engine_kept_the_end_token():
    ids = ids_of("SB", "CB", "functions.search:0", "AB", '{"query": 1}')
    assert parse(ids, stopped=True)[1].complete_calls == 1


def test_a_call_cut_off_by_length_is_not_complete():
    events, parser = parse(ids_of("SB", "CB", "functions.search:0", "AB", '{"query": '))
    assert calls_of(events) == [("functions.search:0", "search", '{"query": ')]
    assert (parser.complete_calls, parser.has_open_call) == (0, True)
    assert not any(isinstance(event, CallEnded) for event in events)


@pytest.mark.parametrize("between", [("AB",), ("AB", "  \n "), ()])
def test_empty_arguments_become_an_empty_object(between):
    events, _ = parse(ids_of("SB", "CB", "functions.search:0", *between, "CE", "SE", "END"))
    assert calls_of(events) == [("functions.search:0", "search", "{}")]


def test_arguments_have_no_size_limit():
    arguments = json.dumps({"query": "lorem ipsum " * 20_000})
    events, _ = parse(ids_of("SB", "CB", "functions.search:0", "AB", arguments, "CE", "SE", "END"))
    assert calls_of(events)[0][2] == arguments


@pytest.mark.parametrize("chat", [Chat(CHAT.messages, thinking=False), None])
def test_calls_nobody_asked_for_are_neither_made_nor_shown(chat):
    chat = chat or Chat(CHAT.messages, TOOLS, "none", thinking=False)
    ids = ids_of("a", "SB", "CB", "functions.search:0", "AB", "{}", "CE", "SE", "END")
    events, parser = parse(ids, chat)
    assert events == [ContentDelta("a")]
    assert (parser.complete_calls, len(parser.problems)) == (0, 1)


def test_without_parallel_calls_only_the_first_is_made():
    chat = Chat(CHAT.messages, TOOLS, thinking=False, parallel_calls=False)
    call = ("CB", "functions.search:0", "AB", "{}", "CE")
    events, parser = parse(ids_of("SB", *call, *call, "SE", "END"), chat)
    assert len(calls_of(events)) == parser.complete_calls == 1


TEXT_IDS = [
    token
    for token in range(VOCABULARY.rank_count)
    if not {b"<", b"|"} & {bytes((b,)) for b in VOCABULARY.token_bytes(token)}
]
ANY_ID = st.one_of(
    st.sampled_from(TEXT_IDS),
    st.sampled_from([VOCABULARY.special(name) for name in MARKS.values()]),
    st.integers(VOCABULARY.rank_count, VOCABULARY.size + 50),
    st.sampled_from(ids_of("functions.search:0", "call_1", '{"query": 1}')),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(ANY_ID, max_size=80), st.integers(0, 2**32), st.booleans(), st.booleans())
def test_any_ids_in_any_portions_give_the_same_clean_events(ids, seed, thinking, stopped):
    chat = THINKING if thinking else CHAT
    whole, parser = parse(ids, chat, stopped=stopped)
    other = CODEC.parser(CODEC.render(chat), chat)
    draw, at, events = random.Random(seed), 0, []
    while at < len(ids):
        size = draw.randrange(5)
        events += other.feed(ids[at : at + size])
        at += size
    events += other.finish(stopped=stopped)
    assert join_deltas(events) == whole
    assert not any("<" in event.text for event in whole if hasattr(event, "text"))
    assert "" not in [event.text for event in whole if hasattr(event, "text")]
    open_calls, started, ended = set(), 0, 0
    for event in whole:
        if isinstance(event, CallStarted):
            assert event.index == started
            started += 1
            open_calls.add(event.index)
        elif isinstance(event, CallArguments):
            assert event.index in open_calls
        elif isinstance(event, CallEnded):
            open_calls.remove(event.index)
            ended += 1
    assert ended == parser.complete_calls
    assert parser.feed(ids) == []


@settings(max_examples=60, deadline=None)
@given(
    st.text(max_size=30),
    st.text(max_size=30),
    st.lists(
        st.tuples(
            st.sampled_from(["search", "get-weather.v2"]),
            st.dictionaries(st.text(max_size=5), st.text(max_size=9), max_size=3),
        ),
        max_size=3,
    ),
)
def test_what_is_rendered_parses_back(reasoning, content, calls):
    made = tuple(
        ToolCall(f"functions.{name}:{n}", name, json.dumps(arguments, ensure_ascii=False))
        for n, (name, arguments) in enumerate(calls)
    )
    reply = Message("assistant", content, reasoning=reasoning, calls=made)
    chat = Chat((*THINKING.messages, reply), TOOLS, keep_reasoning=True)
    prompt = CODEC.render(THINKING)
    whole = CODEC.render(chat)
    output = whole.ids[len(prompt.ids) : whole.boundaries[-1]]
    events, parser = parse(list(output), THINKING)
    assert text_of(events, ReasoningDelta) == reasoning
    assert text_of(events, ContentDelta) == content
    assert calls_of(events) == [(call.id, call.name, call.arguments) for call in made]
    assert parser.problems == ()
