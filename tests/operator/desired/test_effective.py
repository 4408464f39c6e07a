"""Presets, defaults and the user's words, resolved."""

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_operator.api.deployment import KimiDeployment
from kimi_operator.api.load import parse_deployment, validated
from kimi_operator.desired.effective import Effective, resolve
from kimi_operator.desired.merge import holds, leaves, overlay
from kimi_operator.presets.preset import load_preset
from kimi_runtime.errors import CapacityError, ConfigError
from rule_cases import document

NANO = {"preset": "kimi-nano/cpu"}
K26 = {"preset": "kimi-k2.6-mxfp4/mi355x", "rdma": {"allowTCP": True}}
UNKNOWN = {"source": "random", "id": "my/model"}


def effective(spec: dict[str, Any]) -> Effective:
    return resolve(validated(document(spec, "k"), "k.yaml"), load_preset, "k.yaml")


def roles_of(resolved: Effective) -> list[str]:
    return [name for name, _ in resolved.deployment.spec.roles()]


def test_each_value_knows_where_it_comes_from():
    resolved = effective({**K26, "decode": {"parallelism": {"tp": 8}}})
    assert resolved.deployment.spec.decode is not None
    assert resolved.deployment.spec.decode.parallelism.tp == 8
    origins = resolved.origins
    assert origins["decode", "parallelism", "tp"] == "user"
    assert origins["decode", "limits", "kvMemory"] == "preset"
    assert origins["decode", "drain", "timeout"] == "default"
    assert origins["model", "id"] == "preset"
    assert origins["transfer", "backend"] == "default"


def test_every_leaf_has_an_origin():
    resolved = effective(K26)
    assert set(leaves(resolved.spec)) == set(resolved.origins)


@pytest.mark.parametrize("spec", [NANO, K26, {"model": UNKNOWN}])
def test_the_effective_text_resolves_to_itself(spec: dict[str, Any]):
    first = effective(spec)
    again = resolve(parse_deployment(first.as_text(), "t"), load_preset, "t")
    assert again.deployment == first.deployment


@pytest.mark.parametrize("spec", [NANO, K26, {**NANO, "decode": {}}])
def test_the_written_text_resolves_to_the_same(spec: dict[str, Any]):
    first = effective(spec)
    again = resolve(parse_deployment(first.as_written_text(), "t"), load_preset, "t")
    assert again.deployment == first.deployment


def test_no_role_written_means_the_presets_own():
    assert roles_of(effective(NANO)) == ["prefill", "decode"]
    assert roles_of(effective({"preset": "kimi-k3/mi355x"})) == ["decode"]


def test_decode_alone_serves_whole_requests():
    assert roles_of(effective({**NANO, "decode": {}})) == ["decode"]


def test_without_preset_decode_alone_is_there():
    resolved = effective({"model": UNKNOWN})
    assert (roles_of(resolved), resolved.deployment.spec.model.seed) == (["decode"], 0)


def test_env_merges_by_name_and_arguments_are_replaced():
    image = {"engine": "vllm", "image": "vllm:1", **K26}
    mine = {"env": [{"name": "PYTHONHASHSEED", "value": "7"}], "engineArgs": ["--block-size=1"]}
    decode = effective({**image, "prefill": {}, "decode": mine}).deployment.spec.decode
    assert decode is not None
    assert {v.name: v.value for v in decode.env}["PYTHONHASHSEED"] == "7"
    assert {v.name: v.value for v in decode.env}["VLLM_ROCM_USE_AITER"] == "1"
    assert decode.engine_args == ("--block-size=1",)


def test_another_source_drops_what_belongs_to_the_presets_source():
    spec = {**NANO, "model": {"source": "local", "path": "/m"}}
    assert effective(spec).deployment.spec.model.seed is None


