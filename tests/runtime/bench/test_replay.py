import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner

from kimi_runtime.bench.replay.client import Endpoint
from kimi_runtime.bench.replay.outcome import Outcome
from kimi_runtime.bench.replay.play import Retries, play
from kimi_runtime.bench.replay.report import markdown, summary
from kimi_runtime.bench.replay.texts import Scale, Texts
from kimi_runtime.cli import app
from kimi_runtime.protocol.vocabulary import open_vocabulary
from kimi_runtime.sim.sessions import Pause, Session, Turn, Workload

TEXTS = Texts.of(open_vocabulary(), seed=1)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Served:
    """Answers `word` per token asked for; remembers what was asked."""

    def __init__(self, *, fail_at: int | None = None, status: int = 429, cut: bool = False) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._fail_at, self._status, self._cut = fail_at, status, cut

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self._fail_at == len(self.bodies):
            body, headers = {"error": {"message": "too many"}}, {"Retry-After": "0"}
            return web.json_response(body, status=self._status, headers=headers)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for number in range(body["max_tokens"]):
            choice = {"index": 0, "delta": {"content": f"w{number} "}, "finish_reason": None}
            await answer.write(_event({"choices": [choice]}))
        if not self._cut:
            await answer.write(
                _event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
            )
            usage = {
                "prompt_tokens": 10,
                "completion_tokens": body["max_tokens"],
                "prompt_tokens_details": {"cached_tokens": 4},
            }
            await answer.write(_event({"choices": [], "usage": usage}))
        await answer.write(b"data: [DONE]\n\n")
        return answer


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def played(
    load: Workload, served: Served, *, timeout_s: float = 20, **options: Any
) -> list[Outcome]:
    async def run() -> list[Outcome]:
        async with serving(served.handle) as url:
            endpoint = Endpoint(url, "m", timeout_s=timeout_s)
            scale = Scale(tokens=2.0, pauses=0.01)
            return await play(load, endpoint, TEXTS, scale=scale, **options)

    return asyncio.run(run())


def session(name: str, *turns: Turn, text: int = 64) -> Session:
    return Session(name, text=text, turns=turns, prefix=1, prefix_tokens=20)


def test_each_turn_sends_all_that_was_said_before_it():
    served = Served()
    load = Workload("two", (session("a", Turn(8, 4), Turn(6, 6, Pause.END)),))
    outcomes = played(load, served)
    first, second = (body["messages"] for body in served.bodies)
    assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
    assert second[:2] == first
    assert second[2]["content"] == "w0 w1 " == outcomes[0].text
    assert [body["max_tokens"] for body in served.bodies] == [2, 3]


def test_figures_are_what_the_endpoint_said():
    outcomes = played(Workload("one", (session("a", Turn(8, 4, Pause.END)),)), Served())
    figures = summary(outcomes)
    assert (figures.requests, figures.failed, figures.output_tokens) == (1, 0, 2)
    assert figures.cached_share == 0.4
    assert 0 < figures.ttft.p50 <= figures.e2e.p50


def test_a_failed_turn_is_named_and_ends_its_session_alone():
    turns = (Turn(8, 4), Turn(8, 4, Pause.END))
    load = Workload("two", (session("a", *turns), session("b", *turns, text=96)), lanes=1)
    outcomes = played(load, Served(fail_at=1))
    assert [(one.session, one.turn, one.ok) for one in outcomes] == [
        ("a", 0, False),
        ("b", 0, True),
        ("b", 1, True),
    ]
    assert outcomes[0].error is not None
    assert outcomes[0].error.startswith("HTTP 429")


def test_a_client_that_asks_again_keeps_both_attempts_and_goes_on():
    served = Served(fail_at=2)
    load = Workload("again", (session("a", Turn(8, 4), Turn(8, 4, Pause.END)),))
    outcomes = played(load, served, retries=Retries(most=1))
    assert [(one.turn, one.attempt, one.ok) for one in outcomes] == [
        (0, 0, True),
        (1, 0, False),
        (1, 1, True),
    ]
    assert (outcomes[1].status, outcomes[1].retry_after_s) == (429, 0.0)
    assert served.bodies[1] == served.bodies[2]


def test_what_is_refused_for_good_is_not_asked_again():
    load = Workload("refused", (session("a", Turn(8, 4, Pause.END)),))
    (outcome,) = played(load, Served(fail_at=1, status=400), retries=Retries(most=3))
    assert (outcome.ok, outcome.status) == (False, 400)


