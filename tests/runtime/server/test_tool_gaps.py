"""What a router tells a real pool daemon of its sessions, and what the daemon makes of it."""

from contextlib import aclosing, asynccontextmanager

import aiohttp
import pytest

from kimi_runtime.engine.adapters.scripts import Reply
from kimi_runtime.router.hints import MAX_PENDING, Hints
from kimi_runtime.router.reuse import gap_reuse
from kimi_runtime.spec.router import Cost, PoolEndpoint
from kimi_runtime.spec.umbp import HintRequest
from kimi_runtime.umbp.client import open_pool
from kimi_runtime.umbp.daemon import running
from pool_daemon import blocks_of, keys_of, pool_spec
from scripted_stack import MODEL, Part, call_key_file, ids_of, running_stack, until

CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
CALL = ids_of(
    "Look.</think><|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
)
SIZE = 4096


def says(request):
    return Reply(ids_of("Yes.<|im_end|>") if request.tenant == "readyz" else CALL)


@asynccontextmanager
async def stack_of(folder, **options):
    """A router, a worker and the pool daemon next to it."""
    key_file = call_key_file(folder)
    spec = pool_spec(folder, call_key=key_file, dram_bytes="2MiB")
    async with running(spec, reuse=gap_reuse) as daemon:
        pools = (PoolEndpoint(name="pool", url=daemon.url),)
        worker = Part("w", says)
        async with (
            running_stack(folder, [worker], pools=pools, policy=Cost(), **options) as stack,
            aclosing(await open_pool(spec.socket, key_file.read_bytes())) as pool,
            aiohttp.ClientSession(stack.url) as http,
        ):
            yield http, stack, daemon, pool