def test_a_scaler_of_the_role_leaves_no_replica_count():
    spec = {**NANO, "decode": {"scaling": {"mode": "External", "min": 3}}}
    resolved = effective(spec)
    assert "replicas" not in resolved.spec["decode"]
    assert resolved.deployment.spec.decode is not None
    assert resolved.deployment.spec.decode.least_replicas == 3


def test_a_role_may_take_another_preset():
    spec = {**K26, "prefill": {"configPreset": "kimi-k2.7-code-mxfp4/mi355x"}, "decode": {}}
    prefill = effective(spec).deployment.spec.prefill
    assert prefill is not None
    assert prefill.limits.step_tokens == 32768


def test_transfer_follows_rdma_and_the_engine():
    def backend(**more: Any) -> str | None:
        return effective({**K26, "image": "i", **more}).deployment.spec.transfer.backend

    rdma = {"mode": "hostNetwork"}
    assert backend(rdma={"allowTCP": True}) == "tcp"
    assert backend(rdma=rdma, security={"profile": "RDMA"}) == "verbs"
    assert backend(engine="sglang") == "mori"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"preset": "kimi-k9/mi355x"}, "there is no preset 'kimi-k9/mi355x'; there are kimi-k2.6"),
        ({"preset": "kimi-k3/mi355x", "engine": "atom"}, "has no values for engine atom"),
        ({**K26, "engine": "sglang"}, "spec.image: nothing names an image for engine sglang"),
        (
            {"preset": "kimi-k2.6-mxfp4/mi355x"},
            "spec.rdma.mode: prefill and decode on different nodes",
        ),
        ({**K26, "decode": {"parallelism": {"tp": 3}}}, "heads 64 % 3 = 1"),
        ({**K26, "decode": {"parallelism": {"tp": 16}}}, "a MI355X node has 8; raise"),
        (
            {**K26, "decode": {"parallelism": {"tp": 8}, "gpu": {"perPod": 4}}},
            "spec.decode.parallelism: tp x pp x dp",
        ),
        ({**K26, "decode": {"parallelism": {"ep": 3}}}, "spec.decode.parallelism.ep: ep must"),
        ({**NANO, "decode": {"parallelism": {"tp": 3}, "gpu": {"perPod": 3}}}, "heads 4 % 3 = 1"),
        (
            {
                "model": {"source": "random", "id": "kimi-nano"},
                "decode": {"parallelism": {"tp": 8}},
            },
            "heads 4 % 8 = 4",
        ),
    ],
)
def test_what_only_the_whole_shows_is_refused(spec: dict[str, Any], says: str):
    with pytest.raises(ConfigError) as refused:
        effective(spec)
    assert says in str(refused.value)


@pytest.mark.parametrize("role", [{"parallelism": {"tp": 2}}, {"limits": {"kvMemory": "200GiB"}}])
def test_what_does_not_fit_a_gpu_says_how_much_there_is(role: dict[str, Any]):
    with pytest.raises(CapacityError, match=r"but (one|a) MI355X.* has .*G(i)?B"):
        effective({**K26, "decode": role})


TREES = st.recursive(
    st.integers(0, 3),
    lambda below: st.dictionaries(st.sampled_from("abc"), below, max_size=3),
    max_leaves=8,
).filter(lambda tree: isinstance(tree, dict))


@settings(max_examples=50, deadline=None)
@given(base=TREES, over=TREES)
def test_an_overlay_has_all_of_the_upper_and_of_the_lower_what_it_does_not_hide(
    base: dict[str, Any], over: dict[str, Any]
):
    merged = overlay(base, over)
    assert all(holds(merged, path) for path in leaves(over))
    assert overlay(merged, over) == merged
    assert set(leaves(merged)) <= set(leaves(base)) | set(leaves(over))


def test_yaml_of_the_effective_spec_is_what_it_says():
    resolved = effective(NANO)
    loaded = yaml.safe_load(resolved.as_text())
    assert KimiDeployment.model_validate(loaded).spec == resolved.deployment.spec
