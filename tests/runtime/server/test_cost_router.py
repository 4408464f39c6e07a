"""The router with the planner: what it commits it takes back, what it sees it learns, and why."""

import asyncio
import json
from contextlib import asynccontextmanager

import aiohttp
import pytest

from kimi_runtime.engine.adapters.scripted import Pace
from kimi_runtime.engine.adapters.scripts import Reply
from kimi_runtime.errors import Overloaded, Unavailable, WorkerFailed
from kimi_runtime.router.explain.record import Record, read_records
from kimi_runtime.spec.router import Cost, ExplainSpec
from kimi_runtime.spec.worker import Role
from scripted_stack import MODEL, Part, ids_of, running_stack, until

CHAT = "/v1/chat/completions"
HELLO = ids_of("Hello from here.<|im_end|>")
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello. " * 20}]}
FAULTS = {
    "refuses": lambda: Reply(HELLO, error=Unavailable("not now")),
    "is full": lambda: Reply(HELLO, error=Overloaded("full", retry_after_s=1.0)),
    "fails": lambda: Reply(HELLO, error=WorkerFailed("broke")),
    "fails late": lambda: Reply(HELLO, error=WorkerFailed("broke"), fail_after=2),
    "cuts off": lambda: Reply(HELLO, cut_after=2),
    "stalls": lambda: Reply(HELLO, stall_after=2),
}


def faulty(faults):
    """Each request that is no probe meets the next fault, later ones none."""
    left = list(faults)

    def script(request):
        if request.tenant == "readyz" or not left:
            return Reply(HELLO)
        return FAULTS[left.pop(0)]()

    return script


def parts_of(kind, script, pace=None):
    if kind == "pair":
        return [
            Part("p-0", script, Role.PREFILL, pace=pace),
            Part("d-0", script, Role.DECODE, pace=pace),
            Part("d-1", script, Role.DECODE, pace=pace),
        ]
    return [Part("w-0", script, pace=pace), Part("w-1", script, pace=pace)]


@asynccontextmanager
async def cost_router(folder, parts, **options):
    explain = ExplainSpec(path=folder / "explain.jsonl", max_bytes=2**20)
    policy = options.pop("policy", Cost())
    async with (
        running_stack(folder, parts, policy=policy, explain=explain, **options) as stack,
        aiohttp.ClientSession(stack.url) as http,
    ):
        yield http, stack


async def ask(http, **fields):
    async with http.post(CHAT, json=ASK | fields) as answer:
        return answer.status, await answer.json(), answer.headers


async def leave(http):
    """Read the first bytes of a stream and go."""
    async with http.post(CHAT, json=ASK | {"stream": True}) as answer:
        await answer.content.readany()


def nothing_committed(router):
    planner = router.insight.planner
    return (
        len(planner.flows) == 0
        and len(router.insight.answers) == 0
        and router.ledger.total_in_flight == 0
        and router.admission.in_flight == 0
    )


async def written(stack, folder, count):
    log = stack.router.explain
    await until(lambda: log.written + log.dropped >= count)
    return list(read_records(folder / "explain.jsonl"))


@pytest.mark.parametrize("kind", ["whole", "pair"])
async def test_nothing_that_was_committed_stays_however_requests_end(tmp_path, kind):
    script = faulty([*sorted(FAULTS), *sorted(FAULTS, reverse=True)])
    async with cost_router(tmp_path, parts_of(kind, script), request_deadline=0.5) as (http, stack):
        asked = [ask(http) for _ in range(8)] + [leave(http) for _ in range(4)]
        await asyncio.gather(*asked, return_exceptions=True)
        await until(lambda: nothing_committed(stack.router))


async def test_a_pair_is_explained_with_what_was_predicted_and_what_came(tmp_path):
    pace = Pace(prefill_tokens_per_s=2000.0, output_ids_per_s=500.0)
    async with cost_router(tmp_path, parts_of("pair", faulty([]), pace)) as (http, stack):
        status, _, _ = await ask(http)
        assert status == 200
        (record,) = await written(stack, tmp_path, 1)
        assert record.chosen.prefill == "p-0"
        assert record.chosen.first_token_s > 0
        assert {one.workers for one in record.candidates} >= {record.chosen.workers}
        assert record.outcome.ended == "finished"
        assert record.outcome.first_token_s >= record.outcome.prefill_s > 0
        assert record.outcome.output_tokens > 0
        assert {worker.name for worker in record.workers} == {"p-0", "d-0", "d-1"}


