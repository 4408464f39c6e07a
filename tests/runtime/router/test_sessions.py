import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.protocol.chat import Chat, Message, Tool, ToolCall
from kimi_runtime.protocol.codec_k2 import K2Codec
from kimi_runtime.protocol.vocabulary import open_vocabulary
from kimi_runtime.router.sessions import Geometry, Sessions
from kimi_runtime.umbp.keys import block_keys, root_key

VOCABULARY = open_vocabulary()
CODEC = K2Codec(VOCABULARY)
POOL_KEY = b"p" * 32
GEOMETRY = Geometry("model", "layout", 8)
END = VOCABULARY.special("<|im_end|>")
FIRST = Chat(
    messages=(Message("system", "Be brief."), Message("user", "What is the time?")),
    thinking=False,
)


def sessions(**limits):
    return Sessions(VOCABULARY, POOL_KEY, **({"max_sessions": 100, "max_ids": 1_000_000} | limits))


def spelled_badly(text):
    """Ids that say `text` byte by byte: what a model may sample and the encoder never gives."""
    by_bytes = {VOCABULARY.token_bytes(i): i for i in range(VOCABULARY.rank_count)}
    return [by_bytes[bytes([byte])] for byte in text.encode()]


def then(chat, answer, question):
    more = (Message("assistant", answer), Message("user", question))
    return dataclasses.replace(chat, messages=(*chat.messages, *more))


def serve(store, chat, output, *, tenant="t", hint=None, owners=("w",)):
    turn = store.begin(tenant, hint, CODEC.render(chat))
    keys = {GEOMETRY: store.keys(turn, GEOMETRY)}
    store.end(turn, output, owners=owners, keys=keys)
    return turn


def test_sampled_ids_stay_the_prompt_while_the_text_is_resent():
    store = sessions()
    output = [*spelled_badly("It is noon."), END]
    first = serve(store, FIRST, output, owners=("p", "d"))
    second = store.begin("t", None, CODEC.render(then(FIRST, "It is noon.", "And now?")))
    history = (*first.ids, *output)
    assert second.ids[: len(history)] == history
    assert second.kept_tokens == len(history)
    assert second.continues
    assert not second.reencoded
    assert second.session.owners == ("p", "d")
    assert VOCABULARY.decode_text(second.ids) == VOCABULARY.decode_text(
        CODEC.render(then(FIRST, "It is noon.", "And now?")).ids
    )


def test_a_changed_history_is_encoded_anew_from_the_message_that_differs():
    store = sessions()
    first = serve(store, FIRST, [*spelled_badly("It is noon."), END])
    edited = CODEC.render(then(FIRST, "It is midnight.", "And now?"))
    second = store.begin("t", None, edited)
    assert second.ids == edited.ids
    assert second.kept_tokens == edited.boundaries[1] == max(first.ends.values())
    assert second.continues
    assert second.reencoded


def test_bytes_that_are_no_utf8_are_history_once_the_client_resends_what_it_saw():
    store = sessions()
    by_bytes = {VOCABULARY.token_bytes(i): i for i in range(VOCABULARY.rank_count)}
    output = [by_bytes[b"a"], by_bytes[b"\xe4"], by_bytes[b"\xff"], by_bytes[b"b"], END]
    first = serve(store, FIRST, output)
    second = store.begin("t", None, CODEC.render(then(FIRST, "a\ufffd\ufffdb", "And now?")))
    assert second.ids[: len(first.ids) + len(output)] == (*first.ids, *output)


def test_many_turns_keep_every_sampled_id():
    store, chat = sessions(), FIRST
    prompt = ()
    for number in range(6):
        answer = f"answer number {number}"
        output = (*spelled_badly(answer), END)
        turn = serve(store, chat, output)
        assert turn.ids[: len(prompt)] == prompt
        prompt = (*turn.ids, *output)
        chat = then(chat, answer, f"question {number}?")
    assert store.kept == 5
    assert len(store) == 1


def test_a_tool_call_and_its_reasoning_are_kept():
    tools = (Tool("clock", "Tells the time.", {"type": "object", "properties": {}}),)
    asked = dataclasses.replace(FIRST, thinking=True, tools=tools)
    text = spelled_badly
    output = [
        *text("I must look."),
        VOCABULARY.special("</think>"),
        VOCABULARY.special("<|tool_calls_section_begin|>"),
        VOCABULARY.special("<|tool_call_begin|>"),
        *text("functions.clock:0"),
        VOCABULARY.special("<|tool_call_argument_begin|>"),
        *text("{}"),
        VOCABULARY.special("<|tool_call_end|>"),
        VOCABULARY.special("<|tool_calls_section_end|>"),
        END,
    ]
    store = sessions()
    first = serve(store, asked, output)
    call = ToolCall("functions.clock:0", "clock", "{}")
    again = dataclasses.replace(
        asked,
        messages=(
            *asked.messages,
            Message("assistant", reasoning="I must look.", calls=(call,)),
            Message("tool", "noon", call_id="functions.clock:0"),
        ),
    )
    second = store.begin("t", None, CODEC.render(again))
    assert second.ids[: len(first.ids) + len(output)] == (*first.ids, *output)


