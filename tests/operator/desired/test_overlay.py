"""The user's podTemplate over the rendered pod."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_operator.desired.overlay import merged, with_template
from kimi_operator.desired.render import rendered
from kimi_operator.observed import K8S_CURRENT, Manifest
from kimi_runtime.errors import ConfigError
from render_cases import deployment

POD: Manifest = {
    "metadata": {"annotations": {"a": "1"}},
    "spec": {
        "hostNetwork": True,
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "containers": [
            {
                "name": "engine",
                "command": ["run"],
                "env": [{"name": "A", "value": "1"}],
                "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
            }
        ],
        "volumes": [{"name": "shm", "emptyDir": {}}],
    },
}


def laid(template: dict[str, Any], *, managed: bool = True) -> Manifest:
    return with_template(POD, template, "spec.decode.podTemplate", managed=managed)


def test_containers_volumes_and_variables_are_merged_by_name():
    over = {
        "spec": {
            "containers": [
                {"name": "engine", "env": [{"name": "B", "value": "2"}], "tty": True},
                {"name": "log", "image": "log:1"},
            ],
            "volumes": [{"name": "logs", "emptyDir": {}}],
        }
    }
    spec = laid(over)["spec"]
    engine, log = spec["containers"]
    assert engine["env"] == [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]
    assert (engine["command"], engine["tty"], log["name"]) == (["run"], True, "log")
    assert [volume["name"] for volume in spec["volumes"]] == ["shm", "logs"]


def test_null_and_patch_delete_remove_and_plain_lists_are_replaced():
    over = {
        "metadata": {"annotations": {"a": None}},
        "spec": {
            "hostNetwork": None,
            "tolerations": [{"key": "other", "operator": "Exists"}],
            "volumes": [{"name": "shm", "$patch": "delete"}],
        },
    }
    pod = laid(over)
    assert pod["metadata"]["annotations"] == {}
    assert "hostNetwork" not in pod["spec"]
    assert pod["spec"]["tolerations"] == [{"key": "other", "operator": "Exists"}]
    assert pod["spec"]["volumes"] == []


def test_the_template_below_is_not_changed():
    before = repr(POD)
    laid({"spec": {"containers": [{"name": "engine", "env": [{"name": "A", "value": "9"}]}]}})
    assert repr(POD) == before


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ({"spec": {"containers": [{"name": "engine", "args": ["x"]}]}}, "args is the operator's"),
        ({"spec": {"containers": [{"name": "engine", "$patch": "delete"}]}}, "is the operator's"),
        ({"metadata": {"labels": {"kimistack.dev/role": "x"}}}, "operator's own"),
        ({"metadata": {"annotations": {"kimistack.dev/x": "x"}}}, "operator's own"),
        ({"spec": {"tolerations": [{"operator": "Exists"}]}}, "mark nodes that cannot serve"),
        ({"spec": {"tolerations": [{"key": "amd-dcm"}]}}, "mark nodes that cannot serve"),
        ({"spec": {"volumes": [{"emptyDir": {}}]}}, "needs name"),
        ({"spce": {}}, "unknown field spce"),
    ],
    ids=str,
)
def test_what_the_operator_decides_cannot_be_merged_away(template: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        laid(template)


def test_the_command_is_the_users_where_it_is_not_managed():
    over = {"spec": {"containers": [{"name": "engine", "command": ["mine"]}]}}
    assert laid(over, managed=False)["spec"]["containers"][0]["command"] == ["mine"]


def test_an_overlay_cannot_say_who_the_pod_is():
    variable = {"name": "KIMISTACK_NAME", "value": "x"}
    template = {"spec": {"containers": [{"name": "engine", "env": [variable]}]}}
    spec = {"preset": "kimi-nano/cpu", "decode": {"podTemplate": template}}
    with pytest.raises(ConfigError, match=r"podTemplate: KIMISTACK_NAME is set by the operator"):
        rendered(deployment(spec), K8S_CURRENT)


plain = st.recursive(
    st.integers(0, 3) | st.text("ab", max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abc"), plain, max_size=3),
    st.dictionaries(st.sampled_from("abc"), plain, max_size=3),
)
def test_an_overlay_laid_twice_is_laid_once(below: dict[str, Any], over: dict[str, Any]):
    once = merged(below, over)
    assert merged(once, over) == once