async def ask(http, messages, *, session=None, tools=TOOLS):
    body = {"model": MODEL, "messages": messages, "tools": tools}
    headers = {"X-Session-ID": session} if session else {}
    async with http.post(CHAT, json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        return (await answer.json())["choices"][0]


def keys_of_sessions(stack):
    """Block keys of each session, by its client's word."""
    known = stack.router.sessions._sessions.values()
    return {one.hint: list(next(iter(one.keys.values()))) for one in known}


def words(name):
    return [{"role": "user", "content": f"{name} asks. " * 30}]


async def kept(daemon, count):
    """Let the daemon give up `count` blocks; those it keeps."""
    gone = set(daemon.tier.evict(count))
    return lambda keys: [key for key in keys if key not in gone]


def hinted(daemon, kind):
    counts = daemon.clients.pool.retention.hints
    return next(count for one, count in counts.items() if one.name == kind)


async def store(pool, keys):
    await pool.store(keys, blocks_of(keys, SIZE), deadline_s=5.0)


async def test_a_session_that_waits_for_its_tool_is_kept_and_one_that_ended_goes_first(tmp_path):
    async with stack_of(tmp_path) as (http, stack, daemon, pool):
        for name in ("waits", "ends"):
            choice = await ask(http, words(name), session=name)
            assert choice["finish_reason"] == "tool_calls"
        keys = keys_of_sessions(stack)
        own = {name: keys[name][-8:] for name in keys}  # they may share their fronts
        strangers = keys_of(8, 1000)
        for blocks in (own["waits"], own["ends"], strangers):
            await store(pool, blocks)
        await until(lambda: hinted(daemon, "PAUSED") >= 2)
        async with http.delete("/v1/sessions/ends") as answer:
            assert answer.status == 204
        await until(lambda: hinted(daemon, "ENDED") == 1)
        left = await kept(daemon, 8)
        assert left(own["ends"]) == []
        assert left(own["waits"]) == own["waits"]
        assert left(strangers) == strangers
        left = await kept(daemon, 8)
        assert left(own["waits"]) == own["waits"]
        assert left(strangers) == []


async def test_a_turn_that_comes_back_is_told_and_its_pause_is_learned(tmp_path):
    async with stack_of(tmp_path) as (http, stack, daemon, _):
        first = await ask(http, words("a"), session="a")
        await until(lambda: hinted(daemon, "PAUSED") == 1)
        call = first["message"]["tool_calls"][0]["id"]
        result = {"role": "tool", "tool_call_id": call, "content": "ok"}
        await ask(http, [*words("a"), first["message"], result], session="a")
        await until(lambda: hinted(daemon, "PAUSED") == 2)
        assert hinted(daemon, "ACTIVE") + stack.router.hints.outcomes["merged"] == 1
        assert stack.router.hints.outcomes["failed"] == 0
        (session,) = daemon.clients.pool.retention._sessions.values()
        assert list(session.keys) == keys_of_sessions(stack)["a"]
        learned = stack.router.insight.gaps
        assert ("default", "bash") in learned._tools
        assert stack.router.insight.gaps is stack.router.insight.planner.models.gaps


@pytest.mark.parametrize("before", [None, "other"])
async def test_a_session_that_is_named_later_is_ended_by_that_name(tmp_path, before):
    async with stack_of(tmp_path) as (http, _, daemon, _):
        first = await ask(http, words("a"), session=before)
        await until(lambda: hinted(daemon, "PAUSED") == 1)
        call = first["message"]["tool_calls"][0]["id"]
        result = {"role": "tool", "tool_call_id": call, "content": "ok"}
        await ask(http, [*words("a"), first["message"], result], session="named")
        await until(lambda: hinted(daemon, "PAUSED") == 2)
        async with http.delete("/v1/sessions/other") as answer:
            assert answer.status == 404
        async with http.delete("/v1/sessions/named") as answer:
            assert answer.status == 204
        await until(lambda: hinted(daemon, "ENDED") == 1)


async def test_who_ends_a_session_that_is_not_there_is_told_so(tmp_path):
    async with (
        stack_of(tmp_path) as (http, _, _, _),
        http.delete("/v1/sessions/unknown") as answer,
    ):
        assert answer.status == 404
        assert "unknown" in (await answer.json())["error"]["message"]


async def test_a_pool_that_does_not_answer_holds_no_request_up_and_is_counted(tmp_path):
    gone = (PoolEndpoint(name="pool", url="http://127.0.0.1:1"),)
    async with (
        running_stack(tmp_path, [Part("w", says)], pools=gone, policy=Cost()) as stack,
        aiohttp.ClientSession(stack.url) as http,
    ):
        for n in range(3):
            await ask(http, words(f"{n}"), session=f"{n}")
        hints = stack.router.hints
        await until(lambda: hints.outcomes["failed"] >= 3 and not hints.pending)
        async with http.get("/metrics") as answer:
            text = await answer.text()
        assert (
            f'kimistack_router_hints_total{{outcome="failed"}} {hints.outcomes["failed"]}' in text
        )
        assert 'kimistack_router_session_turns_total{outcome="at_once"} 3.0' in text


def hint(session, kind="paused", **fields):
    return HintRequest(session=session.hex(), kind=kind, **fields)


def test_hints_are_merged_by_session_and_bounded():
    hints = Hints(lambda _: None)
    session, key = b"s" * 16, b"k" * 16
    hints.tell("pool", hint(session, keys=(key.hex(),), expected=3.0))
    hints.tell("pool", hint(session, "active"))
    (merged,) = hints._pending["pool"].values()
    assert (merged.kind, merged.keys, merged.expected) == ("active", (key.hex(),), None)
    hints.tell("pool", hint(session, "ended"))
    assert hints.pending == 1
    for n in range(MAX_PENDING + 5):
        hints.tell("pool", hint(n.to_bytes(16, "big")))
    assert hints.pending == MAX_PENDING
    assert hints.outcomes["dropped"] == 6


@pytest.mark.parametrize("count", [1, 3])
async def test_a_daemon_takes_several_hints_at_once(tmp_path, count):
    async with stack_of(tmp_path) as (_, stack, daemon, _):
        for n in range(count):
            stack.router.hints.tell("pool", hint(n.to_bytes(16, "big"), keys=("ab" * 16,)))
        await until(lambda: stack.router.hints.outcomes["told"] == count)
        assert daemon.clients.pool.retention.sessions == count
