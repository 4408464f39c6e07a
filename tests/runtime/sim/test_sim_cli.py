"""`kimistack sim` from the command line: tables, JSON, and one line for what is wrong."""

import json
import sys

import pytest
from typer.testing import CliRunner

from kimi_runtime.cli import app

SMALL = ("sim", "run", "--sessions", "3", "--turns", "3")


def command(*arguments):
    """Run it; the exit status, what it printed, and what it complained of."""
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_run_prints_a_line_for_each_policy_and_writes_every_request(tmp_path):
    file = tmp_path / "out.json"
    code, out, _ = command(*SMALL, "--policy", "cost", "--policy", "dynamo", "--json", file)
    assert code == 0
    assert [line.split("|")[1].strip() for line in out.splitlines()] == [
        "policy",
        "---",
        "cost",
        "dynamo",
    ]
    runs = json.loads(file.read_text())["runs"]
    assert [run["summary"]["policy"] for run in runs] == ["cost", "dynamo"]
    assert {len(run["requests"]) for run in runs} == {9}
    assert runs[0]["task"]["mix"]["turns"] == 3


def test_the_same_run_on_two_processes_is_the_same():
    policies = ("--policy", "cost", "--policy", "least_load")
    assert command(*SMALL, *policies) == command(*SMALL, *policies, "--jobs", 2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--policy", "best"), "policy 'best' is not one of cost, round_robin"),
        (("--cluster", "nowhere.json"), "nowhere.json cannot be read"),
        (("--trace", "nowhere.jsonl"), "nowhere.jsonl cannot be read"),
        (("--trace", sys.executable), "is no UTF-8 text"),
        (("--gap-cap", "-1"), "gap_cap_s: Input should be greater than 0"),
        (("--format", "mooncake", "--json", "/nowhere/out.json"), "cannot be written"),
    ],
)
def test_what_is_wrong_is_one_line_and_status_2(arguments, says):
    code, _, err = command(*SMALL, *arguments)
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1


def test_a_cluster_file_with_a_wrong_field_names_it(tmp_path):
    file = tmp_path / "cluster.json"
    file.write_text('{"workers": 0}')
    assert "a cluster of no workers" in command(*SMALL, "--cluster", file)[2]
    file.write_text('{"wrokers": 4}')
    assert "wrokers: Extra inputs are not permitted" in command(*SMALL, "--cluster", file)[2]
    file.write_text('{"tensor": 3}')
    assert "do not divide a node's 8" in command(*SMALL, "--cluster", file)[2]


def test_calibrate_tells_fitted_from_held_out():
    code, out, _ = command("sim", "calibrate", "--up-to", "4")
    assert code == 0
    assert "fitted: 3 points; mean error of TPOT" in out
    assert "held out: 5 points; mean error of TPOT" in out
