"""`kimistack plan`: what it says is what the operator then does, and nothing is written."""

import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from kimi_operator.api.load import validated
from kimi_operator.cli import main
from kimi_operator.field_changes import differences, field_changes
from kimi_operator.kubectl.plan_display import show_plan
from kimi_operator.kubectl.planning import as_data, namespace_of, plan_for
from kimi_operator.observed import ObjectKey
from kimi_operator.plan import Plan
from kimi_runtime.errors import ConfigError
from operator_world import KEY, NAMESPACE, World, nano


async def planned(world: World, **spec: Any) -> Plan:
    """The plan for a spec, and that reading it wrote nothing."""
    before = len(world.kube.writes)
    plan = await plan_for(world.kube, validated(nano(**spec), "file"), NAMESPACE, world.now_s)
    assert len(world.kube.writes) == before, "a plan writes nothing"
    return plan


def shown(plan: Plan) -> str:
    out = io.StringIO()
    show_plan(plan, Console(file=out, width=200))
    return out.getvalue()


def objects(world: World) -> set[ObjectKey]:
    return {
        key
        for key in world.kube.objects
        if key.kind not in ("Event", "KimiDeployment", "Node", "Pod")
    }


async def running() -> World:
    world = World()
    world.create(nano())
    await world.settle()
    return world


async def with_daemons() -> World:
    world = World()
    world.controllers.daemon_nodes = ("node-1", "node-2")
    world.create(nano())
    await world.settle()
    return world


async def test_a_new_deployment_is_created_as_planned():
    world = World()
    plan = await planned(world)
    assert not plan.exists
    assert not plan.empty
    world.create(nano())
    await world.settle()
    created = {c.key for c in plan.changes if c.action == "create"} | set(plan.once)
    assert created == objects(world)
    assert plan.stages[-1].done
    assert "nano in namespace llm: new" in shown(plan)


async def test_an_unchanged_spec_changes_nothing():
    world = await running()
    plan = await planned(world)
    assert plan.empty
    assert plan.changes == ()
    assert "nothing would change" in shown(plan)
    assert as_data(plan)["empty"] is True


async def test_a_pause_that_was_taken_back_leaves_nothing_to_plan():
    """The server keeps the object of defaults that the two commands made."""
    world = await running()
    world.edit(rollout={"paused": False})
    await world.settle()
    assert (await planned(world)).empty
    world.edit(rollout={"paused": False, "maxSurge": 1})
    (change,) = (await planned(world)).spec
    assert (change.path, change.after) == ("spec.rollout", None)


async def test_a_role_without_any_field_is_missed_where_it_is_gone():
    world = World()
    both = {"limits": {"kvMemory": "256MiB"}}
    world.create(nano(prefill={}, decode=both))
    await world.settle()
    resource = nano(decode=both)
    del resource["spec"]["prefill"]
    plan = await plan_for(world.kube, validated(resource, "file"), NAMESPACE, world.now_s)
    assert "spec.prefill" in {change.path for change in plan.spec}


@pytest.mark.parametrize(
    "spec",
    [
        {"restartToken": "again"},
        {"prefill": {"replicas": 3}, "decode": {"replicas": 2}},
        {"router": {"maxInFlight": 5}},
        {"rollout": {"strategy": "RecreatePair"}, "restartToken": "again"},
    ],
    ids=["restart", "scale", "router", "recreate"],
)
async def test_what_is_planned_is_what_the_operator_does(spec: dict[str, Any]):
    world = await running()
    before = objects(world)
    plan = await planned(world, **spec)
    world.edit(**spec)
    await world.settle()
    after = objects(world)
    assert {c.key for c in plan.changes if c.action == "create"} == after - before
    assert {c.key for c in plan.changes if c.action == "delete"} == before - after
    assert plan.spec
    assert (await planned(world, **spec)).empty


