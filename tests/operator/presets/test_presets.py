"""Every preset resolves on every engine it has values for, and sets only what it may."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.api.load import model_within, validated
from kimi_operator.desired.effective import resolve
from kimi_operator.presets.preset import load_preset, preset_names
from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.hardware import NODES
from kimi_runtime.spec.published import PUBLISHED
from rule_cases import document

EACH = [(name, engine) for name in preset_names() for engine in load_preset(name).engines]


def forbidden(values: dict[str, Any], model: type[BaseModel], path: str) -> Iterator[str]:
    """Paths that the schema has a default for, which would hide the preset's value."""
    fields = {str(field.alias): field for field in model.model_fields.values()}
    for key, value in values.items():
        field = fields[key]
        below = model_within(field.annotation)
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("x-presettable"):
            continue
        if below is not None and isinstance(value, dict):
            yield from forbidden(value, below, f"{path}.{key}")
        else:
            yield f"{path}.{key}"


def test_there_are_presets_for_every_current_model():
    assert preset_names() == (
        "kimi-k2.6-mxfp4/mi355x",
        "kimi-k2.7-code-mxfp4/mi355x",
        "kimi-k3.1-pro/mi355x",
        "kimi-k3/mi355x",
        "kimi-nano/cpu",
    )


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_sets_only_what_the_cluster_does_not_default(name: str):
    preset = load_preset(name)
    for values in (preset.spec, *preset.engines.values()):
        assert list(forbidden(values, DeploymentSpec, "spec")) == []


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_speaks_of_a_known_model_and_machine(name: str):
    preset = load_preset(name)
    assert preset.architecture in PUBLISHED
    assert preset.hardware in NODES


@pytest.mark.parametrize(("name", "engine"), EACH)
def test_a_preset_resolves_and_fits(name: str, engine: str):
    spec = {"preset": name, "engine": engine, "rdma": {"allowTCP": True}}
    if engine != "kimistack":
        spec["image"] = "engine:1"
    resolved = resolve(validated(document(spec, "k"), "k"), load_preset, "k")
    assert resolved.deployment.spec.decode is not None
    assert resolved.deployment.spec.model.id


@pytest.mark.parametrize("name", preset_names())
def test_both_roles_of_a_preset_fit_as_well(name: str):
    spec = {"preset": name, "rdma": {"allowTCP": True}, "prefill": {}, "decode": {}}
    resolved = resolve(validated(document(spec, "k"), "k"), load_preset, "k")
    assert [role for role, _ in resolved.deployment.spec.roles()] == ["prefill", "decode"]


def test_an_unknown_preset_names_those_there_are():
    with pytest.raises(ConfigError, match=r"there are kimi-k2\.6-mxfp4/mi355x"):
        load_preset("kimi")
