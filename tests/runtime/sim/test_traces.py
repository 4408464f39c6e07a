"""Traces become sessions; a line that does not fit names file, line and field."""

import json
from pathlib import Path

import pytest

from kimi_runtime.errors import ConfigError
from kimi_runtime.sim.sessions import Pause
from kimi_runtime.sim.traces import read_trace, recorded
from kimi_runtime.sim.workload import AgentMix, agents

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
        (line(hash_ids=[1]), "hash_ids has 1 blocks, but 700 tokens are 2"),
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
