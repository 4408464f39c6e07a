"""The front door with OpenAI's own client, over real sockets."""

import json
from contextlib import asynccontextmanager

import aiohttp
import openai
import pytest

from kimi_runtime.engine.adapters.scripted import Pace
from kimi_runtime.engine.adapters.scripts import Reply
from kimi_runtime.spec.request import BANS, FinishReason
from kimi_runtime.spec.worker import Role
from scripted_stack import MODEL, VOCABULARY, Part, ids_of, running_stack, until

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
CALL = (
    "I look it up.</think><|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    '<|tool_call_argument_begin|>{"city": "Oslo STOP"}<|tool_call_end|>'
    "<|tool_calls_section_end|><|im_end|>"
)
KEEP = {"type": "enabled", "keep": "all"}
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}]}


def says(text, **options):
    return lambda request: Reply(ids_of(text), **options)


@asynccontextmanager
async def client_of(folder, script, **options):
    parts = [Part("w", script)] if callable(script) else script
    async with (
        running_stack(folder, parts, **options) as stack,
        openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield client, stack


async def test_a_whole_answer_has_content_usage_and_finish_reason(tmp_path):
    async with client_of(tmp_path, says("Hello, world!<|im_end|>")) as (client, _):
        answer = await client.chat.completions.create(**ASK)
    choice = answer.choices[0]
    assert choice.message.content == "Hello, world!"
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is None
    assert answer.usage.completion_tokens == len(ids_of("Hello, world!<|im_end|>"))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_a_stream_says_the_same_and_gives_usage_twice(tmp_path):
    script = says("Grüße, 世界! 🙂<|im_end|>")
    async with client_of(tmp_path, script) as (client, _):
        whole = await client.chat.completions.create(**ASK)
        stream = await client.chat.completions.create(
            **ASK, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    content = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert content == whole.choices[0].message.content == "Grüße, 世界! 🙂"
    assert [c.choices[0].delta.role for c in chunks if c.choices].count("assistant") == 1
    last, final = chunks[-2], chunks[-1]
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].usage["prompt_tokens"] == whole.usage.prompt_tokens
    assert final.choices == []
    assert final.usage.completion_tokens == whole.usage.completion_tokens
    assert final.usage.cached_tokens == final.usage.prompt_tokens_details.cached_tokens > 0


async def test_three_turns_with_a_tool_call_hit_the_cache_and_split_prefill_from_decode(tmp_path):
    replies = iter(
        [CALL, "</think>It is cold in Oslo.<|im_end|>", "</think>You are welcome.<|im_end|>"]
    )
    answers = {}

    def script(request):
        if request.tenant == "readyz" or request.kv.offer:
            return Reply(ids_of("x"))
        return answers.setdefault(request.request_id, Reply(ids_of(next(replies))))

    parts = [Part("p", script, Role.PREFILL), Part("d", script, Role.DECODE)]
    async with client_of(tmp_path, parts, thinking=True) as (client, stack):
        # without it the template empties earlier reasoning, and the prompt changes from there on
        keep = {"model": MODEL, "tools": TOOLS, "extra_body": {"thinking": KEEP}}
        messages = [{"role": "user", "content": "What is the weather like in Oslo today?"}]
        first = await client.chat.completions.create(messages=messages, **keep)
        message = first.choices[0].message
        call = message.tool_calls[0]
        assert first.choices[0].finish_reason == "tool_calls"
        assert message.reasoning_content == "I look it up."
        assert message.content is None
        assert (call.id, call.function.name) == ("functions.get_weather:0", "get_weather")
        assert json.loads(call.function.arguments) == {"city": "Oslo STOP"}
        assert first.usage.completion_tokens_details.reasoning_tokens == len(
            VOCABULARY.encode_text("I look it up.")
        )
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "-5 degrees"}]
        second = await client.chat.completions.create(messages=messages, **keep)
        assert second.choices[0].finish_reason == "stop"
        messages += [second.choices[0].message, {"role": "user", "content": "Thanks."}]
        third = await client.chat.completions.create(messages=messages, **keep)
        assert 0 < second.usage.cached_tokens < third.usage.cached_tokens
        prefill, decode = stack.workers["p"].adapter, stack.workers["d"].adapter
        assert prefill.counters().hand_offs_offered == 4  # three turns and the readiness probe
        assert decode.counters().hand_offs_taken == 4
        await until(lambda: prefill.counters().hand_offs_released == 4)
        assert stack.router.sessions.kept == 2


