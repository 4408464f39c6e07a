"""A clock that jumps forwards or back: late or early, but every decision is made."""

import math

import pytest

from router_core import Core, keys_of

PROMPT = keys_of(400)


@pytest.mark.parametrize("jump_s", [-1e6, -5.0, 5.0, 3600.0, 1e9])
def test_decisions_go_on_across_a_jump_and_what_was_committed_is_taken_back(jump_s):
    core = Core("a", "b")
    core["a"].log.add(PROMPT)
    core["a"].connect()
    before = core.decide(PROMPT, now_s=100.0)
    with core.carry_out("one", before, now_s=100.0):
        core.ledger.start("a", "one", new_tokens=100)
        now_s = 100.0 + jump_s
        plan = core.decide(PROMPT, now_s=now_s).plan
        assert plan.decode in ("a", "b")
        assert all(math.isfinite(term) for term in plan.terms.values())
        core.ledger.finish("a", "one")
    assert len(core.planner.flows) == 0
    assert len(core.insight.answers) == 0
    for peer in core.peers.values():
        peer.report(now_s=now_s)
    assert core.worker(PROMPT, now_s=now_s) == "a"


def test_a_report_from_before_a_jump_back_is_not_younger_than_one_from_after_it():
    core = Core("a", "b")
    core["a"].report(now_s=1000.0, waiting=9, queued_tokens=400_000)
    core["a"].report(now_s=10.0)  # the newest, although its time is earlier
    core["b"].report(now_s=10.0, waiting=2, queued_tokens=40_000)
    assert core.worker(now_s=10.0, prompt_tokens=20_000) == "a"


def test_learned_figures_survive_a_jump():
    core = Core("a")
    for number in range(50):
        core.insight.learning.stepped(
            core.look([])[1][0].kind,
            "a",
            rows=4,
            kv_tokens=100_000,
            seconds=0.02,
            now_s=float(number),
        )
    for now_s in (-1e9, 1e12):
        core["a"].report(now_s=now_s)
        plan = core.decide(PROMPT, now_s=now_s).plan
        assert all(math.isfinite(term) for term in plan.terms.values())
