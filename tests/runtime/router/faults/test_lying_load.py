"""A worker that reports less or more than it has to do: what comes true corrects it."""

import pytest

from kimi_runtime.router.cost.learn import FirstToken
from router_core import Core

ASK = {"prompt_tokens": 20_000}


def served(core, name, number, *, queued_s, prefill_s=0.2):
    """A decision is carried out, and its worker queued it for `queued_s`."""
    decision = core.decide(without=[n for n in core.peers if n != name], **ASK)
    core.planner.commit(f"{number}", decision.plan, now_s=0.0)
    core.insight.learning.first_token(
        decision.decided,
        FirstToken(
            after_s=queued_s + prefill_s,
            queued_s=queued_s,
            prefill_s=prefill_s,
            new_tokens=20_000,
            cached_tokens=0,
            found_tokens=0,
            tier="hbm",
            kind=decision.workers[name].kind,
        ),
        now_s=0.0,
    )
    core.insight.learning.given_up(f"{number}", now_s=0.0)
    return decision


def test_who_reports_a_tenth_of_its_queue_is_found_out_by_how_long_requests_wait():
    core = Core("liar", "honest")
    core["liar"].report(waiting=2, queued_tokens=40_000)
    core["honest"].report(waiting=2, queued_tokens=60_000)
    assert core.worker(**ASK) == "liar"
    for number in range(40):
        expected_s = core.decide(without=["honest"], **ASK).decided.work_s
        served(core, "liar", number, queued_s=4 * expected_s)
    assert core.worker(**ASK) == "honest"


def test_our_own_sends_count_whatever_a_worker_says():
    core = Core("a", "b")
    for number in range(6):
        core.ledger.start("a", f"r{number}", new_tokens=50_000)
        core["a"].report()  # idle, it says, and has seen nothing of ours
    assert core.worker(**ASK) == "b"


@pytest.mark.parametrize(
    "lie",
    [
        {"free_blocks": 10**9},
        {"free_blocks": 0, "running": 0},
        {"waiting": 10**9, "queued_tokens": 10**12},
        {"running": 10**9},
    ],
)
def test_no_figure_keeps_decisions_from_being_made(lie):
    core = Core("liar")
    core["liar"].report(**lie)
    plan = core.decide(**ASK).plan
    assert plan.decode == "liar"
    assert all(abs(term) < float("inf") for term in plan.terms.values())


def test_a_worker_that_claims_to_be_overwhelmed_gets_work_again_when_it_stops():
    core = Core("a", "b")
    core["a"].report(waiting=500, queued_tokens=10_000_000)
    assert core.worker(**ASK) == "b"
    core["a"].report()
    core["b"].report(waiting=3, queued_tokens=90_000)
    assert core.worker(**ASK) == "a"