async def test_a_tool_call_streams_its_name_first_and_its_arguments_in_fragments(tmp_path):
    async with client_of(tmp_path, says(CALL), thinking=True) as (client, _):
        stream = await client.chat.completions.create(**ASK, tools=TOOLS, stream=True)
        chunks = [chunk async for chunk in stream]
    deltas = [c.choices[0].delta for c in chunks]
    calls = [d.tool_calls for d in deltas if d.tool_calls is not None]
    assert all(calls)  # never an empty list
    first = calls[0][0]
    assert (first.index, first.id, first.function.name) == (
        0,
        "functions.get_weather:0",
        "get_weather",
    )
    assert all(call[0].id is None and call[0].function.name is None for call in calls[1:])
    assert len(calls) > 3
    arguments = "".join(call[0].function.arguments for call in calls)
    assert json.loads(arguments) == {"city": "Oslo STOP"}
    reasoning = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
    assert reasoning == "I look it up."
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_an_open_call_that_ran_out_of_tokens_is_no_tool_call(tmp_path):
    text = CALL.split(" STOP")[0]
    script = says(text, finish=FinishReason.LENGTH)
    async with client_of(tmp_path, script, thinking=True) as (client, _):
        answer = await client.chat.completions.create(**ASK, tools=TOOLS)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.tool_calls is None


async def test_stop_strings_end_the_content_and_free_the_worker(tmp_path):
    script = says("one two STOP three" * 50)
    pace = Pace(output_ids_per_s=2000.0)
    async with client_of(tmp_path, [Part("w", script, pace=pace)]) as (client, stack):
        answer = await client.chat.completions.create(**ASK, stop=["STOP", "never"])
        assert answer.choices[0].message.content == "one two "
        assert answer.choices[0].finish_reason == "stop"
        counters = stack.workers["w"].adapter.counters
        await until(lambda: counters().running == 0)
        assert counters().output_tokens < 100


async def test_stop_strings_do_not_fire_in_reasoning_or_arguments(tmp_path):
    script = says(CALL.replace("I look it up.", "I must not STOP here."))
    async with client_of(tmp_path, script, thinking=True) as (client, _):
        answer = await client.chat.completions.create(**ASK, tools=TOOLS, stop="STOP")
    message = answer.choices[0].message
    assert message.reasoning_content == "I must not STOP here."
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Oslo STOP"}


async def test_only_one_call_is_made_when_parallel_calls_are_off(tmp_path):
    section = CALL.split("<|tool_calls_section_end|>")[0]
    begin = "<|tool_call_begin|>"
    second = begin + section.split(begin)[1].replace(":0", ":1")
    script = says(f"{section}{second}<|tool_calls_section_end|><|im_end|>")
    async with client_of(tmp_path, script, thinking=True) as (client, _):
        both = await client.chat.completions.create(**ASK, tools=TOOLS)
        one = await client.chat.completions.create(**ASK, tools=TOOLS, parallel_tool_calls=False)
    assert [c.id for c in both.choices[0].message.tool_calls] == [
        "functions.get_weather:0",
        "functions.get_weather:1",
    ]
    assert len(one.choices[0].message.tool_calls) == 1
    assert one.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        ("required", "lark"),
        ({"type": "function", "function": {"name": "get_weather"}}, "lark"),
        ("none", None),
        ("auto", "lark"),
    ],
)
async def test_tool_choice_decides_the_grammar(tmp_path, choice, kind):
    seen = []

    def script(request):
        seen.append(request)
        return Reply(ids_of("ok<|im_end|>"))

    async with client_of(tmp_path, script) as (client, _):
        await client.chat.completions.create(**ASK, tools=TOOLS, tool_choice=choice)
    grammar = seen[-1].grammar
    assert (grammar and grammar.kind) == kind
    if grammar is not None:
        assert bool(grammar.starts_after) == (choice == "auto")


