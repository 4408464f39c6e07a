"""Experiments: regimes are checked before anything runs, runs are kept, reports say all of it."""

import gzip
import json

import pytest
from typer.testing import CliRunner

from kimi_runtime.cli import app
from kimi_runtime.errors import ConfigError
from kimi_runtime.sim.experiments.cells import Cells
from kimi_runtime.sim.experiments.regime import NAMES, Regime, cells_of, load, merged, seeds_of

TINY = {
    "name": "tiny",
    "says": "Two workers.",
    "seeds": [101, 102],
    "tuning_seeds": [1, 2],
    "base": {
        "sessions": 4,
        "mix": {"turns": 3},
        "cluster": {"workers": 2, "hbm_tokens": 500_000, "pool": "2GB"},
    },
    "scenarios": {
        "tight": {"says": "Small memory."},
        "loose": {"says": "Large.", "set": {"cluster": {"hbm_tokens": 900_000}}, "seeds": 1},
    },
    "arms": {
        "ours": {"says": "Ours.", "set": {"policy": "cost"}},
        "dynamo": {"says": "Dynamo's.", "set": {"policy": "dynamo"}},
        "no_pool": {"says": "None.", "set": {"cluster": {"pool": 0}}, "scenarios": ["tight"]},
    },
    "contrasts": {
        "tail": {"metric": "ttft_p99", "arm": "ours", "against": ["dynamo", "no_pool"]},
        "rate": {
            "metric": "throughput", "arm": "ours", "against": ["no_pool"], "scenario": "tight",
            "target": 2.0, "published": 1.077,
        },
    },
    "anchors": {
        "tail": {
            "metric": "ttft_p99", "arms": ["no_pool"], "scenario": "tight",
            "value": 17.3, "tolerance": 0.15,
        }
    },
    "ladders": {"parts": ["no_pool", "ours"]},
    "drawn": {"tight": ["ours", "no_pool"]},
}  # fmt: skip


@pytest.fixture
def regime_file(tmp_path):
    """The tiny regime in a file."""
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return path


def command(*arguments):
    """Run it; the exit status, what it printed, and what it complained of."""
    result = CliRunner().invoke(app, ["sim", *(str(one) for one in arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_an_experiment_prints_ratios_and_keeps_every_request(regime_file, tmp_path):
    file, page = tmp_path / "out.json.gz", tmp_path / "out.html"
    code, out, err = command("experiment", regime_file, "--json", file, "--html", page)
    assert (code, err.strip()) == (0, "tiny: 8 runs, 8 of them still to be made")
    assert "| rate | ours over no_pool | out tok/s |" in out
    assert "**missed**" in out
    made = json.loads(gzip.decompress(file.read_bytes()))
    assert set(made["ratios"]) == {"tail.tight", "tail.loose", "rate"}
    assert made["ratios"]["rate"].keys() >= {"mean", "low", "high"}
    assert len(made["runs"]) == 8
    assert {len(run["requests"]) for run in made["runs"]} == {12}
    assert made["findings"]["regime_digest"] == load(str(regime_file))[1]
    text = page.read_text()
    assert "<svg" in text
    assert "http" not in text.replace("http-equiv", "")
    again = command("experiment", regime_file, "--json", file)
    assert again[1] == out
    assert again[2].strip() == "tiny: 8 runs, 0 of them still to be made"
    code, compared, _ = command("compare", file, file, "--html", tmp_path / "both.html")
    assert code == 0
    assert "1.000 [1.000, 1.000]" in compared


def test_a_run_that_was_killed_goes_on_with_what_is_missing(tmp_path):
    regime = Regime.model_validate(TINY)
    cells, kept = cells_of(regime, seeds=[101], scenarios=["tight"]), Cells(tmp_path / "cells")
    kept.fill(cells[:1], 1, told=lambda cell: None)
    assert [cell.arm for cell in kept.missing(cells)] == ["dynamo", "no_pool"]
    told = []
    kept.fill(cells, 1, told=told.append)
    assert [cell.arm for cell in told] == ["dynamo", "no_pool"]
    assert not kept.missing(cells)
    kept.path(cells[0]).write_bytes(b"half of a")
    with pytest.raises(ConfigError, match="delete it and run again"):
        kept.read(cells[0])


def test_two_processes_make_what_one_makes(regime_file, tmp_path):
    asked = ("experiment", regime_file, "--seeds", "101", "--scenario", "tight")
    one = command(*asked, "--cells", tmp_path / "a")
    two = command(*asked, "--cells", tmp_path / "b", "--jobs", 2)
    assert one == two
    assert "Not all of the regime's scenarios and arms ran" in one[1]


def changed(**fields):
    """The tiny regime with other fields."""
    return json.dumps(merged(TINY, fields))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (changed(seeds=[1, 101]), "a seed is both reported and tuned on"),
        (changed(contrasts={"tail": {"arm": "best"}}), "tail: arm 'best' is not one of ours"),
        (changed(contrasts={"rate": {"metric": "p99"}}), "metric 'p99' is not one of ttft_p50"),
        (changed(anchors={"tail": {"scenario": "x"}}), "scenario 'x' is not one of tight, loose"),
        (changed(drawn={"tight": ["x"]}), "drawn.tight: arm 'x' is not one of"),
        (changed(ladders={"parts": ["x"]}), "ladders.parts: arm 'x'"),
        (changed(base={"cluster": {"wrokers": 3}}), "scenario tight, arm ours: cluster.wrokers"),
        (changed(arms={"ours": {"set": {"policy": "x"}}}), "policy 'x' is not one of cost"),
        (changed(sayz="x"), "sayz: Extra inputs"),
        ("{", "Invalid JSON"),
    ],
)
def test_a_regime_that_does_not_fit_says_where(text, says, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(text)
    code, _, err = command("experiment", path)
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("experiment", "best"), "'best' is not one of pool, migration, overall, peers, pd"),
        (("experiment", "pool", "--seeds", "1-x"), "'1-x' is neither a number nor a range"),
        (("experiment", "pool", "--arm", "x"), "pool: no arm 'x'; it has"),
        (("compare", "nowhere.json", "nowhere.json"), "nowhere.json cannot be read"),
    ],
)
def test_what_is_wrong_is_one_line_and_status_2(arguments, says):
    code, _, err = command(*arguments)
    assert code == 2
    assert says in err


def test_compare_names_what_a_file_is_not(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"sessions": 3}')
    assert "not what `kimistack sim run --json`" in command("compare", path, path)[2]
    path.write_text('{"runs": [{"task": {}, "summary": {}}]}')
    assert f"{path}: requests: Field required" in command("compare", path, path)[2]


def test_seeds_are_numbers_and_ranges():
    assert seeds_of("101-103,7") == (101, 102, 103, 7)
    with pytest.raises(ConfigError, match="counts down; write 3-9"):
        seeds_of("9-3")
    with pytest.raises(ConfigError, match="a seed is named twice"):
        seeds_of("1-3,2")


PUBLISHED = {
    "pool": range(121, 141),
    "overall": range(121, 141),
    "peers": range(121, 131),
    "migration": range(111, 121),
    "pd": range(111, 121),
}


@pytest.mark.parametrize("name", NAMES)
def test_every_packaged_regime_reports_the_published_seeds_and_tunes_on_others(name):
    regime, digest = load(name)
    assert regime.name == name
    assert regime.seeds == tuple(PUBLISHED[name])
    assert set(regime.tuning_seeds) <= set(range(1, 21))
    assert len(digest) == 64
    assert cells_of(regime)
