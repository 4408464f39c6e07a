"""What people get wrong in a file, and the one line they get for it."""

from pathlib import Path

import pytest
import yaml

from kimi_operator.api.load import MAX_FILE_BYTES, load_deployment, parse_deployment
from kimi_runtime.errors import ConfigError
from rule_cases import document

ROOT = Path(__file__).resolve().parents[3]
HEAD = "apiVersion: kimistack.dev/v1alpha1\nkind: KimiDeployment\nmetadata: {name: a}\n"


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as refused:
        parse_deployment(text, "a.yaml")
    message = str(refused.value)
    assert message.startswith("a.yaml: ")
    assert "\n" not in message
    return message.removeprefix("a.yaml: ")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("{preset: p, prefil: {}}", "spec.prefil: unknown field; did you mean prefill?"),
        ("{preset: p, decode: {replica: 2}}", "spec.decode.replica: unknown field; did you mean"),
        (
            "{preset: p, decode: {env: [{nam: A}]}}",
            "spec.decode.env[0].nam: unknown field; did you mean name?",
        ),
        ("{preset: p, worker: {}}", "spec.worker: unknown field; there are adapters, budget"),
        # a worker's own file may ask for faults; what is deployed may not
        (
            "{preset: p, decode: {chaos: {corrupt: 1}}}",
            "spec.decode.chaos: unknown field; there are",
        ),
        (
            "{preset: p, transfer: {chaos: {corrupt: 1}}}",
            "spec.transfer.chaos: unknown field; there are",
        ),
        ("{preset: p, kvPool: {dram: 5XB}}", "spec.kvPool.dram: '5XB' is no size: write e.g."),
        (
            "{preset: p, decode: {drain: {timeout: 30}, probes: {startupTimeout: soon}}}",
            "spec.decode.probes.startupTimeout: 'soon' is no duration: write e.g.",
        ),
        ("{preset: p, engine: trt}", "spec.engine: 'trt' is not one of 'kimistack', 'sglang'"),
        ("{preset: p, decode: {replicas: -1}}", "spec.decode.replicas: input should be greater"),
        ("{preset: p, decode: {replicas: two}}", "spec.decode.replicas: input should be a valid"),
        ("{preset: p, decode: 3}", "spec.decode: a mapping is wanted, not 3"),
        ("{preset: p, kvPool: {dram: 0}}", "spec.kvPool.dram: input should be greater than 0"),
        (
            "{model: {source: random}, decode: {gpu: {perPod: 8}, parallelism: {tp: 4}}}",
            "spec.decode.parallelism: tp x pp x dp (dp left out with dpAttention) must equal",
        ),
        ("{preset: p, prefill: {}}", "spec.decode: prefill needs decode"),
        ("{preset: p, decode: {}, decode: {}}", "line 4, column 31: 'decode' is written twice"),
        ("{preset: p, decode: {1: 2}}", "line 4, column 28: a key is a text, not 1"),
        ("[", "line 4, column 8: "),
        ("", "spec: a mapping is wanted, not None"),
    ],
)
def test_a_wrong_field_is_named_with_its_path_and_what_to_change(spec: str, says: str):
    assert refusal(f"{HEAD}spec: {spec}").startswith(says)


def test_several_problems_are_counted():
    assert refusal(f"{HEAD}spec: {{preset: p, a: 1, b: 2}}").endswith("(and 1 more)")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "one KimiDeployment is wanted, there are 0 documents"),
        (f"{HEAD}spec: {{preset: p}}\n---\n{HEAD}", "one KimiDeployment is wanted, there are 2"),
        ("- a", "a KimiDeployment is a mapping"),
        ("kind: KimiDeployment", "apiVersion must be kimistack.dev/v1alpha1, it is missing"),
        (HEAD.replace("v1alpha1", "v1"), "apiVersion must be kimistack.dev/v1alpha1, not"),
        (HEAD.replace("KimiDeployment", "Pod"), "kind must be KimiDeployment, not 'Pod'"),
        (HEAD, "spec: is required"),
    ],
)
def test_a_document_that_is_none_says_which_it_should_be(text: str, says: str):
    assert refusal(text).startswith(says)


def test_a_merge_key_is_read_as_kubectl_reads_it():
    text = (
        f"{HEAD}spec:\n  preset: p\n  prefill: &role {{replicas: 1, limits: {{maxRunning: 4}}}}\n"
    )
    spec = parse_deployment(f"{text}  decode: {{<<: *role, replicas: 2}}\n", "a.yaml").spec
    assert (spec.decode.replicas, spec.decode.limits.max_running) == (2, 4)
    assert "'<<' is written twice" in refusal(f"{text}  decode: {{<<: *role, <<: *role}}\n")


def test_a_name_that_is_too_long_is_refused():
    assert refusal(yaml.safe_dump(document({"preset": "p"}, "a" * 31))).startswith("metadata.name:")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load_deployment(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_deployment(tmp_path)


def test_text_that_is_not_utf8_is_refused(tmp_path: Path):
    path = tmp_path / "a.yaml"
    path.write_bytes(b"kind: \xff")
    with pytest.raises(ConfigError, match=r"is not UTF-8 text \(byte 6\)"):
        load_deployment(path)


def test_a_file_too_large_is_not_read(tmp_path: Path):
    path = tmp_path / "a.yaml"
    path.write_text("#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than"):
        load_deployment(path)


def test_json_is_yaml_too(tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_text(
        '{"apiVersion": "kimistack.dev/v1alpha1", "kind": "KimiDeployment",'
        ' "metadata": {"name": "a"}, "spec": {"preset": "p"}}'
    )
    assert load_deployment(path).name == "a"


def test_what_a_cluster_adds_to_metadata_is_no_error():
    stored = document({"preset": "p"})
    stored["metadata"] |= {"uid": "u", "managedFields": [{"manager": "kubectl"}], "selfLink": "x"}
    assert parse_deployment(yaml.safe_dump(stored), "a.yaml").metadata.uid == "u"


def test_written_keeps_what_was_written_and_no_default():
    text = f"{HEAD}spec: {{preset: p, decode: {{}}, kvPool: {{dram: 1GiB}}, image: null}}"
    written = parse_deployment(text, "a.yaml").written()
    assert written == {"preset": "p", "decode": {}, "kvPool": {"dram": "1GiB"}}


@pytest.mark.parametrize(
    "example", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.name
)
def test_every_example_loads(example: Path):
    assert example.stem.startswith(load_deployment(example).name)
