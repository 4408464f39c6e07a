"""What clients get wrong: each answer is an error in OpenAI's form, and others are still served."""

import asyncio
import json
from contextlib import asynccontextmanager, suppress

import aiohttp

from kimi_runtime.engine.adapters.scripts import Reply
from scripted_stack import MODEL, Part, ids_of, running_stack

ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}]}
CHAT = "/v1/chat/completions"
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}


def hello(request):
    return Reply(ids_of("Hello.<|im_end|>"))


@asynccontextmanager
async def front_door(folder, **options):
    info = {"max_context_tokens": 400}
    async with (
        running_stack(folder, [Part("w", hello, info=info)], **options) as stack,
        aiohttp.ClientSession(stack.url) as http,
    ):
        yield http


async def refused(http, status, *, path=CHAT, method="POST", **sent):
    """Send it, check the status and the form, and that the next request is served."""
    async with http.request(method, path, **sent) as answer:
        body = await answer.json()
        assert answer.status == status, body
        assert answer.headers["X-Request-ID"]
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    async with http.post(CHAT, json=ASK) as answer:
        assert answer.status == 200
    return body["error"]


FIELDS = [
    ({"mirostat": 2}, "mirostat"),
    ({"n": 2}, "n"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"\u0661": 1}}, "logit_bias"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [3]}, "messages[0]"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "mood": "bad"}]}, "messages[0].mood"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "no"}]}, None),
    ({"tools": [{"type": "builtin_function", "function": FUNCTION}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
        "tools[0].function.parameters",
    ),
    (
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
            ]
        },
        "tools[0].function.parameters.type",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    (
        {
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "g"}},
        },
        "tool_choice.function.name",
    ),
    (
        {
            "tools": [{"type": "function", "function": FUNCTION}],
            "response_format": {"type": "json_object"},
        },
        "response_format",
    ),
    ({"max_tokens": 399}, "max_tokens"),
    ({"messages": [{"role": "user", "content": "too long " * 400}]}, "messages"),
]


async def test_a_wrong_or_unsupported_field_is_named(tmp_path):
    async with front_door(tmp_path) as http:
        for fields, param in FIELDS:
            error = await refused(http, 400, json=ASK | fields)
            assert error["type"] == "invalid_request_error"
            if param is not None:
                assert error["param"] == param, error


async def test_a_missing_field_is_named(tmp_path):
    async with front_door(tmp_path) as http:
        for name in ASK:
            error = await refused(http, 400, json={k: v for k, v in ASK.items() if k != name})
            assert (error["param"], error["code"]) == (name, "missing_parameter")


async def test_another_model_and_an_unknown_route_are_not_found(tmp_path):
    async with front_door(tmp_path) as http:
        error = await refused(http, 404, json=ASK | {"model": "gpt-4"})
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        await refused(http, 404, path="/v1/embeddings", json={})
        await refused(http, 405, path=CHAT, method="GET")
        await refused(http, 405, path="/v1/models", json={})


BODIES = [
    b"",
    b"{",
    b"[]",
    b'"text"',
    b"\xff\xfe\x00",
    b'{"model": "\xff"}',
    b'{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}',
    b'{"model": NaN}',
    b"[" * 50_000,
    json.dumps(ASK).encode()[:-1],
]


async def test_a_body_that_is_no_json_in_utf8_is_refused(tmp_path):
    async with front_door(tmp_path) as http:
        for body in BODIES:
            await refused(http, 400, data=body)


async def test_a_body_over_the_limit_is_refused_before_it_was_read_whole(tmp_path):
    sent = 0

    async def endless():
        nonlocal sent
        while sent < 50 * 2**20:
            sent += 2**16
            yield b"x" * 2**16

    async with front_door(tmp_path, max_body="64KiB") as http:
        error = await refused(http, 413, json=ASK | {"user": "x" * 2**16})
        assert "64KiB" in error["message"]
        # the answer may come while the body is still being sent
        with suppress(ConnectionError, aiohttp.ClientError):
            await refused(http, 413, data=endless())
        assert sent < 50 * 2**20


async def test_a_body_that_stops_coming_is_given_up(tmp_path):
    async with front_door(tmp_path, send_stall=0.2) as http:
        host, port = http._base_url.host, http._base_url.port
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(
            b"POST " + CHAT.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
        )
        async with asyncio.timeout(5):
            assert b" 408 " in await reader.readline()
        writer.close()
        await writer.wait_closed()
        await refused(http, 400, data=b"{")


async def test_ids_outside_the_vocabulary_and_empty_prompts_are_refused(tmp_path):
    async with front_door(tmp_path) as http:
        for prompt in ([10**6], [-1], [], "", [1.5], {"a": 1}, [[1, 2]]):
            error = await refused(
                http, 400, path="/v1/completions", json={"model": MODEL, "prompt": prompt}
            )
            assert error["param"].startswith("prompt")
        error = await refused(
            http, 400, path="/v1/completions", json={"model": MODEL, "prompt": "x", "echo": True}
        )
        assert error["param"] == "echo"
