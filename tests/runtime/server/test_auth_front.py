"""Who may call: API keys at the front door, the call key inside."""

import secrets
from contextlib import asynccontextmanager

import aiohttp
import pytest

from kimi_runtime import clock
from kimi_runtime.auth import HEADER, sign
from kimi_runtime.engine.adapters.scripts import Reply
from kimi_runtime.errors import ConfigError
from kimi_runtime.server.app import read_api_keys
from scripted_stack import (
    CALL_KEY,
    MODEL,
    Part,
    call_key_file,
    ids_of,
    running_stack,
    running_worker,
    until,
)

ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}]}
KEYS = "sk-first-0123456789 team\n# a comment\n\nsk-other-0123456789\n"


def hello(request):
    return Reply(ids_of("Hello.<|im_end|>"))


async def test_the_front_door_asks_for_a_key_where_there_is_a_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text(KEYS)
    async with (
        running_stack(tmp_path, [Part("w", hello)], api_keys=path) as stack,
        aiohttp.ClientSession(stack.url) as http,
    ):
        for headers in (
            {},
            {"Authorization": "Bearer wrong-0123456789abc"},
            {"Authorization": "Basic sk-first-0123456789"},
            {"Authorization": "Bearer"},
        ):
            for method, target in (("POST", "/v1/chat/completions"), ("GET", "/v1/models")):
                async with http.request(method, target, headers=headers) as answer:
                    assert answer.status == 401
                    assert (await answer.json())["error"]["type"] == "authentication_error"
        for target in ("/healthz", "/readyz", "/metrics"):
            async with http.get(target) as answer:
                assert answer.status == 200
        for key in ("sk-first-0123456789", "sk-other-0123456789"):
            headers = {"Authorization": f"Bearer {key}"}
            async with http.post("/v1/chat/completions", json=ASK, headers=headers) as answer:
                assert answer.status == 200
        tenants = {session.tenant for session in stack.router.sessions._sessions.values()}
        assert "team" in tenants
        assert len(tenants) == 2  # the key without a name is a tenant of its own


@pytest.mark.parametrize(
    ("text", "says"), [("", "no key"), ("short", "line 1"), ("a" * 20 + " b c", "line 1")]
)
def test_a_file_without_usable_keys_is_refused(tmp_path, text, says):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_api_keys(path)


@asynccontextmanager
async def inside(folder):
    """A client of a worker's internal port."""
    async with (
        running_worker(Part("w", hello), call_key_file(folder)) as worker,
        aiohttp.ClientSession(worker.url) as http,
    ):
        await until(lambda: worker.server.ready)
        yield http


def signed(method, path, body=b"", *, key=CALL_KEY, at_s=0.0):
    nonce = secrets.token_bytes(16)
    now_s = clock.unix_s() + at_s
    return {HEADER: sign(key.encode(), method, path, body, unix_s=now_s, nonce=nonce)}


async def test_internal_routes_refuse_callers_without_the_call_key(tmp_path):
    routes = [
        ("GET", "/info"),
        ("GET", "/load"),
        ("GET", "/feed"),
        ("POST", "/generate"),
        ("POST", "/handoff/x/release"),
        ("GET", "/nothing-here"),
    ]
    async with inside(tmp_path) as http:
        for method, path in routes:
            async with http.request(method, path) as answer:
                assert answer.status == 401
        for method, path in routes[:-1]:
            for headers in (
                signed(method, path, key="x" * 64),
                signed(method, path, at_s=-3600.0),
                signed(method, path + "/other"),
                signed(method, path, b"another body"),
                {HEADER: "v1 nonsense"},
            ):
                async with http.request(method, path, headers=headers) as answer:
                    assert answer.status == 401
        async with http.get("/info", headers=signed("GET", "/info")) as answer:
            assert (await answer.json())["name"] == "w"
        for path in ("/healthz", "/readyz", "/metrics"):
            async with http.get(path) as answer:
                assert answer.status == 200


async def test_a_signature_is_good_once(tmp_path):
    async with inside(tmp_path) as http:
        headers = signed("GET", "/load")
        async with http.get("/load", headers=headers) as answer:
            assert answer.status == 200
        async with http.get("/load", headers=headers) as answer:
            assert answer.status == 401
