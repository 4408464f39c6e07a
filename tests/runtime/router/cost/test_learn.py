"""Decisions teach the models they were made with."""

import math
import random

import pytest

from kimi_runtime.router.cost.learn import FirstToken, Learning
from kimi_runtime.router.policies.cost import CostPolicy
from kimi_runtime.router.view import KvSource
from kimi_runtime.spec.router import Cost
from kimi_runtime.spec.speed import known_prior
from worker_views import turn, worker

SPEC = Cost(model="kimi-k2.6", gpu="MI355X", tensor=4)
K26 = known_prior("kimi-k2.6", "MI355X", tensor=4)
SLOWER = 1.8


def serve(planner, learning, chance, count, start_s=0.0):
    """A world that is slower than the priors; relative errors of the expected first token."""
    errors, covered = [], 0
    for number in range(count):
        now_s = start_s + number
        one = worker("w", queued_tokens=chance.choice([0, 4_000, 30_000]), waiting=1)
        request = turn(prompt_tokens=chance.randint(2_000, 120_000), session=b"%d" % number)
        decided = planner.plan(request, [one], now_s=now_s)
        depth = one.max_context_tokens / 4
        queued_s = SLOWER * (
            K26.prefill_fixed_s
            + one.queued_tokens * (K26.prefill_token_s + K26.prefill_pair_s * depth)
        )
        prefill_s = SLOWER * K26.prefill_s(request.prompt_tokens) * math.exp(chance.gauss(0, 0.05))
        after_s = queued_s + prefill_s + K26.step_s(1, request.prompt_tokens)
        expected = decided.explanation.chosen
        errors.append(abs(expected.terms.first_token_s / after_s - 1))
        sd = math.sqrt(expected.first_token_var)
        z = planner.models.z(expected.mode, 0.8)
        covered += after_s <= expected.terms.first_token_s + z * sd
        real = FirstToken(
            after_s,
            queued_s=queued_s,
            prefill_s=prefill_s,
            new_tokens=request.prompt_tokens,
            found_tokens=0,
        )
        learning.first_token(decided, real, now_s=now_s)
    return errors, covered / count


def test_predictions_of_the_first_token_become_right_and_their_coverage_true():
    planner, chance = CostPolicy(SPEC).planner, random.Random(7)
    learning = Learning(planner)
    early, _ = serve(planner, learning, chance, 1)
    serve(planner, learning, chance, 300, start_s=1.0)
    late, coverage = serve(planner, learning, chance, 200, start_s=305.0)
    assert sum(early) / len(early) > 0.25
    assert sum(late) / len(late) < 0.08
    assert 0.65 < coverage < 0.95


def test_a_slow_link_is_avoided_once_it_was_used():
    planner = CostPolicy(SPEC).planner
    learning = Learning(planner)
    near, far = (KvSource(f"pool-{n}", n, "dram", 70_400) for n in ("n1", "n2"))
    taker = worker("w", node="n0")
    for number in range(40):
        plan = planner.plan(turn(sources=(near,)), [taker], now_s=float(number)).plan
        name = f"request {number}"
        planner.commit(name, plan, now_s=float(number))
        fetch = plan.fetches[0]
        learning.transferred(
            f"{name}.fetch", fetch, 6 * fetch.size_bytes / 35e9, now_s=number + 0.5
        )
    slow = planner.models.links.of(fetch.links[1], now_s=40.0).per_byte_s
    assert slow == pytest.approx(6 / 35e9, rel=0.25)
    other = worker("v", node="n3", running=1)
    plan = planner.plan(turn(sources=(near, far)), [taker, other], now_s=40.0).plan
    assert plan.decode == "v"
    assert len(planner.flows) == 0


def test_prefixes_that_were_not_there_make_their_worker_less_attractive():
    planner = CostPolicy(SPEC).planner
    learning = Learning(planner)
    workers = [worker("liar", cached_tokens=70_400), worker("honest", cached_tokens=66_000)]
    before = planner.plan(turn(), workers, now_s=0.0)
    assert before.plan.decode == "liar"
    for number in range(60):
        learning.first_token(before, FirstToken(3.0, found_tokens=0), now_s=float(number))
    assert planner.plan(turn(), workers, now_s=61.0).plan.decode == "honest"
    assert ("liar", "hbm") in planner.models.hits.alarms()


def test_answers_teach_their_session_and_a_failed_request_frees_its_links():
    planner = CostPolicy(SPEC).planner
    learning = Learning(planner)
    source = KvSource("pool-1", "n1", "dram", 70_400)
    decided = planner.plan(turn(sources=(source,)), [worker("w", node="n0")], now_s=0.0)
    planner.commit("r", decided.plan, now_s=0.0)
    assert len(planner.flows) == 1
    learning.given_up("r", now_s=0.01)
    assert len(planner.flows) == 0
    for _ in range(30):
        learning.finished(decided, 3_000)
    again = planner.plan(turn(sources=(source,)), [worker("w", node="n0")], now_s=1.0)
    assert again.plan.terms["stream"] > 2 * decided.plan.terms["stream"]


def test_steps_teach_how_fast_answers_stream():
    planner = CostPolicy(SPEC).planner
    learning = Learning(planner)
    before = planner.plan(turn(), [worker("w")], now_s=0.0).plan.terms["stream"]
    for number in range(200):
        learning.stepped(
            "",
            "w",
            rows=1 + number % 32,
            kv_tokens=71_000 * (1 + number % 32),
            seconds=3 * K26.step_s(1 + number % 32, 71_000 * (1 + number % 32)),
            now_s=float(number),
        )
    after = planner.plan(turn(), [worker("w")], now_s=200.0).plan.terms["stream"]
    assert after == pytest.approx(3 * before, rel=0.15)
