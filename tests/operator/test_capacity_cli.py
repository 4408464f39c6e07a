"""`kimistack capacity` reads a KimiDeployment, or a model and GPUs alone."""

import json

import pytest

from kimi_operator.cli import main

DEPLOYMENT = """
apiVersion: kimistack.dev/v1alpha1
kind: KimiDeployment
metadata: {name: big}
spec: {preset: kimi-k3.1-pro/mi355x}
"""
PAIRS = """
apiVersion: kimistack.dev/v1alpha1
kind: KimiDeployment
metadata: {name: pairs}
spec:
  preset: kimi-k2.6-mxfp4/mi355x
  transfer: {backend: tcp}
"""


@pytest.fixture
def told(tmp_path, capsys):
    """Ask about a text; what it said as JSON, and what it printed."""

    def tell(text):
        file, out = tmp_path / "spec.yaml", tmp_path / "out.json"
        file.write_text(text)
        with pytest.raises(SystemExit) as ended:
            main(["capacity", "-f", str(file), "--concurrency", "2", "--json", str(out)])
        assert not ended.value.code
        return json.loads(out.read_text()), capsys.readouterr().out

    return tell


def test_a_model_and_gpus_alone_are_enough(told):
    found, text = told("{model: kimi-k2.7-code, shapes: [{tensor: 4}], concurrency: [128]}")
    assert found["holdings"][0]["gpus"] == 4
    assert "| both | 1 x 4 | 151.1 |" in text
    assert [one["concurrency"] for one in found["loads"]] == [2]


def test_a_deployment_is_seen_as_its_preset_makes_it(told):
    found, text = told(DEPLOYMENT)
    assert found["spec"]["model"] == "kimi-k3.1-pro"
    assert found["spec"]["shapes"][0]["kv_memory"] == "36GiB"
    assert "big: kimi-k3.1-pro on MI355X" in text
    pairs, _ = told(PAIRS)
    assert [one["role"] for one in pairs["spec"]["shapes"]] == ["prefill", "decode"]
    assert pairs["spec"]["quantisation"]["method"] == "quark"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{model: kimi-k2.6, shapes: [{tensors: 4}]}", "shapes.0.tensors: Extra inputs"),
        ("{model: kimi-k4}", "'kimi-k4' is not one of"),
        ("[]", "is a mapping"),
        ("kind: KimiDeployment", "apiVersion must be"),
    ],
)
def test_what_is_wrong_is_one_line_and_status_2(text, says, tmp_path, capsys):
    file = tmp_path / "spec.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["capacity", "-f", str(file)])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.strip().splitlines()) == 1
