"""Drawn sessions are those of coding agents, and the same for the same seed."""

from collections import Counter

import pytest

from kimi_runtime.sim.content import Content
from kimi_runtime.sim.sessions import Pause, turns_of
from kimi_runtime.sim.workload import AgentMix, agents, closed_loop

MIX = AgentMix()
ALL = MIX.everything()


def prompts(workload):
    """Prompt lengths in tokens."""
    found = []
    for session in workload.sessions:
        length = session.prefix_tokens
        for turn in session.turns:
            length = turn.keep_tokens if turn.keep_tokens is not None else length
            length += turn.append_tokens
            found.append(length)
            length += turn.output_tokens
    return sorted(found)


def test_the_same_seed_draws_the_same_and_another_seed_does_not():
    assert agents(20, 7, ALL) == agents(20, 7, ALL)
    assert agents(20, 7, ALL) != agents(20, 8, ALL)


def test_more_sessions_do_not_change_those_there_were():
    assert agents(30, 7, ALL).sessions[:20] == agents(20, 7, ALL).sessions


def test_an_option_changes_only_what_it_names():
    capped = agents(20, 7, MIX.model_copy(update={"gap_cap_s": 10.0}))
    free = agents(20, 7, MIX)
    for ours, theirs in zip(capped.sessions, free.sessions, strict=True):
        for turn, same in zip(ours.turns, theirs.turns, strict=True):
            assert (turn.append_tokens, turn.output_tokens) == (
                same.append_tokens,
                same.output_tokens,
            )
            assert turn.pause_s == min(same.pause_s, 10.0)


def test_lengths_and_gaps_are_those_published():
    workload = agents(300, 1, MIX)
    lengths = prompts(workload)
    assert 60_000 < lengths[len(lengths) // 2] < 95_000
    assert lengths[-1] <= MIX.context_cap
    turns = [turn for session in workload.sessions for turn in session.turns]
    gaps = [turn.pause_s for turn in turns if turn.pause is Pause.TOOL]
    assert sum(gap < 1 for gap in gaps) / len(gaps) == pytest.approx(0.61, abs=0.02)
    assert sum(gap > 60 for gap in gaps) / len(gaps) == pytest.approx(0.04, abs=0.01)
    outputs = sorted(turn.output_tokens for turn in turns)
    assert outputs[len(outputs) // 2] == pytest.approx(220, rel=0.05)


def test_everything_has_people_subagents_compaction_aborts_and_tenants():
    workload = agents(200, 1, ALL)
    turns = [turn for session in workload.sessions for turn in session.turns]
    kinds = Counter(turn.pause for turn in turns)
    assert kinds[Pause.HUMAN] / len(turns) == pytest.approx(0.04, abs=0.01)
    spawning = sum(any(turn.children for turn in s.turns) for s in workload.sessions)
    assert 0.3 < spawning / 200 < 0.5
    assert any(turn.keep_tokens is not None for turn in turns)
    assert any(turn.aborted_after is not None for turn in turns)
    assert any(turn.calls > 1 for turn in turns)
    assert len({session.tenant for session in workload.sessions}) == ALL.tenants
    assert workload.turns == sum(turns_of(session) for session in workload.sessions)


def test_contexts_have_blocks_in_common_exactly_as_far_as_they_say_the_same():
    one, other = Content(64), Content(64)
    for content in (one, other):
        content.extend(1, 1000)
    other_tenant = Content(64, tenant="b")
    other_tenant.extend(1, 1000)
    one.extend(2, 500)
    other.extend(3, 500)
    assert len(one.keys) == 1500 // 64
    assert one.keys[: 1000 // 64] == other.keys[: 1000 // 64]
    assert not set(one.keys[1000 // 64 :]) & set(other.keys)
    assert not set(other_tenant.keys) & set(one.keys)


def test_a_context_that_grows_in_parts_has_the_keys_of_one_that_grows_at_once():
    parts, whole = Content(64), Content(64)
    for start in range(0, 1000, 37):
        parts.extend(5, min(37, 1000 - start), start=start)
    whole.extend(5, 1000)
    assert parts.keys == whole.keys
    assert len(whole.keys) == 1000 // 64


def test_a_closed_loop_has_single_requests_of_the_lengths_asked_for():
    workload = closed_loop(4, 40, 1, inputs=(10, 20), outputs=(5, 6))
    assert workload.lanes == 4
    assert {len(session.turns) for session in workload.sessions} == {1}
    assert {session.turns[0].append_tokens for session in workload.sessions} <= set(range(10, 21))
