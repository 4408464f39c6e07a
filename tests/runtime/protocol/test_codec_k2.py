import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.errors import RequestError
from kimi_runtime.protocol.chat import Chat, Message, Tool, ToolCall
from kimi_runtime.protocol.codec_k2 import PENDING_IDS, K2Codec
from kimi_runtime.protocol.vocabulary import open_vocabulary

VOCABULARY = open_vocabulary()
CODEC = K2Codec(VOCABULARY)
WEATHER = Tool("get_weather", "Weather.", {"type": "object", "properties": {}})


def shown(ids) -> str:
    """The prompt as people write it: special tokens by name."""
    text, run = "", []
    for token in ids:
        if VOCABULARY.is_special(token):
            text += VOCABULARY.decode_text(run) + VOCABULARY.name(token)
            run = []
        else:
            run.append(token)
    return text + VOCABULARY.decode_text(run)


def call(call_id, name="get_weather", arguments='{"city":"Paris"}'):
    return ToolCall(call_id, name, arguments)


STUB = "<|im_assistant|>assistant<|im_middle|><think>"


def test_messages_come_in_order_behind_the_tools():
    chat = Chat((Message("system", "Be brief."), Message("user", "hi", name="Ann")), (WEATHER,))
    declared = (
        "# Tools\n\n## functions\nnamespace functions {\n"
        "// Weather.\ntype get_weather = (_: {}) => any;\n}\n"
    )
    assert shown(CODEC.render(chat).ids) == (
        f"<|im_system|>tool_declare<|im_middle|>{declared}<|im_end|>"
        "<|im_system|>system<|im_middle|>Be brief.<|im_end|>"
        f"<|im_user|>Ann<|im_middle|>hi<|im_end|>{STUB}"
    )


def test_there_is_no_system_message_unless_one_is_sent():
    chat = Chat((Message("user", "hi"),))
    assert shown(CODEC.render(chat).ids) == f"<|im_user|>user<|im_middle|>hi<|im_end|>{STUB}"


def test_without_thinking_the_stub_has_an_empty_pair():
    rendered = CODEC.render(Chat((Message("user", "hi"),), thinking=False))
    assert shown(rendered.ids).endswith(f"{STUB}</think>")
    assert not rendered.starts_in_reasoning


def test_calls_are_renamed_with_a_counter_over_the_conversation():
    messages = (
        Message("user", "weather?"),
        Message("assistant", calls=(call("call_abc"), call("search:0", "search", "{}"))),
        Message("tool", "rain", call_id="search:0"),
        Message("tool", "sun", call_id="call_abc"),
        Message("assistant", calls=(call("call_abc"),)),
        Message("tool", "snow", call_id="call_abc"),
    )
    rendered = CODEC.render(Chat(messages))
    text = shown(rendered.ids)
    assert (
        "<|tool_calls_section_begin|>"
        "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city":"Paris"}<|tool_call_end|>'
        "<|tool_call_begin|>functions.search:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|><|im_end|>"
    ) in text
    assert "tool<|im_middle|>## Return of functions.search:1\nrain<|im_end|>" in text
    assert "## Return of functions.get_weather:0\nsun" in text
    assert "## Return of functions.get_weather:2\nsnow" in text
    assert rendered.next_call_number == 3


def test_results_of_a_repeated_id_take_its_calls_in_order():
    messages = (
        Message("assistant", calls=(call("same"), call("same", "search"))),
        Message("tool", "first", call_id="same"),
        Message("tool", "second", call_id="same"),
    )
    text = shown(CODEC.render(Chat(messages)).ids)
    assert "functions.get_weather:0\nfirst" in text
    assert "functions.search:1\nsecond" in text


HISTORY = (
    Message("user", "a"),
    Message("assistant", "b", reasoning="early"),
    Message("user", "c"),
    Message("assistant", reasoning="late", calls=(call("x"),)),
    Message("tool", "d", call_id="x"),
)


@pytest.mark.parametrize(
    ("chat", "codec", "kept"),
    [
        (Chat(HISTORY), CODEC, ["", "late", None]),
        (Chat(HISTORY, keep_reasoning=True), CODEC, ["early", "late", None]),
        (Chat(HISTORY), K2Codec(VOCABULARY, always_keep_reasoning=True), ["early", "late", None]),
        (Chat(HISTORY, thinking=False), CODEC, ["", "", ""]),
        (Chat((*HISTORY, Message("assistant", "e", reasoning="f"))), CODEC, ["", "", "", None]),
    ],
)
def test_reasoning_is_kept_only_after_the_last_answer(chat, codec, kept):
    text = shown(codec.render(chat).ids)
    thoughts = [
        piece.split("</think>")[0] if "</think>" in piece else None
        for piece in text.split("<think>")[1:]
    ]
    assert thoughts == kept


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(VOCABULARY.special_ids)), st.text(max_size=10))
def test_no_text_of_a_chat_can_place_a_special_token(name, text):
    hostile = f"{text}{name}{text}"
    plain = Chat(
        (
            Message("user", "x", name="x"),
            Message("assistant", "x", reasoning="x", calls=(ToolCall("x", "x", "x"),)),
            Message("tool", "x", call_id="x"),
        ),
        (Tool("x", "x"),),
    )
    attack = Chat(
        (
            Message("user", hostile, name=hostile),
            Message(
                "assistant",
                hostile,
                reasoning=hostile,
                calls=(ToolCall(hostile, hostile, hostile),),
            ),
            Message("tool", hostile, call_id=hostile),
        ),
        (Tool("x", hostile),),
    )
    specials = [
        [token for token in CODEC.render(chat).ids if VOCABULARY.is_special(token)]
        for chat in (plain, attack)
    ]
    assert specials[0] == specials[1]


def test_boundaries_lie_behind_the_end_of_every_message():
    rendered = CODEC.render(Chat(HISTORY, (WEATHER,)))
    end = VOCABULARY.special("<|im_end|>")
    ends = [place + 1 for place, token in enumerate(rendered.ids) if token == end]
    assert list(rendered.boundaries) == ends
    assert rendered.pending == PENDING_IDS == 3


def test_text_that_is_no_unicode_is_refused():
    with pytest.raises(RequestError, match="lone surrogate"):
        CODEC.render(Chat((Message("user", "\ud800"),)))


def test_stop_ids_are_the_end_of_a_message_and_of_a_text():
    assert [VOCABULARY.name(token) for token in CODEC.stop_ids] == ["<|im_end|>", "[EOS]"]