async def test_a_retried_request_has_a_record_for_each_attempt(tmp_path):
    parts = parts_of("whole", faulty(["fails"]))
    async with cost_router(tmp_path, parts) as (http, stack):
        status, _, _ = await ask(http)
        assert status == 200
        first, second = await written(stack, tmp_path, 2)
        assert (first.attempt, first.outcome.ended) == (0, "failed")
        assert first.outcome.why
        assert (second.attempt, second.outcome.ended) == (1, "finished")
        assert first.chosen.decode != second.chosen.decode
        assert first.request == second.request


async def test_no_text_no_id_and_no_key_is_in_the_log(tmp_path):
    async with cost_router(tmp_path, parts_of("whole", faulty([]))) as (http, stack):
        await ask(http, messages=[{"role": "user", "content": "the launch code is swordfish"}])
        await written(stack, tmp_path, 1)
        turn = next(iter(stack.router.sessions._sessions.values()))
        text = (tmp_path / "explain.jsonl").read_text()
        assert "swordfish" not in text
        assert turn.id.hex() not in text
        keys = [key.hex() for held in turn.keys.values() for key in held]
        assert keys
        assert not any(key in text for key in keys)


async def test_predictions_come_nearer_with_what_was_seen(tmp_path):
    slow = Pace(prefill_tokens_per_s=400.0)  # the prior expects 7000
    async with cost_router(tmp_path, [Part("w-0", faulty([]), pace=slow)]) as (http, stack):
        for number in range(12):
            content = f"{number} is new. " * 20
            status, _, _ = await ask(http, messages=[{"role": "user", "content": content}])
            assert status == 200
        records = await written(stack, tmp_path, 12)
        ratios = [one.outcome.first_token_s / one.chosen.first_token_s for one in records]
        assert ratios[0] > 3
        # a busy machine may hold any one of them up
        assert sorted(ratios[-7:])[2] < ratios[0] / 2


async def test_a_session_start_is_held_back_or_refused_when_it_would_be_late(tmp_path):
    slow = Pace(prefill_tokens_per_s=200.0)
    one = [Part("w-0", faulty([]), pace=slow, options={"max_running": 1})]
    policy = Cost(first_token_target=0.001)
    # between two reports the router knows of its own sends alone
    options = {"policy": policy, "load_interval": 5.0}
    async with cost_router(tmp_path, one, **options) as (http, stack):
        busy = asyncio.ensure_future(ask(http))
        await until(lambda: stack.router.ledger.total_in_flight > 0)
        content = "Another session. " * 20
        status, body, headers = await ask(http, messages=[{"role": "user", "content": content}])
        assert status == 429
        assert "new session would wait" in body["error"]["message"]
        assert float(headers["Retry-After"]) > 0
        assert (await busy)[0] == 200
        records = await written(stack, tmp_path, 2)
        assert sorted(one.outcome.ended for one in records) == ["finished", "refused"]
    async with cost_router(tmp_path, one, **options, retry_window=10.0) as (http, stack):
        first, second = await asyncio.gather(
            ask(http), ask(http, messages=[{"role": "user", "content": "And another. " * 20}])
        )
        assert (first[0], second[0]) == (200, 200)


async def test_metrics_hold_predicted_against_real_first_tokens(tmp_path):
    async with cost_router(tmp_path, parts_of("whole", faulty([]))) as (http, stack):
        await ask(http)
        await written(stack, tmp_path, 1)
        async with http.get("/metrics") as answer:
            text = await answer.text()
        assert 'kimistack_router_ttft_ratio_count{mode="extend"} 1.0' in text
        assert 'kimistack_router_explained_total{outcome="written"} 1.0' in text


async def test_a_log_stays_within_its_bound_and_loses_the_oldest(tmp_path):
    async with cost_router(tmp_path, parts_of("whole", faulty([]))) as (http, stack):
        log = stack.router.explain
        await ask(http)
        await written(stack, tmp_path, 1)
        line = len((tmp_path / "explain.jsonl").read_bytes())
        log._half_bytes = 3 * line
        for _ in range(8):
            await ask(http)
        await until(lambda: log.written == 9)
        sizes = [path.stat().st_size for path in tmp_path.glob("explain.jsonl*")]
        assert len(sizes) == 2
        assert max(sizes) <= 3 * line


@pytest.mark.parametrize("policy", ["longest_prefix"])
async def test_a_policy_without_reasons_still_tells_what_came(tmp_path, policy):
    from kimi_runtime.spec.router import LongestPrefix

    parts = parts_of("whole", faulty([]))
    async with cost_router(tmp_path, parts, policy=LongestPrefix()) as (http, stack):
        await ask(http)
        (record,) = await written(stack, tmp_path, 1)
        assert record.policy.kind == policy
        assert record.candidates == ()
        assert record.chosen.first_token_s is None
        assert record.outcome.first_token_s is not None
        line = json.loads((tmp_path / "explain.jsonl").read_text())
        assert Record.model_validate(line | {"asked": record.asked}) is not None
