"""Traces become sessions; a line that does not fit names file, line and field."""

import json
from pathlib import Path

import pytest

from kimi_runtime.errors import ConfigError
from kimi_runtime.sim.cluster import ClusterSpec
from kimi_runtime.sim.sessions import Pause
from kimi_runtime.sim.tasks import OURS, policy_of
from kimi_runtime.sim.traces import read_trace, recorded
from kimi_runtime.sim.workload import AgentMix, agents
from kimi_runtime.sim.world import World

MOONCAKE = Path(__file__).parents[4] / "shared" / "data" / "mooncake" / "conversation_trace.jsonl"


def line(**changes):
    """A good line of Mooncake's format, changed."""
    good = {"timestamp": 1500, "input_length": 700, "output_length": 9, "hash_ids": [4, 5]}
    return json.dumps({name: to for name, to in (good | changes).items() if to is not ...})


def test_a_mooncake_line_is_a_session_of_one_turn():
    (session,) = read_trace([line(), ""], "mooncake", name="t").sessions
    assert session.start_s == 1.5
    assert session.contexts == (((4, 512), (5, 188)),)
    assert (session.turns[0].append_tokens, session.turns[0].output_tokens) == (700, 9)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (line(input_length=...), "input_length is missing"),
        (line(input_length="many"), "input_length is 'many', not a number"),
        (line(input_length=-3), "input_length is '-3', not between 1"),
        (line(input_length=True), "input_length is 'True', not a number"),
        (line(output_length=1.5), "output_length is '1.5', not a whole number"),
        (line(timestamp=float("inf")), "timestamp is 'inf', not between"),
        (line(timestamp=float("nan")), "timestamp is 'nan', not between"),
        (line(timestamp=3), r"timestamp is before that of the line before \(1.5 s\)"),
        (line(hash_ids=[1]), "hash_ids has 1 blocks, but 700 tokens are 2 of 512"),
        (line(hash_ids=[1, "x"]), r"hash_ids\[1\] is 'x'"),
        (line(hash_ids=7), "hash_ids is '7', not a list"),
        ("[1, 2]", "not an object"),
        ("{", "not JSON"),
    ],
)
def test_a_malformed_line_names_file_line_and_field(bad, says):
    with pytest.raises(ConfigError, match=f"calls.jsonl: line 2: {says}"):
        read_trace([line(), bad], "mooncake", name="calls.jsonl")


def test_an_empty_file_is_an_error():
    with pytest.raises(ConfigError, match="no sessions in it"):
        read_trace([], "mooncake", name="empty")


CSV = """session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms
a,0.5,0,100,50,20,1500
b,0.7,0,0,30,10,0
a,2.5,1,170,40,25,99000
"""


def test_tracelab_rounds_are_turns_of_their_session():
    first, second = read_trace(CSV.splitlines(), "tracelab", name="t").sessions
    assert [turn.append_tokens for turn in first.turns] == [150, 40]
    assert first.turns[0].pause_s == 1.5
    assert first.turns[1].pause is Pause.END
    assert first.turns[1].keep_tokens is None
    assert second.start_s == 0.7


def test_a_tracelab_round_out_of_order_names_the_line():
    swapped = CSV.replace("a,2.5,1", "a,2.5,3")
    with pytest.raises(ConfigError, match="t: line 4: round_idx is 3, but round 1 comes next"):
        read_trace(swapped.splitlines(), "tracelab", name="t")


def test_an_abench_line_is_a_session():
    rounds = [
        {"input_delta": 10, "output_tokens": 3, "pre_gap_ms": 0},
        {"input_delta": 5, "output_tokens": 4, "pre_gap_ms": 2500},
    ]
    text = json.dumps({"session_id": "s", "rounds": rounds})
    (session,) = read_trace([text], "abench", name="t").sessions
    assert [turn.pause_s for turn in session.turns] == [2.5, 0.0]
    bad = text.replace('"input_delta": 5', '"input_delta": 0')
    with pytest.raises(ConfigError, match=r"rounds\[1\]: line 1: input_delta is '0'"):
        read_trace([bad], "abench", name="t")