@pytest.mark.parametrize(
    ("asked", "may_call"),
    [
        ({}, False),
        ({"tools": TOOLS, "tool_choice": "none"}, False),
        ({"tools": TOOLS}, True),
        ({"tools": TOOLS, "tool_choice": "required"}, True),
    ],
)
async def test_what_nobody_may_call_is_banned_from_the_output(tmp_path, asked, may_call):
    seen = []

    def script(request):
        seen.append(request.sampling.logit_bias)
        return Reply(ids_of("ok<|im_end|>"))

    markers = ids_of(
        "<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|>"
        "<|tool_call_end|><|tool_calls_section_end|>"
    )
    wished = {"5": 2.0, str(markers[0]): 50.0}
    async with client_of(tmp_path, script) as (client, _):
        await client.chat.completions.create(**ASK, **asked, logit_bias=wished)
    banned = {} if may_call else dict.fromkeys(markers, BANS)
    assert seen[-1] == {5: 2.0, markers[0]: 50.0} | banned


async def test_a_json_schema_becomes_a_grammar(tmp_path):
    seen = []

    def script(request):
        seen.append(request)
        return Reply(ids_of('{"a": 1}<|im_end|>'))

    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    async with client_of(tmp_path, script) as (client, _):
        await client.chat.completions.create(**ASK, response_format=wanted)
        assert seen[-1].grammar is not None
        await client.chat.completions.create(**ASK, response_format={"type": "json_object"})
        assert seen[-1].grammar is not None
        await client.chat.completions.create(**ASK, response_format={"type": "text"})
        assert seen[-1].grammar is None


async def test_sampling_reaches_the_worker_and_defaults_are_kimis(tmp_path):
    seen = []

    def script(request):
        seen.append(request.sampling)
        return Reply(ids_of("ok<|im_end|>"))

    async with client_of(tmp_path, script) as (client, _):
        await client.chat.completions.create(**ASK)
        assert (seen[-1].temperature, seen[-1].top_p) == (0.6, 0.95)
        await client.chat.completions.create(**ASK, extra_body={"thinking": {"type": "enabled"}})
        assert seen[-1].temperature == 1.0
        await client.chat.completions.create(
            **ASK,
            temperature=0,
            top_p=0.5,
            seed=7,
            max_completion_tokens=5,
            frequency_penalty=0.5,
            presence_penalty=-1,
            logit_bias={"5": -100},
        )
    sampling = seen[-1]
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.0, 0.5, 7)
    assert (sampling.max_tokens, sampling.logit_bias[5]) == (5, BANS)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -1.0)
    assert VOCABULARY.special("<|im_end|>") in sampling.stop_ids


@pytest.mark.parametrize(
    ("extra", "thinks"),
    [
        ({}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"chat_template_kwargs": {"thinking": False}}, False),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, True),
    ],
)
async def test_three_ways_to_switch_thinking_map_to_one(tmp_path, extra, thinks):
    script = says("thoughts</think>answer<|im_end|>" if thinks else "answer<|im_end|>")
    async with client_of(tmp_path, script, thinking=True) as (client, _):
        answer = await client.chat.completions.create(**ASK, extra_body=extra)
    message = answer.choices[0].message
    assert message.content == "answer"
    assert getattr(message, "reasoning_content", None) == ("thoughts" if thinks else None)


async def test_logprobs_are_of_the_content_only(tmp_path):
    async with client_of(tmp_path, says("hm</think>né 🙂<|im_end|>"), thinking=True) as (client, _):
        whole = await client.chat.completions.create(**ASK, logprobs=True, top_logprobs=1)
        stream = await client.chat.completions.create(**ASK, logprobs=True, stream=True)
        chunks = [chunk async for chunk in stream]
    entries = whole.choices[0].logprobs.content
    assert bytes(b for entry in entries for b in entry.bytes).decode() == "né 🙂"
    assert all(len(entry.top_logprobs) == 1 for entry in entries)
    streamed = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [e.bytes for e in streamed] == [e.bytes for e in entries]


