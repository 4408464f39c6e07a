import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.protocol.chat import Chat, Message, ToolCall
from kimi_runtime.protocol.codec_k2 import K2Codec
from kimi_runtime.protocol.cuts import BLOCK_CHARS
from kimi_runtime.protocol.incremental import Detokenizer, SessionRecord, StopMatch, StopStrings
from kimi_runtime.protocol.vocabulary import open_vocabulary

VOCABULARY = open_vocabulary()
CODEC = K2Codec(VOCABULARY)
IDS = st.lists(st.integers(-2, VOCABULARY.size + 4), max_size=60)


def portions(items, seed):
    """The items in random portions, some empty."""
    draw = random.Random(seed)
    at = 0
    while at < len(items):
        size = draw.randrange(4)
        yield items[at : at + size]
        at += size


@settings(max_examples=200, deadline=None)
@given(IDS, st.integers(0, 2**32))
def test_text_does_not_depend_on_how_ids_arrive(ids, seed):
    detokenizer = Detokenizer(VOCABULARY)
    text = "".join(detokenizer.feed(some) for some in portions(ids, seed)) + detokenizer.finish()
    assert text == VOCABULARY.decode_text(ids)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60))
def test_a_character_over_several_tokens_appears_once_it_is_whole(text):
    detokenizer = Detokenizer(VOCABULARY)
    seen = ""
    for token in VOCABULARY.encode_text(text):
        seen += detokenizer.feed([token])
        assert text.startswith(seen)
    assert seen == text
    assert detokenizer.finish() == ""


STOPS = st.lists(st.text("ab<|", min_size=1, max_size=5), max_size=4)


@settings(max_examples=400, deadline=None)
@given(st.text("ab<|c", max_size=40), STOPS, st.integers(0, 2**32))
def test_text_is_cut_at_the_stop_string_that_is_complete_first(text, stops, seed):
    ends = [
        (end, -len(stop), stop)
        for stop in stops
        for end in range(len(text) + 1)
        if text[:end].endswith(stop)
    ]
    expected = text
    match = None
    if ends:
        end, _, stop = min(ends)
        expected, match = text[: end - len(stop)], StopMatch(stop, end - len(stop))
    matcher = StopStrings(stops)
    shown = "".join(matcher.feed(some) for some in portions(text, seed)) + matcher.finish()
    assert (shown, matcher.match) == (expected, match)


def test_only_what_may_become_a_stop_string_is_held_back():
    matcher = StopStrings(["STOP"])
    assert [matcher.feed(text) for text in ("so S", "TO", "RE", " STO")] == [
        "so ",
        "",
        "STORE",
        " ",
    ]
    assert matcher.finish() == "STO"


WORDS = st.lists(
    st.sampled_from(["hello", " ", "\n\n", "中文", "<|im_end|>", "é", '{"a": [1]}', "don't"]),
    max_size=6,
).map("".join)
USER = st.builds(Message, st.just("user"), WORDS)
ANSWER = st.builds(Message, st.just("assistant"), WORDS, reasoning=WORDS)
STEP = st.builds(
    lambda text, thought, arguments, result: (
        Message("assistant", text, reasoning=thought, calls=(ToolCall("x", "f", arguments),)),
        Message("tool", result, call_id="x"),
    ),
    WORDS,
    WORDS,
    WORDS,
    WORDS,
)
TURNS = st.lists(st.one_of(USER.map(lambda m: (m,)), ANSWER.map(lambda m: (m,)), STEP), max_size=8)


@settings(max_examples=100, deadline=None)
@given(TURNS, st.booleans(), st.booleans())
def test_a_growing_conversation_has_the_ids_of_a_full_render(turns, thinking, keep):
    record = SessionRecord(VOCABULARY)
    messages = ()
    for turn in turns:
        messages += turn
        chat = Chat(messages, thinking=thinking, keep_reasoning=keep)
        assert CODEC.render(chat, record) == CODEC.render(chat)


def test_only_new_turns_are_encoded():
    record = SessionRecord(VOCABULARY)
    messages = tuple(Message("user", f"turn {n}") for n in range(50))
    for count in range(1, 51):
        CODEC.render(Chat(messages[:count]), record)
    assert (record.encoded_parts, record.reused_parts) == (50, 49 * 50 // 2)


def test_a_session_longer_than_a_block_is_cut_where_the_whole_text_is():
    record = SessionRecord(VOCABULARY)
    messages = tuple(Message("user", "some words here " * 4000) for _ in range(8))
    for count in range(1, 9):
        chat = Chat(messages[:count])
        rendered = CODEC.render(chat, record)
    assert len(VOCABULARY.decode_text(rendered.ids)) > BLOCK_CHARS
    assert rendered == CODEC.render(chat)
    short = CODEC.render(Chat(messages[:1]))
    assert rendered.ids[: short.boundaries[0]] == short.ids[: short.boundaries[0]]