def test_tenants_share_nothing():
    store = sessions()
    serve(store, FIRST, [END], tenant="a")
    turn = store.begin("b", None, CODEC.render(FIRST))
    assert turn.kept_tokens == 0
    assert not turn.continues
    other = store.begin("a", None, CODEC.render(FIRST))
    assert store.keys(turn, GEOMETRY) != store.keys(other, GEOMETRY)


def test_a_shared_system_prompt_is_no_shared_session():
    store = sessions()
    serve(store, FIRST, [*spelled_badly("Noon."), END])
    other = dataclasses.replace(FIRST, messages=(FIRST.messages[0], Message("user", "Where am I?")))
    turn = store.begin("t", None, CODEC.render(other))
    assert turn.kept_tokens > 0
    assert not turn.continues
    assert turn.session.owners == ()


def test_a_session_hint_breaks_ties_between_equal_histories():
    store = sessions()
    for hint, owner in (("one", "w1"), ("two", "w2"), ("three", "w3")):
        turn = store.begin("t", hint, CODEC.render(FIRST))
        fresh = dataclasses.replace(
            turn, session=dataclasses.replace(turn.session, id=hint.encode(), hint=hint)
        )
        store.end(fresh, [*spelled_badly("Noon."), END], owners=(owner,), keys={})
    again = CODEC.render(then(FIRST, "Noon.", "And now?"))
    assert store.begin("t", "one", again).session.owners == ("w1",)
    assert store.begin("t", "two", again).session.owners == ("w2",)
    assert store.begin("t", "nobody", again).session.owners == ("w3",)
    assert store.begin("t", None, again).session.owners == ("w3",)


def test_a_session_is_called_what_its_newest_request_with_a_name_called_it():
    store = sessions()
    chat, names = FIRST, []
    for hint in (None, "one", None, "two"):
        names.append(serve(store, chat, [*spelled_badly("Noon."), END], hint=hint).session.hint)
        chat = then(chat, "Noon.", "And now?")
    assert names == [None, "one", "one", "two"]
    assert len(store) == 1


def test_keys_are_those_of_the_prompt_however_they_were_reached():
    store = sessions()
    output = [*spelled_badly("It is noon, and a fine day it is."), END]
    serve(store, FIRST, output)
    chat = then(FIRST, "It is noon, and a fine day it is.", "And now?")
    second = store.begin("t", None, CODEC.render(chat))
    root = root_key(POOL_KEY, model_digest="model", layout="layout", tenant="t")
    assert store.keys(second, GEOMETRY) == block_keys(POOL_KEY, root, second.ids, 8)


@pytest.mark.parametrize("tail", [[], [END], [VOCABULARY.special("[EOS]")]])
def test_an_output_is_history_however_it_ended(tail):
    store = sessions()
    output = spelled_badly("It is no")
    first = serve(store, FIRST, [*output, *tail])
    second = store.begin("t", None, CODEC.render(then(FIRST, "It is no", "Go on.")))
    history = (*first.ids, *output, END)
    assert second.ids[: len(history)] == history


def test_an_output_cut_inside_a_call_is_no_history():
    store = sessions()
    begin = VOCABULARY.special("<|tool_calls_section_begin|>")
    first = serve(store, FIRST, [*spelled_badly("Let me see"), begin, *spelled_badly("func")])
    rendered = CODEC.render(then(FIRST, "Let me see", "Go on."))
    second = store.begin("t", None, rendered)
    assert second.ids == rendered.ids
    assert second.kept_tokens == max(first.ends.values())


@pytest.mark.parametrize("limits", [{"max_sessions": 5}, {"max_ids": 400}])
def test_memory_is_bounded_and_the_coldest_session_goes_first(limits):
    store = sessions(**limits)
    for number in range(40):
        chat = dataclasses.replace(FIRST, messages=(Message("user", f"number {number}"),))
        serve(store, chat, [*spelled_badly("yes"), END])
    assert len(store) <= limits.get("max_sessions", 40)
    assert store.total_ids <= limits.get("max_ids", 10**9)
    newest = dataclasses.replace(FIRST, messages=(Message("user", "number 39"),))
    oldest = dataclasses.replace(FIRST, messages=(Message("user", "number 0"),))
    assert store.begin("t", None, CODEC.render(newest)).kept_tokens > 0
    assert store.begin("t", None, CODEC.render(oldest)).kept_tokens == 0


text = st.text(alphabet="ab \n<|é中", max_size=12)


@given(st.lists(st.tuples(text, text, st.booleans()), min_size=1, max_size=5))
@settings(max_examples=50, deadline=None)
def test_the_prompt_always_says_what_the_client_sent(turns):
    """Whatever was sampled before: special ids and bytes are those of a full encoding."""

    def said(ids):
        out = []
        for number in ids:
            if VOCABULARY.is_special(number):
                out.append(number)
            elif out and isinstance(out[-1], bytes):
                out[-1] += VOCABULARY.token_bytes(number)
            else:
                out.append(VOCABULARY.token_bytes(number))
        return out

    store, chat = sessions(), FIRST
    for answer, question, honest in turns:
        rendered = CODEC.render(chat)
        turn = serve(store, chat, [*spelled_badly(answer), END])
        assert said(turn.ids) == said(rendered.ids)
        chat = then(chat, answer if honest else answer + "!", question)