async def test_completions_take_text_or_ids(tmp_path):
    async with client_of(tmp_path, says(" and so on<|im_end|>")) as (client, _):
        text = await client.completions.create(model=MODEL, prompt="One, two", logprobs=1)
        ids = await client.completions.create(
            model=MODEL, prompt=VOCABULARY.encode_text("One, two")
        )
        stream = await client.completions.create(model=MODEL, prompt="One, two", stream=True)
        streamed = "".join([c.choices[0].text async for c in stream if c.choices])
    assert text.choices[0].text == ids.choices[0].text == streamed == " and so on"
    assert text.usage.prompt_tokens == ids.usage.prompt_tokens
    assert "".join(text.choices[0].logprobs.tokens) == " and so on"
    assert text.choices[0].finish_reason == "stop"


async def test_logprobs_name_every_id_of_a_text_that_ends_inside_a_character(tmp_path):
    ids = (*ids_of("so "), *VOCABULARY.encode_text("\U0001f642")[:-1])
    async with client_of(tmp_path, lambda request: Reply(ids)) as (client, _):
        asked = {"model": MODEL, "prompt": "x", "logprobs": 0, "max_tokens": len(ids)}
        whole = await client.completions.create(**asked)
        stream = await client.completions.create(**asked, stream=True)
        pieces = [c.choices[0] async for c in stream if c.choices]
    assert whole.choices[0].text == "so \ufffd"
    assert len(whole.choices[0].logprobs.tokens) == len(ids)
    assert "".join(piece.text for piece in pieces) == "so \ufffd"
    assert sum(len(piece.logprobs.tokens) for piece in pieces if piece.logprobs) == len(ids)


async def test_models_are_listed_with_context_and_capabilities(tmp_path):
    async with client_of(tmp_path, says("x")) as (client, _):
        models = await client.models.list()
        model = await client.models.retrieve(MODEL)
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-4")
    assert [one.id for one in models.data] == [MODEL]
    assert model.context_length == 131_072
    assert model.capabilities["tools"] is True


async def test_a_request_id_is_echoed_and_made_up_when_it_is_unusable(tmp_path):
    async with (
        running_stack(tmp_path, [Part("w", says("ok<|im_end|>"))]) as stack,
        aiohttp.ClientSession() as http,
    ):
        url = f"{stack.url}/v1/chat/completions"
        async with http.post(url, json=ASK, headers={"X-Request-ID": "my-id.7"}) as answer:
            assert answer.headers["X-Request-ID"] == "my-id.7"
        report = stack.workers["w"].adapter.load()
        assert report.last_request["router-0"].startswith("my-id.7.")
        async with http.post(url, json=ASK, headers={"X-Request-ID": "é" * 10}) as answer:
            assert answer.headers["X-Request-ID"].startswith("req-")


async def test_equal_sampled_ids_make_the_next_turn_a_hit_beyond_the_prompt(tmp_path):
    by_bytes = {VOCABULARY.token_bytes(i): i for i in range(VOCABULARY.rank_count)}
    odd = [by_bytes[bytes([byte])] for byte in b"the quick brown fox jumps over it"]
    odd.append(VOCABULARY.special("<|im_end|>"))
    async with client_of(tmp_path, lambda request: Reply(odd)) as (client, stack):
        messages = [{"role": "user", "content": "Write a sentence."}]
        first = await client.chat.completions.create(model=MODEL, messages=messages)
        messages += [first.choices[0].message, {"role": "user", "content": "Another."}]
        await client.chat.completions.create(model=MODEL, messages=messages)
        session = next(iter(stack.router.sessions._sessions.values()))
        turn = first.usage.prompt_tokens + 3 + len(odd)
        assert list(session.ids[turn - len(odd) : turn]) == odd