async def test_changed_fields_are_named_with_both_values():
    world = await running()
    plan = await planned(world, router={"maxInFlight": 5})
    config = next(c for c in plan.changes if c.key.kind == "ConfigMap")
    assert config.action == "change"
    (field,) = config.fields
    assert field.path == "data.router.json"
    text = shown(plan)
    assert '- "max_in_flight": 256,' in text
    assert '+ "max_in_flight": 5,' in text
    assert [f.path for f in plan.spec] == ["spec.router"]


@pytest.mark.parametrize(
    ("strategy", "by", "says"),
    [
        ("Coordinated", "operator", "pool daemons, replaced one node at a time"),
        ("OnDelete", "user", "pool daemons, of an earlier spec until their pods are deleted"),
    ],
)
async def test_nodes_whose_pool_daemon_is_of_an_earlier_spec_then_are_named(
    strategy: str, by: str, says: str
):
    world = await with_daemons()
    assert (await planned(world)).daemons == ()
    assert (await planned(world, router={"maxInFlight": 5})).daemons == ()
    plan = await planned(world, kvPool={"dram": "256MiB", "updateStrategy": strategy})
    assert (plan.daemons, plan.daemons_by) == (("node-1", "node-2"), by)
    assert says in shown(plan)
    assert "node-1, node-2" in shown(plan)
    assert as_data(plan)["rollout"]["daemons"] == {"nodes": ["node-1", "node-2"], "by": by}


@pytest.mark.parametrize(
    ("strategy", "waits"), [("Coordinated", "rollout.paused is true"), ("OnDelete", None)]
)
async def test_a_pause_that_holds_daemons_is_what_a_plan_waits_for(
    strategy: str, waits: str | None
):
    world = await with_daemons()
    changed = {"evacuation": "7s", "updateStrategy": strategy}
    plan = await planned(world, kvPool=changed, rollout={"paused": True})
    assert plan.daemons == ("node-1", "node-2")
    assert plan.waits == waits
    assert (await planned(world, rollout={"paused": True})).waits is None


async def test_a_daemon_without_a_node_is_on_no_node_that_a_plan_names():
    """As where the node that it is for has too little memory."""
    world = await with_daemons()
    pod = ObjectKey("v1", "Pod", NAMESPACE, "nano-umbp-node-1")
    del world.kube.objects[pod]["spec"]["nodeName"]
    plan = await planned(world, kvPool={"dram": "256MiB"})
    assert plan.daemons == ("node-2",)


async def test_drift_is_told_as_a_repair():
    world = await running()
    key = ObjectKey("v1", "Service", NAMESPACE, "nano-router")
    world.kube.edit(key, {"spec": {"type": "NodePort"}}, "somebody")
    plan = await planned(world)
    (change,) = plan.changes
    assert (change.action, change.key) == ("repair", key)
    assert [(f.path, f.before) for f in change.fields] == [("spec.type", "NodePort")]


async def test_a_spec_that_is_refused_says_why_and_plans_nothing():
    world = await running()
    for spec, says in (
        ({"preset": "no/such"}, "there is no preset"),
        ({"engine": "vllm"}, "engine is immutable"),
    ):
        plan = await planned(world, **spec)
        assert plan.refusal is not None
        assert plan.refusal.reason == "InvalidSpec"
        assert says in plan.refusal.message
        assert plan.changes == ()
        assert "refused: InvalidSpec" in shown(plan)


async def test_a_repair_of_a_spec_that_a_server_without_rules_let_in_is_planned():
    world = await running()
    world.edit(decode={"replicas": 1, "scaling": {"mode": "External"}})
    await world.settle()
    for repair, gone in (
        ({"replicas": 1}, "spec.decode.scaling"),
        ({"scaling": {"mode": "External"}}, "spec.decode.replicas"),
    ):
        resource = nano()
        resource["spec"]["decode"] = repair
        plan = await plan_for(world.kube, validated(resource, "file"), NAMESPACE, world.now_s)
        assert plan.refusal is None
        assert (gone, None) in {(c.path, c.after) for c in plan.spec}


