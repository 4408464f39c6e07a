"""Sessions that a router served, as the simulator reads them."""

import json

import aiohttp

from kimi_runtime.engine.adapters.scripts import Reply
from kimi_runtime.router.recording import FIRST_TEXT, Recording, Served
from kimi_runtime.sim.sessions import Pause
from kimi_runtime.sim.traces import read_trace
from kimi_runtime.spec.router import RecordSpec
from scripted_stack import MODEL, Part, ids_of, running_stack

KEYS = tuple(n.to_bytes(16, "big") for n in range(16))


def recording(lines, **limits):
    return Recording(lines.append, salt=b"s" * 32, started_s=100.0, **limits)


def served(session=b"a", **fields):
    usual = {
        "tenant": "t",
        "prompt_tokens": 300,
        "kept_tokens": 0,
        "history_tokens": 0,
        "output_tokens": 20,
        "asked_s": 101.0,
        "ended_s": 102.0,
        "outcome": "finished",
        "tools": ("bash",),
        "block_tokens": 64,
        "blocks": KEYS[:5],
        "prefix": (128, b"system"),
    }
    return Served(session, **(usual | fields))


def sessions_of(lines):
    return read_trace([line.decode() for line in lines], "kimistack", name="recorded").sessions


def test_a_session_reads_back_as_the_turns_and_pauses_it_had():
    lines = []
    recorded = recording(lines)
    recorded.served(served())
    recorded.served(
        served(prompt_tokens=400, kept_tokens=320, history_tokens=320, asked_s=105.5, ended_s=107.0)
    )
    later = {"prompt_tokens": 250, "kept_tokens": 128, "history_tokens": 420, "asked_s": 200.0}
    recorded.served(served(**later, tools=(), output_tokens=9, outcome="left", ended_s=201.0))
    assert lines == []
    recorded.over(b"a")
    (session,) = sessions_of(lines)
    first, second, third = session.turns
    assert (session.start_s, session.prefix_tokens, session.text) == (1.0, 128, FIRST_TEXT)
    assert (first.append_tokens, first.output_tokens, first.pause_s) == (172, 20, 3.5)
    assert (second.append_tokens, second.keep_tokens, second.pause_s) == (80, None, 93.0)
    assert (third.append_tokens, third.keep_tokens, third.aborted_after) == (122, 128, 9)
    assert [turn.pause for turn in session.turns] == [Pause.TOOL, Pause.TOOL, Pause.END]
    assert [sum(tokens for _, tokens in context) for context in session.contexts] == [300, 400, 250]
    own = session.text
    assert session.contexts[1][-3:] == ((own, 172), (own + 1, 20), (own + 2, 80))
    assert session.contexts[2] == (session.contexts[0][0], (own + 4, 122))
    # what the simulator will build up is what was there
    length = session.prefix_tokens
    for turn, prompt in zip(session.turns, (300, 400, 250), strict=True):
        length = length if turn.keep_tokens is None else turn.keep_tokens
        assert length + turn.append_tokens == prompt
        length = prompt + turn.output_tokens


def test_equal_fronts_are_equal_in_one_file_and_in_no_other():
    ours, theirs = [], []
    for lines, salt in ((ours, b"s" * 32), (theirs, b"t" * 32)):
        recorded = Recording(lines.append, salt=salt, started_s=0.0)
        recorded.served(served(b"a"))
        recorded.served(served(b"b", blocks=(*KEYS[:2], *KEYS[9:12])))
        recorded.served(served(b"c", prefix=(64, b"other"), parent=b"a"))
        recorded.close()
    a, b, c = (json.loads(line) for line in ours)
    assert a["prefix"] == b["prefix"] != c["prefix"]
    assert len({one["text"] for one in (a, b, c)}) == 3
    blocks = [one["turns"][0]["new_blocks"] for one in (a, b)]
    assert blocks[0][:2] == blocks[1][:2]
    assert not set(blocks[0][2:]) & set(blocks[1][2:])
    assert c["parent"] == a["name"]
    foreign = json.loads(theirs[0])
    assert foreign["prefix"] != a["prefix"]
    assert not set(foreign["turns"][0]["new_blocks"]) & set(blocks[0])
    assert not any(key.hex() in line.decode() for key in KEYS for line in ours)


def test_open_sessions_are_bounded_in_number_and_length():
    lines = []
    recorded = recording(lines, max_sessions=2, max_turns=3)
    for name in (b"a", b"b", b"c"):
        recorded.served(served(name))
    assert (len(recorded), len(lines)) == (2, 1)
    for _ in range(3):
        recorded.served(served(b"c"))
    assert [len(session.turns) for session in sessions_of(lines)] == [1, 3]


async def test_a_live_router_s_sessions_can_be_simulated_and_say_nothing_of_anybody(tmp_path):
    answer = ids_of("Yes, it is swordfish.<|im_end|>")
    path = tmp_path / "sessions.jsonl"
    keys = tmp_path / "api.keys"
    keys.write_text("sk-secret-0123456789 secrettenant\n")
    keys.chmod(0o600)
    options = {"record": RecordSpec(path=path, max_bytes=2**20), "api_keys": keys}
    async with running_stack(tmp_path, [Part("w", lambda _: Reply(answer))], **options) as stack:
        auth = {"Authorization": "Bearer sk-secret-0123456789", "X-Session-ID": "mycompany"}
        async with aiohttp.ClientSession(stack.url, headers=auth) as http:
            for name in ("one", "two"):
                messages = [{"role": "system", "content": "Be brief, launchcode. " * 20}]
                for turn in range(3):
                    messages.append({"role": "user", "content": f"{name} {turn} asks. " * 10})
                    body = {"model": MODEL, "messages": messages}
                    async with http.post("/v1/chat/completions", json=body) as got:
                        assert got.status == 200
                        choice = (await got.json())["choices"][0]
                    messages.append(choice["message"])
        block_keys = {
            key.hex()
            for one in stack.router.sessions._sessions.values()
            for held in one.keys.values()
            for key in held
        }
        ids = [one.ids for one in stack.router.sessions._sessions.values()]
    text = path.read_text()
    secret = ("swordfish", "launchcode", "secrettenant", "mycompany", "asks", "sk-secret")
    assert not any(word in text for word in secret)
    assert block_keys
    assert not any(key in text for key in block_keys)
    sessions = read_trace(text.splitlines(), "kimistack", name="recorded").sessions
    assert [len(session.turns) for session in sessions] == [3, 3]
    assert len({session.prefix for session in sessions}) == 1
    assert all(session.prefix_tokens > 0 for session in sessions)
    for session, history in zip(sessions, ids, strict=True):
        tokens = session.prefix_tokens + sum(
            turn.append_tokens + turn.output_tokens for turn in session.turns
        )
        assert tokens == len(history)
