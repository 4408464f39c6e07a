"""KV of a session whose tool runs."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.router.estimate.gaps import HUMAN_PRIOR, TOOL_PRIOR, Curve
from kimi_runtime.router.tool_gap import Action, Gap, TierPrice, verdict

# 71k tokens of K2.6: HBM, host memory, SSD; prices in seconds of others per second
PRESSED = (
    TierPrice("hbm", 0.0, 0.004),
    TierPrice("dram", 0.1, 0.0004),
    TierPrice("ssd", 0.9, 0.0002),
)
FREE = tuple(TierPrice(one.name, one.reload_s, 0.0) for one in PRESSED)
RECOMPUTE_S = 3.0


def decide(gap, tiers=PRESSED, tier=0, **fields):
    return verdict(gap, tiers, tier, recompute_s=RECOMPUTE_S, **fields)


def test_without_pressure_everything_is_kept():
    for tier in range(3):
        for curve in (TOOL_PRIOR, HUMAN_PRIOR):
            kept = decide(Gap(curve, 200.0), FREE, tier)
            assert (kept.action, kept.ask_again_s) == (Action.KEEP, math.inf)


def test_under_pressure_memory_is_held_for_quick_tools_and_given_up_for_slow_ones():
    early = decide(Gap(TOOL_PRIOR, 0.0))
    assert early.action is Action.KEEP
    assert 1.0 <= early.ask_again_s <= 30.0
    late = decide(Gap(TOOL_PRIOR, early.ask_again_s))
    assert (late.action, late.tier) == (Action.DEMOTE, "dram")
    human = decide(Gap(HUMAN_PRIOR, 0.0))
    assert (human.action, human.tier) == (Action.DEMOTE, "dram")


def test_host_memory_is_kept_for_minutes_and_ssd_for_longer():
    dram = decide(Gap(HUMAN_PRIOR, 0.0), tier=1)
    ssd = decide(Gap(HUMAN_PRIOR, 0.0), tier=2)
    assert dram.action is ssd.action is Action.KEEP
    assert 120 <= dram.ask_again_s <= ssd.ask_again_s


def test_below_the_last_tier_lies_nothing():
    dear = (*PRESSED[:2], TierPrice("ssd", 0.9, 10.0))
    assert decide(Gap(HUMAN_PRIOR, 3600.0), dear, 2).action is Action.DROP


def test_what_nobody_comes_back_for_is_dropped_at_once():
    assert decide(Gap(TOOL_PRIOR, 0.0, ended=True), FREE).action is Action.DROP


def test_it_is_fetched_back_in_time_for_when_the_tool_said():
    gap = Gap(TOOL_PRIOR.around(40.0), 5.0, expected_s=40.0)
    waiting = decide(gap, tier=2)
    assert waiting.action is Action.KEEP
    assert waiting.ask_again_s == pytest.approx(40 - 1.2 * 0.9)
    due = Gap(TOOL_PRIOR.around(40.0), waiting.ask_again_s, expected_s=40.0)
    assert decide(due, tier=2).action is Action.PREFETCH
    assert decide(due, tier=2).tier == "hbm"


def test_without_a_hint_it_is_fetched_early_only_over_idle_links():
    likely = Curve((5.0,), (0.0,))
    assert decide(Gap(likely, 0.0), tier=2, idle_link_share=0.9).action is Action.PREFETCH
    assert decide(Gap(likely, 0.0), tier=2, idle_link_share=0.1).action is Action.KEEP
    unlikely = Curve((0.01,), (0.0,))
    assert decide(Gap(unlikely, 0.0), FREE, 2, idle_link_share=0.9).action is Action.KEEP


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 2_000), st.floats(0, 1), st.floats(1.0, 10.0), st.integers(0, 2))
def test_dearer_space_is_never_held_longer(since_s, price, factor, tier):
    def kept_until(space):
        tiers = [TierPrice(one.name, one.reload_s, space) for one in PRESSED]
        decided = decide(Gap(HUMAN_PRIOR, since_s), tiers, tier)
        return decided.ask_again_s if decided.action is Action.KEEP else since_s

    assert kept_until(price * factor) <= kept_until(price)


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 1_000), st.floats(1e-5, 0.1))
def test_keeping_until_then_beats_keeping_shorter_or_longer(since_s, space):
    tiers = (TierPrice("hbm", 0.0, space),)
    decided = decide(Gap(TOOL_PRIOR, since_s), tiers)

    def gain(until_s):
        step = (until_s - since_s) / 400
        middles = (since_s + (number + 0.5) * step for number in range(400))
        there_s = step * sum(TOOL_PRIOR.survival(at_s, since_s=since_s) for at_s in middles)
        ended = TOOL_PRIOR.ends_within(until_s - since_s, since_s=since_s)
        return ended * RECOMPUTE_S - there_s * space

    until_s = decided.ask_again_s if decided.action is Action.KEEP else since_s
    if until_s == math.inf:
        return
    best = gain(until_s) if until_s > since_s else 0.0
    for other in (since_s + 0.5 * (until_s - since_s), until_s + 1.0, 2 * until_s + 10.0):
        assert best >= gain(other) - 0.02 * (abs(best) + space)