async def test_an_outage_that_cannot_be_avoided_is_named_and_waited_for():
    world = World()
    whole = {"prefill": None, "rollout": {"strategy": "Paired"}}
    document = nano(**whole)
    document["spec"].pop("prefill")
    world.create(document)
    await world.settle()
    document["spec"]["restartToken"] = "again"
    plan = await plan_for(world.kube, validated(document, "file"), NAMESPACE, world.now_s)
    assert plan.outage is not None
    assert plan.waits is not None
    assert "rollout.allowOutage: true" in plan.waits
    assert not plan.stages[-1].done
    assert plan.changes, "what allowing it would lead to is told all the same"
    assert "outage: " in shown(plan)


async def test_a_name_that_somebody_else_has_is_told_before_it_is_asked_for():
    world = World()
    other = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "nano-router", "namespace": NAMESPACE},
        "spec": {},
    }
    world.kube.put(other, "somebody")
    plan = await planned(world)
    assert [str(key) for key in plan.taken] == ["Service llm/nano-router"]
    assert "belongs to somebody else" in shown(plan)


async def test_a_deployment_on_its_way_out_is_refused():
    world = await running()
    world.kube.edit(KEY.object, {"metadata": {"finalizers": ["kimistack.dev/teardown"]}})
    world.kube.remove(KEY.object)
    plan = await planned(world)
    assert plan.refusal is not None
    assert plan.refusal.reason == "Deleting"


async def test_a_suspended_one_says_that_nothing_is_changed():
    world = await running()
    plan = await planned(world, suspend="Reconcile", restartToken="x")
    assert plan.changes == ()
    assert plan.waits is not None
    assert "suspend" in plan.waits


def test_file_and_flag_must_agree_on_the_namespace():
    deployment = validated(nano(), "file")
    assert namespace_of(deployment, None, "default") == NAMESPACE
    assert namespace_of(deployment, NAMESPACE, "default") == NAMESPACE
    with pytest.raises(ConfigError, match="leave one of them out"):
        namespace_of(deployment, "other", "default")


def test_without_a_cluster_it_is_one_line_and_exit_code_2(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    file = tmp_path / "nano.yaml"
    file.write_text(json.dumps(nano()))
    with pytest.raises(SystemExit) as ended:
        main(["plan", "-f", str(file)])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "there is no cluster to talk to" in err


trees = st.recursive(
    st.integers(0, 3) | st.sampled_from(["a", "1", "1000m", "1Gi"]),
    lambda inner: (
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3)
        | st.lists(inner, min_size=1, max_size=3)
    ),
    max_leaves=8,
)


@given(trees)
@settings(max_examples=50, deadline=None)
def test_what_is_there_already_differs_in_nothing(tree: Any):
    assert differences({"spec": tree}, {"spec": tree, "added by a server": 1}) == ()


def test_quantities_are_compared_by_what_they_mean():
    limits = {"cpu": "1000m", "memory": "1024Mi"}
    assert differences(limits, {"cpu": "1", "memory": "1Gi"}) == ()
    (change,) = differences(limits, {"cpu": "2", "memory": "1Gi"})
    assert (change.path, change.before, change.after) == ("cpu", "2", "1000m")


def test_elements_of_a_list_are_told_apart_by_their_key():
    wanted = {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]}
    live = {"env": [{"name": "B", "value": "3"}, {"name": "A", "value": "1"}]}
    (change,) = differences(wanted, live)
    assert (change.path, change.before, change.after) == ("env[B].value", "3", "2")


def test_what_we_own_and_no_longer_write_goes_away():
    world = World()
    manifest: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "c", "namespace": NAMESPACE},
        "data": {"a": "1", "b": "2"},
    }
    child = world.kube.server_side_apply(manifest, "kimi-operator", force=True)
    (change,) = field_changes({**manifest, "data": {"a": "1"}}, child)
    assert (change.path, change.before, change.after) == ("data.b", "2", None)
