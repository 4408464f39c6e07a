"""Explain logs: read back as they were written, replayed, and wrong lines named."""

import json
import os

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kimi_runtime.errors import ConfigError
from kimi_runtime.explain_cli import explain
from kimi_runtime.router.course import Outcome
from kimi_runtime.router.decisions import Decisions
from kimi_runtime.router.explain.record import Record, line_of, read_records, record_of
from kimi_runtime.router.explain.replay import replay
from kimi_runtime.router.explain.table import explained, summary, worst
from kimi_runtime.router.insight import Insight
from kimi_runtime.router.plan import Mode
from kimi_runtime.router.policies.cost import CostPolicy
from kimi_runtime.router.view import KvSource
from kimi_runtime.spec.router import Cost, LeastLoad
from worker_views import turn, worker

SPEC = Cost(model="kimi-k2.6", gpu="MI355X", tensor=4)
DONE = Outcome("finished", 2.0, first_token_s=1.0, output_tokens=50)


def records_of(workers, count=1, spec=SPEC, outcome=DONE, **asked):
    policy = CostPolicy(spec)
    decisions = Decisions(policy, Insight(policy.planner, load_interval_s=0.2))
    for number in range(count):
        request = turn(session=bytes([number, 255]), **asked)
        decision = decisions.decide(f"r-{number}", request, workers, now_s=float(number))
        yield record_of(decision, outcome, router="router-0", policy=spec, unix_s=1.8e9 + number)


def written(path, records):
    path.write_bytes(b"".join(map(line_of, records)))
    return path


def fleet(loads):
    return [
        worker(f"w{number}", queued_tokens=load, waiting=int(load > 0), cached_tokens=64 * number)
        for number, load in enumerate(loads)
    ]


@settings(max_examples=30, deadline=None)
@given(loads=st.lists(st.integers(0, 100_000), min_size=1, max_size=5))
def test_a_line_reads_back_as_what_was_written_and_its_policy_decides_the_same_again(loads):
    source = KvSource("pool", "n1", "dram", 40_000, checkpoints=(512, 40_000))
    left = Outcome("left", 0.5)  # nothing to learn from
    asked = {"sources": (source,), "tenant": "acme"}
    records = list(records_of(fleet(loads), 3, outcome=left, **asked))
    again = [Record.model_validate_json(line_of(record)) for record in records]
    assert again == records
    assert all(record.asked.tenant == "" for record in again)
    replayed = replay(again, SPEC)
    assert (replayed.decisions, replayed.same) == (3, 3)
    assert replayed.recorded_cost_s == replayed.replayed_cost_s


def test_another_policy_is_compared_by_the_records_own_prices():
    workers = [
        worker("holder", cached_tokens=70_000, running=2),
        worker("idle"),
    ]
    replayed = replay(records_of(workers, 4), LeastLoad())
    assert replayed.same == 0
    assert replayed.workers == {"idle": 4}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"now_s": "soon"}, "now_s"),
        ({"policy": {"kind": "best"}}, "policy"),
        ({"version": 2}, "version"),
        ({"workers": [{"name": "w"}]}, "workers.0.role"),
    ],
)
def test_a_malformed_line_names_file_line_and_field(tmp_path, change, named):
    good, bad = (json.loads(line_of(one)) for one in records_of(fleet([0, 0]), 2))
    path = tmp_path / "explain.jsonl"
    path.write_text(f"{json.dumps(good)}\n{json.dumps(bad | change)}\n")
    with pytest.raises(ConfigError, match=rf"explain\.jsonl, line 2: {named}"):
        list(read_records(path))


def test_a_line_that_is_no_json_names_file_and_line(tmp_path):
    path = tmp_path / "explain.jsonl"
    path.write_text('{"request": \n')
    with pytest.raises(ConfigError, match="line 1: the line: Invalid JSON"):
        list(read_records(path))


def test_a_large_fleet_is_written_in_part_and_left_out_of_replays(tmp_path):
    workers = [worker(f"w{number}") for number in range(300)]
    path = written(tmp_path / "log", records_of(workers))
    (record,) = read_records(path)
    assert len(record.workers) + record.workers_left_out == 300
    assert record.workers_left_out >= 172
    assert record.chosen.decode in {one.name for one in record.workers}
    assert replay([record], SPEC).skipped == 1


def test_a_deferred_start_says_so():
    spec = SPEC.model_copy(update={"first_token_target": 0.01})
    busy = [worker("w", waiting=3, queued_tokens=500_000)]
    refused = Outcome("refused", 0.0)
    (record,) = records_of(busy, spec=spec, outcome=refused, starts_session=True)
    assert record.chosen.mode is Mode.DEFER
    assert "refused" in explained(record)


def test_the_worst_are_those_that_came_latest_after_they_were_expected():
    (quick,) = records_of(fleet([0]))
    late = quick.model_copy(update={"outcome": Outcome("finished", 9.0, first_token_s=8.0)})
    assert worst([quick, late, quick], 1) == [late]
    told = summary([quick, late])["modes"]["extend"]
    assert told["decisions"] == 2
    assert told["real_s"]["p99"] == 8.0


def test_every_term_of_every_plan_is_shown():
    (record,) = records_of(fleet([0, 50_000]))
    text = explained(record)
    for name in record.chosen.terms:
        assert name in text
    assert "* " in text


def told(*arguments):
    app = typer.Typer()
    app.command()(explain)
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_the_command_finds_a_request_the_worst_and_the_whole(tmp_path):
    path = written(tmp_path / "explain.jsonl", records_of(fleet([0, 5000]), 3))
    written(tmp_path / "explain.jsonl.1", records_of(fleet([0, 5000]), 5))
    assert "r-2, attempt 0" in told("r-2", "--file", path).stdout
    assert len(told("--worst", 4, path, "-o", "json").stdout.splitlines()) == 4
    assert json.loads(told(path, "-o", "json").stdout)["decisions"] == 8
    assert "real / predicted" in told("--file", path).stdout
    replayed = json.loads(told("--replay", "--policy", "least_load", path, "-o", "json").stdout)
    assert replayed["decisions"] == 8


def test_the_command_finds_the_newest_log_of_the_state_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("KIMISTACK_HOME", str(tmp_path))
    missing = told()
    assert missing.exit_code != 0
    assert "no router has written an explain log here" in missing.stderr
    for age_s, name in enumerate(("newer", "older")):
        (tmp_path / name).mkdir()
        path = written(tmp_path / name / "explain.jsonl", records_of(fleet([0]), age_s + 1))
        os.utime(path, (100 - age_s, 100 - age_s))
    assert json.loads(told("-o", "json").stdout)["decisions"] == 1


def test_the_command_says_in_one_line_what_is_not_there(tmp_path):
    path = written(tmp_path / "explain.jsonl", records_of(fleet([0])))
    unknown = told("r-9", "--file", path)
    assert unknown.exit_code != 0
    assert "no decision of request 'r-9'" in unknown.stderr
    assert "another router" in unknown.stderr
    other = told("--replay", "--policy", "best", path)
    assert other.exit_code == 2
    assert "use one of longest_prefix" in other.stderr