AGENTIC = [
    {"request_id": "a0", "session_id": "a", "timestamp": 500, "output_length": 5,
     "input_length": 700, "hash_ids": [1, 2]},
    {"request_id": "b0", "session_id": "b", "wait_for": ["a0"], "delay": 100, "output_length": 6,
     "hash_ids": [1, 7]},
    {"request_id": "b1", "session_id": "b", "wait_for": ["b0"], "tool_wait_ms": 900,
     "output_length": 6, "hash_ids": [1, 7, 8]},
    {"request_id": "a1", "session_id": "a", "wait_for": ["a0", "b1"], "delay": 250,
     "tool_wait_ms": 1000, "output_length": 9, "hash_ids": [1, 2, 3]},
    {"request_id": "c0", "timestamp": 900, "output_length": 1, "hash_ids": [4]},
]  # fmt: skip


def agentic(rows):
    """Sessions of Agentic Mooncake's lines, named t."""
    return read_trace([json.dumps(row) for row in rows], "agentic_mooncake", name="t").sessions


def test_an_agentic_mooncake_session_that_waits_for_another_is_its_subagent():
    first, alone = agentic(AGENTIC)
    assert (first.name, first.start_s, alone.name, alone.start_s) == ("a", 0.5, "c0", 0.9)
    assert first.contexts == (((1, 512), (2, 188)), ((1, 512), (2, 512), (3, 512)))
    assert [turn.append_tokens for turn in first.turns] == [700, 836]
    assert first.turns[0].pause_s == 1.25
    (child,) = first.turns[0].children
    assert (child.name, child.child, len(child.turns)) == ("a.0.0", True, 2)
    assert child.turns[0].pause_s == 0.9
    assert child.contexts[1] == ((1, 512), (7, 512), (8, 512))


@pytest.mark.parametrize(
    ("line", "changes", "says"),
    [
        (2, {"wait_for": ["z"]}, "line 2: wait_for 'z' is no request of an earlier line"),
        (2, {"wait_for": "a0"}, "line 2: wait_for is 'a0', not a list"),
        (2, {"request_id": "a0"}, "line 2: request_id 'a0' is there already"),
        (4, {"input_length": 9000}, "line 4: hash_ids has 3 blocks, but 9000 tokens are 18 of 512"),
        (4, {"tool_wait_ms": -1}, "line 4: tool_wait_ms is '-1', not between"),
        (5, {"hash_ids": None}, "line 5: hash_ids is 'None', not a list"),
    ],
)
def test_a_malformed_agentic_line_names_file_line_and_field(line, changes, says):
    rows = [dict(row) for row in AGENTIC]
    rows[line - 1] |= changes
    with pytest.raises(ConfigError, match=f"t: {says}"):
        agentic(rows)


WEKA = {
    "id": "w", "models": ["m"], "block_size": 64, "hash_id_scope": "local",
    "requests": [
        {"t": 0.0, "type": "n", "in": 100, "out": 10, "hash_ids": [1], "api_time": 2.0},
        {"t": 2.5, "type": "subagent", "agent_id": "x", "requests": [
            {"t": 2.5, "type": "s", "in": 64, "out": 3, "hash_ids": [9], "api_time": 1.0}]},
        {"t": 8.0, "type": "s", "in": 160, "out": 20, "hash_ids": [1, 2, 3], "think_time": 4.0},
        {"t": 20.0, "type": "n", "in": 200, "out": 0, "hash_ids": [1, 2, 3, 4]},
    ],
}  # fmt: skip


def test_a_weka_trace_is_a_session_with_subagents_and_ids_of_its_own():
    first, second = read_trace([json.dumps(WEKA)] * 2, "weka", name="t").sessions
    assert [turn.pause_s for turn in first.turns] == [4.0, 12.0, 0.0]
    assert [turn.output_tokens for turn in first.turns] == [10, 20, 1]
    assert [sum(count for _, count in context) for context in first.contexts] == [100, 160, 200]
    (child,) = first.turns[0].children
    assert (child.child, len(child.turns)) == (True, 1)
    assert first.contexts[0][0] == first.contexts[1][0]
    assert first.contexts[0][1][0] != first.contexts[1][1][0]  # a tail without an id is its own
    assert not {text for text, _ in first.contexts[2]} & {text for text, _ in second.contexts[2]}


def test_a_malformed_weka_trace_names_the_request():
    for changes, says in (
        ({"type": "x"}, "type is 'x', not n, s or subagent"),
        ({"in": 0}, "in is '0', not between 1"),
        ({"hash_ids": [1]}, "hash_ids has 1 blocks, but 200 tokens are 4 of 64"),
    ):
        bad = WEKA | {"requests": [*WEKA["requests"][:3], WEKA["requests"][3] | changes]}
        with pytest.raises(ConfigError, match=rf"t: requests\[3\]: line 1: {says}"):
            read_trace([json.dumps(bad)], "weka", name="t")


