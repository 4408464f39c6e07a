"""Requests before they reach a worker: what is reused, and what limits do."""

import dataclasses
import json

import pytest

from kimi_runtime.errors import RequestError
from kimi_runtime.protocol.chat import Chat, Message
from kimi_runtime.server.openai_request import parse_chat
from kimi_runtime.server.prepare import Limits, Records, chat_of, sampling_of
from scripted_stack import CODEC, VOCABULARY

FIRST = Chat(messages=(Message("system", "Be brief."), Message("user", "Hello.")), thinking=False)


def longer(chat, text):
    more = (Message("assistant", text), Message("user", f"and {text}?"))
    return dataclasses.replace(chat, messages=(*chat.messages, *more))


def test_a_later_turn_is_rendered_from_the_record_of_the_earlier_one():
    records, chat = Records(VOCABULARY, max_ids=10_000), FIRST
    encoded = []
    for number in range(5):
        name, record = records.take("t", None, chat)
        before = record.encoded_parts
        rendered = CODEC.render(chat, record)
        assert rendered == CODEC.render(chat)
        records.give(name, record, size=len(rendered.ids))
        encoded.append(record.encoded_parts - before)
        chat = longer(chat, f"turn {number}")
    assert encoded == [2, 2, 2, 2, 2]


def test_conversations_and_tenants_have_records_of_their_own():
    records = Records(VOCABULARY, max_ids=10_000)
    name, record = records.take("t", None, FIRST)
    records.give(name, record, size=10)
    assert records.take("u", None, FIRST)[1] is not record
    assert records.take("t", "hint", FIRST)[1] is not record
    assert records.take("t", None, longer(FIRST, "x"))[1] is record
    assert records.take("t", None, FIRST)[1] is not record  # it is in use


def test_records_hold_no_more_ids_than_they_may():
    records = Records(VOCABULARY, max_ids=100)
    held = []
    for number in range(20):
        chat = dataclasses.replace(FIRST, messages=(Message("user", f"number {number}"),))
        name, record = records.take("t", None, chat)
        records.give(name, record, size=30)
        held.append((chat, record))
    kept = [records.take("t", None, chat)[1] is record for chat, record in held]
    assert kept == [False] * 17 + [True] * 3


def request(**fields):
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields
    return parse_chat(json.dumps(body).encode())


def sampled(wanted, *, prompt_tokens=100, context=200, default=50):
    return sampling_of(
        wanted,
        default_temperature=1.0,
        stop_ids=(1,),
        prompt_tokens=prompt_tokens,
        limits=Limits(context, default),
        vocabulary_size=1000,
    )


def test_the_output_limit_is_the_clients_or_the_default_and_fits_the_context():
    assert sampled(request()).max_tokens == 50
    assert sampled(request(), default=1000).max_tokens == 100
    assert sampled(request(max_tokens=100)).max_tokens == 100
    assert sampled(request(max_tokens=7, max_completion_tokens=9)).max_tokens == 9
    assert sampled(request(max_tokens=10**6), context=None).max_tokens == 10**6
    with pytest.raises(RequestError, match="at most 100") as refused:
        sampled(request(max_completion_tokens=101))
    assert refused.value.param == "max_completion_tokens"
    with pytest.raises(RequestError, match="context is 200"):
        sampled(request(), prompt_tokens=200)


def test_explicit_zeros_are_not_defaults():
    sampling = sampled(request(temperature=0, min_p=0, top_k=0, seed=0))
    assert (sampling.temperature, sampling.seed) == (0.0, 0)


@pytest.mark.parametrize(
    ("fields", "keeps"),
    [
        ({}, False),
        ({"thinking": {"type": "enabled", "keep": "all"}}, True),
        ({"chat_template_kwargs": {"preserve_thinking": True}}, True),
    ],
)
def test_earlier_reasoning_is_kept_when_asked_for(fields, keeps):
    chat, _ = chat_of(request(**fields), thinks=True)
    assert chat.keep_reasoning is keeps


def test_reasoning_comes_back_under_any_of_its_names():
    for name in ("reasoning_content", "reasoning"):
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "y", name: "because"},
            {"role": "user", "content": "z"},
        ]
        chat, _ = chat_of(request(messages=messages), thinks=True)
        assert chat.messages[1].reasoning == "because"