def test_a_session_goes_on_after_the_answers_it_has_had():
    turns = (Turn(8, 4), Turn(8, 4), Turn(8, 4, Pause.END))
    load, whole, rest = Workload("rest", (session("a", *turns),)), Served(), Served()
    first, *others = played(load, whole)
    assert [one.turn for one in played(load, rest, answered={"a": [first.text]})] == [1, 2]
    assert rest.bodies == whole.bodies[1:]
    assert [one.text for one in others] == ["w0 w1 "] * 2


def test_waits_are_what_lies_between_all_that_came():
    (outcome,) = played(Workload("one", (session("a", Turn(8, 4, Pause.END)),)), Served())
    assert outcome.waits[0] == (outcome.asked_s, outcome.first_s)
    assert len(outcome.waits) == 3
    assert outcome.waits[-1][1] == outcome.ended_s


def test_a_stream_without_an_end_is_a_failure():
    (outcome,) = played(Workload("cut", (session("a", Turn(8, 4, Pause.END)),)), Served(cut=True))
    assert outcome.error == "the stream ended without a finish reason"


def test_an_endpoint_that_never_answers_is_left_at_the_deadline():
    class Silent(Served):
        async def handle(self, request: web.Request) -> web.StreamResponse:
            await asyncio.Event().wait()
            raise AssertionError

    (outcome,) = played(
        Workload("silent", (session("a", Turn(8, 4, Pause.END)),)), Silent(), timeout_s=0.2
    )
    assert outcome.error == "no end within 0.2 s"


def test_clients_that_leave_are_no_failures():
    turn = Turn(8, 40, Pause.END, aborted_after=4)
    (outcome,) = played(Workload("left", (session("a", turn),)), Served())
    assert (outcome.ok, outcome.aborted, len(outcome.chunk_s)) == (True, True, 2)


def test_subagents_begin_with_what_their_parent_said():
    child = Session("a.0", text=640, turns=(Turn(4, 2, Pause.END),), child=True)
    served = Served()
    load = Workload("burst", (session("a", Turn(8, 4, children=(child,)), Turn(8, 4, Pause.END)),))
    outcomes = played(load, served)
    assert [one.session for one in outcomes] == ["a", "a", "a.0"]
    asked = served.bodies[1]["messages"]
    assert asked[:3] == served.bodies[2]["messages"][:3]


def test_a_compacted_session_keeps_the_front_of_what_was_said():
    served = Served()
    turns = (Turn(60, 4), Turn(8, 4, keep_tokens=24), Turn(8, 4, Pause.END))
    played(Workload("compact", (session("a", *turns),)), served)
    roles = [[message["role"] for message in body["messages"]] for body in served.bodies]
    assert roles[1] == ["system", "user"]
    assert served.bodies[1]["messages"][0] == served.bodies[0]["messages"][0]


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_a_text_has_the_tokens_that_were_asked_for(tokens: int):
    vocabulary = open_vocabulary()
    made = len(vocabulary.encode_text(" " + TEXTS.text(5, tokens)))
    assert tokens <= made <= tokens + 8
    assert TEXTS.text(5, 2 * tokens).startswith(TEXTS.text(5, tokens))
    assert TEXTS.text(6, 300) != TEXTS.text(5, 300)


def test_the_command_says_which_requests_failed_and_ends_with_1():
    command = ("bench", "--url", "http://127.0.0.1:9/v1", "--sessions", "1", "--turns", "1")
    result = CliRunner().invoke(app, [*command, "--pace", "0"])
    assert result.exit_code == 1
    assert "s0 turn 0: ClientConnectorError" in result.output


def test_what_was_not_seen_is_no_time_of_zero():
    silent = Outcome(session="s", turn=0, asked_s=0.0, ended_s=2.0, finish="length")
    (line,) = markdown({"arm": summary([silent])}).splitlines()[2:]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[3:10] == ["-"] * 3 + ["2.00 s"] * 3 + ["-"]


def test_no_answer_begins_a_call_that_its_client_would_not_see():
    served = Served()
    played(Workload("one", (session("a", Turn(8, 4, Pause.END)),)), served)
    (body,) = served.bodies
    special = open_vocabulary().special
    assert body["logit_bias"][str(special("<|tool_calls_section_begin|>"))] == -100
    assert str(special("<|im_end|>")) not in body["logit_bias"]