def tracelab_round(session, minute, prefix, append, **changes):
    """A round that is asked at a minute and answered ten seconds later."""
    at = f"2026-06-08T12:{minute:02}"
    events = [("user_message", "00Z"), ("text", "05Z"), ("tool_call", "10Z")]
    return json.dumps(
        {
            "session_id": session, "prefix_tokens": prefix, "newly_append_tokens": append,
            "output_tokens": 20, "reasoning_output_tokens": None,
            "timing_events": [{"event_type": k, "timestamp": f"{at}:{s}"} for k, s in events],
        } | changes
    )  # fmt: skip


def test_tracelab_rounds_pause_from_the_last_output_to_the_next_input():
    lines = [
        tracelab_round("a", 0, 900, 100),
        tracelab_round("b", 1, 0, 50),
        tracelab_round("a", 2, 1020, 30, reasoning_output_tokens=5),
        tracelab_round("a", 3, 400, 60),
    ]
    first, second = read_trace(lines, "tracelab_rounds", name="t").sessions
    assert [turn.append_tokens for turn in first.turns] == [1000, 30, 60]
    assert [turn.output_tokens for turn in first.turns] == [20, 25, 20]
    assert [turn.pause_s for turn in first.turns] == [110.0, 50.0, 0.0]
    assert [turn.keep_tokens for turn in first.turns] == [None, None, 400]
    assert (first.start_s, second.start_s) == (0.0, 60.0)
    capped = read_trace(lines, "tracelab_rounds", name="t", gap_cap_s=10.0).sessions[0]
    assert [turn.pause_s for turn in capped.turns] == [10.0, 10.0, 0.0]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (tracelab_round("a", 1, -4, 3), "prefix_tokens is '-4'"),
        (tracelab_round("a", 1, 0, 3, timing_events=[]), "timing_events has neither"),
        (
            tracelab_round(
                "a", 1, 0, 3, timing_events=[{"event_type": "text", "timestamp": "noon"}]
            ),
            r"timestamp is 'noon', not a time",
        ),
        (tracelab_round("a", 0, 0, 3), "timing_events are before those"),
    ],
)
def test_a_malformed_tracelab_round_names_line_and_field(bad, says):
    with pytest.raises(ConfigError, match=f"line 2: {says}"):
        read_trace([tracelab_round("a", 1, 0, 9), bad], "tracelab_rounds", name="t")


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("agentic_mooncake", [json.dumps(row) for row in AGENTIC]),
        ("weka", [json.dumps(WEKA), json.dumps(WEKA | {"id": "v"})]),
        ("tracelab_rounds", [tracelab_round("a", n, 1000 * n, 1000) for n in range(4)]),
    ],
)
def test_what_was_read_runs(kind, lines):
    cluster = ClusterSpec(workers=2, hbm_tokens=400_000, pool="2GB")
    workload = read_trace(lines, kind, name="t")
    run = World(cluster, workload, policy_of(OURS, cluster), seed=1).run()
    assert run.finished
    assert len(run.records) == workload.turns
    assert all(one.ended_s is not None for one in run.records)


def test_our_own_format_reads_what_it_wrote_and_caps_gaps():
    made = agents(10, 3, AgentMix().everything())
    lines = [recorded(session) for session in made.sessions]
    assert read_trace(lines, "kimistack", name="t").sessions == made.sessions
    capped = read_trace(lines, "kimistack", name="t", gap_cap_s=1.0)
    assert max(turn.pause_s for s in capped.sessions for turn in s.turns) <= 1.0
    with pytest.raises(ConfigError, match="t: line 1: turns"):
        read_trace(['{"name": "a", "text": 1}'], "kimistack", name="t")


@pytest.mark.skipif(not MOONCAKE.exists(), reason="the Mooncake trace is not on this machine")
def test_the_published_mooncake_trace_reads():
    with MOONCAKE.open() as lines:
        workload = read_trace(lines, "mooncake", name="conversation")
    assert len(workload.sessions) == 12_031
    mean = sum(session.turns[0].append_tokens for session in workload.sessions) / 12_031
    assert mean == pytest.approx(12_035, rel=0.001)
