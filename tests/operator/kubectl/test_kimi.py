"""`kubectl kimi`: what people see and ask for, against a cluster in memory."""

import io
from typing import Any

import pytest
from rich.console import Console

from kimi_operator.kubectl import actions
from kimi_operator.kubectl.access import Access
from kimi_operator.kubectl.display import show_status, show_top
from kimi_operator.kubectl.report import StatusReport, report_of
from kimi_operator.kubectl.sight import Sight, look, the_deployment
from kimi_operator.kubectl.signals import heard, with_loads
from kimi_operator.kubectl.top import top_of
from kimi_operator.kubectl.unblock import LEASE_NAME, Holder, live_operators, unblock
from kimi_operator.main import LEASE
from kimi_operator.observed import Manifest, ObjectKey
from kimi_operator.stamps import rfc3339_micro
from kimi_operator.teardown import FINALIZER
from kimi_runtime.errors import ClusterBusy, ClusterRefused, ConfigError
from operator_world import KEY, NAMESPACE, World, nano

ROUTER: Manifest = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "nano-router-1",
        "namespace": NAMESPACE,
        "labels": {
            "kimistack.dev/deployment": "nano",
            "app.kubernetes.io/component": "router",
        },
    },
    "spec": {
        "containers": [{"name": "router", "ports": [{"name": "http", "containerPort": 8000}]}]
    },
    "status": {"phase": "Running"},
}


def signals(**workers: dict[str, Any]) -> dict[str, Any]:
    """A router's document with these workers."""
    spread = {"counts": {}}
    return {
        "router": "nano-router-1",
        "uptime_s": 100.0,
        "known_for_s": 100.0,
        "window_s": 60.0,
        "in_flight": 3,
        "ttft": spread,
        "itl": spread,
        "hand_off": spread,
        "workers": [
            {"name": name, "role": "decode", "ready": True, "draining": False, **fields}
            for name, fields in workers.items()
        ],
        "something_newer": True,
    }


async def running(**spec: Any) -> World:
    world = World()
    world.create(nano(**spec))
    await world.settle()
    return world


async def seen(world: World) -> Sight:
    return await look(world.kube, await the_deployment(world.kube, NAMESPACE, "nano"))


async def reported(world: World) -> StatusReport:
    sight = await seen(world)
    known = await heard(world.kube, sight)
    return report_of(with_loads(sight, known), known)


def instances(world: World) -> list[str]:
    return [obj["metadata"]["name"] for obj in world.kube.of_kind("StatefulSet")]


def text_of(report: StatusReport, now_s: float) -> str:
    out = io.StringIO()
    show_status(report, Console(file=out, width=250), now_s)
    return out.getvalue()


async def test_status_shows_instances_revisions_conditions_and_where_it_serves():
    world = await running()
    world.kube.put(ROUTER, "replicaset-controller")
    (decode,) = [name for name in instances(world) if "-d-" in name]
    world.kube.pods["nano-router-1", 8000, "signals"] = signals(**{f"{decode}-0": {"in_flight": 7}})
    report = await reported(world)
    assert report.ready
    assert report.url == "http://nano-router.llm.svc/v1"
    assert {one.role: (one.state, one.in_flight) for one in report.instances} == {
        "prefill": ("serving", None),
        "decode": ("serving", 7),
    }
    assert [pod.node for one in report.instances for pod in one.pods] == ["node-1", "node-1"]
    (revision,) = report.revisions
    assert (revision.use, revision.instances) == ("current, update", 2)
    text = text_of(report, world.now_s)
    for part in ("nano in namespace llm: Ready", "conditions", "instances", "revisions", decode):
        assert part in text
    assert report.model_dump(mode="json", by_alias=True)["observedGeneration"] == 1


@pytest.mark.parametrize(("terminal", "width"), [(True, 40), (False, 80)])
async def test_no_name_is_broken_however_narrow_it_is_shown(terminal: bool, width: int):
    """Somebody copies it, or a program looks for it."""
    world = await running()
    report, out = await reported(world), io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None)
    show_status(report, console, world.now_s)
    names = [one.instance for one in report.instances]
    names += [condition["type"] for condition in report.conditions]
    assert [name for name in names if name not in out.getvalue()] == []
    messages = [str(condition["message"]) for condition in report.conditions]
    whole = [message for message in messages if message in out.getvalue()]
    assert (whole == messages) is not terminal


async def test_status_says_what_to_do():
    world = await running()
    assert (await reported(world)).todo == ()
    world.edit(preset="no/such")
    await world.passes()
    (todo,) = (await reported(world)).todo
    assert todo.startswith("InvalidSpec: ")
    world.edit(preset="kimi-nano/cpu", rollout={"paused": True, "toRevision": "abcdef"})
    todo_lines = (await reported(world)).todo
    assert any("kubectl kimi resume nano -n llm" in line for line in todo_lines)
    assert any("undo nano --forward" in line for line in todo_lines)
    assert any("not yet seen the newest spec" in line for line in todo_lines)


async def test_a_router_that_is_silent_is_named_and_hides_nothing_else():
    world = await running()
    world.kube.put(ROUTER, "replicaset-controller")
    report = await reported(world)
    assert report.ready
    assert any("nano-router-1" in line for line in report.todo)
    world.kube.pods["nano-router-1", 8000, "signals"] = {"nonsense": 1}
    assert any("not of this version" in line for line in (await reported(world)).todo)


async def test_top_shows_what_each_worker_has_to_do():
    world = await running()
    world.kube.put(ROUTER, "replicaset-controller")
    names = [f"{name}-0" for name in instances(world)]
    busy = {
        "in_flight": 4,
        "waiting": 1,
        "queued_tokens": 900,
        "free_blocks": 25,
        "total_blocks": 100,
        "silent_s": 0.5,
        "tokens_per_s": 41.0,
    }
    world.kube.pods["nano-router-1", 8000, "signals"] = signals(**{names[0]: busy, names[1]: {}})
    sight = await seen(world)
    report = top_of(sight, await heard(world.kube, sight))
    first = next(one for one in report.workers if one.pod == names[0])
    assert (first.in_flight, first.waiting, first.kv_use, first.node) == (4, 1, 0.75, "node-1")
    assert report.fleet.routers == 1
    out = io.StringIO()
    show_top(report, Console(file=out, width=200))
    assert "75%" in out.getvalue()
    assert "0.5s ago" in out.getvalue()
    assert " 41 " in out.getvalue()


async def test_a_deployment_is_found_by_name_or_alone_and_others_are_named():
    world = await running()
    assert (await the_deployment(world.kube, NAMESPACE, None))["metadata"]["name"] == "nano"
    with pytest.raises(ConfigError, match="no KimiDeployment other; namespace llm has: nano"):
        await the_deployment(world.kube, NAMESPACE, "other")
    with pytest.raises(ConfigError, match="namespace empty, nor any other"):
        await the_deployment(world.kube, "empty", None)
    second = nano()
    second["metadata"]["name"] = "second"
    world.create(second)
    with pytest.raises(ConfigError, match=r"which one\? name it; namespace llm has: nano, second"):
        await the_deployment(world.kube, NAMESPACE, None)


async def test_without_the_crd_the_way_to_install_it_is_named():
    world = World()

    def no_such_kind(call: Any) -> None:
        if call.kind.endswith("KimiDeployment"):
            raise ClusterRefused("404 page not found", code=404)

    world.kube.before = no_such_kind
    with pytest.raises(ConfigError, match="kimistack install"):
        await the_deployment(world.kube, NAMESPACE, None)


async def test_pause_holds_the_rollout_and_resume_lets_it_go_on():
    world = await running(prefill={"replicas": 2}, decode={"replicas": 2})
    said: list[str] = []
    await actions.pause(world.kube, world.resource, said.append)
    await actions.pause(world.kube, world.resource, said.append)
    assert said == [
        "nano: the rollout pauses after the step under way",
        "nano: the rollout is paused already",
    ]
    before = instances(world)
    world.edit(restartToken="again")
    await world.settle()
    assert instances(world) == before
    assert world.conditions["Progressing"] == ("False", "Paused")
    await actions.resume(world.kube, world.resource, said.append)
    await world.settle()
    assert not set(instances(world)) & set(before)
    assert world.conditions["Ready"] == ("True", "Serving")


async def test_undo_goes_back_and_forward_again():
    world = await running()
    said: list[str] = []
    with pytest.raises(ConfigError, match="there is no revision to go back to"):
        await actions.undo(world.kube, await seen(world), None, said.append)
    first = instances(world)
    world.edit(restartToken="again")
    await world.settle()
    second = instances(world)
    with pytest.raises(ConfigError, match="revision 000000 is not kept; there are: "):
        await actions.undo(world.kube, await seen(world), "000000", said.append)
    await actions.undo(world.kube, await seen(world), None, said.append)
    await world.settle()
    assert instances(world) == first
    await actions.forward(world.kube, world.resource, said.append)
    await world.settle()
    assert instances(world) == second
    assert [line.split(":")[0] for line in said] == ["nano", "nano"]


async def test_a_drained_instance_is_replaced_and_the_others_stay():
    world = await running(decode={"replicas": 2})
    uids = {
        obj["metadata"]["name"]: obj["metadata"]["uid"] for obj in world.kube.of_kind("StatefulSet")
    }
    sight = await seen(world)
    (target,) = actions.drain_targets(sight, [f"{sorted(uids)[0]}-0"], None)
    said: list[str] = []
    await actions.ask_to_drain(world.kube, sight, [target], force=False, tell=said.append)
    await world.passes()
    marked = [
        pod["metadata"]["name"]
        for pod in world.kube.of_kind("Pod")
        if pod["metadata"]["labels"].get("kimistack.dev/draining") == "true"
    ]
    assert marked == [f"{target.key.name}-0"], "its pod is marked, so that routers leave it"
    left, text = actions.drain_progress(
        await seen(world), frozenset({target.stateful_set["metadata"]["uid"]})
    )
    assert (left, "1 of 1 left" in text) == (1, True)
    await world.settle()
    after = {
        obj["metadata"]["name"]: obj["metadata"]["uid"] for obj in world.kube.of_kind("StatefulSet")
    }
    assert len(after) == len(uids)
    assert {name for name, uid in after.items() if uids.get(name) == uid} == set(uids) - {
        target.key.name
    }
    assert world.conditions["Ready"] == ("True", "Serving")
    assert (await reported(world)).instances[0].state == "serving"


async def test_a_drain_that_leaves_a_role_without_anything_asks_for_force():
    world = await running()
    sight = await seen(world)
    targets = actions.drain_targets(sight, (), "node-1")
    assert len(targets) == 2
    said: list[str] = []
    with pytest.raises(ConfigError, match="no decode and no prefill instance would serve"):
        await actions.ask_to_drain(world.kube, sight, targets, force=False, tell=said.append)
    assert said == []
    await actions.ask_to_drain(world.kube, sight, targets, force=True, tell=said.append)
    assert len(said) == 2
    await actions.cancel_drain(
        world.kube, actions.drain_targets(await seen(world), (), "node-1"), said.append
    )
    before = [obj["metadata"]["uid"] for obj in world.kube.of_kind("StatefulSet")]
    await world.settle()
    assert [obj["metadata"]["uid"] for obj in world.kube.of_kind("StatefulSet")] == before


async def test_an_unknown_instance_is_named_with_those_there_are():
    world = await running()
    sight = await seen(world)
    with pytest.raises(ConfigError, match="there is no instance decode-9; there are: decode-"):
        actions.drain_targets(sight, ["decode-9"], None)
    with pytest.raises(ConfigError, match="no instance runs on node other"):
        actions.drain_targets(sight, (), "other")


async def deleted() -> World:
    world = await running()
    world.kube.edit(KEY.object, {"metadata": {"finalizers": [FINALIZER, "other.dev/keep"]}})
    world.kube.remove(KEY.object)
    return world


def lease(world: World, ago_s: float) -> Manifest:
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": LEASE_NAME, "namespace": "kimistack"},
        "spec": {
            "holderIdentity": "operator-1",
            "leaseDurationSeconds": 15,
            "renewTime": rfc3339_micro(world.now_s - ago_s),
        },
    }


def test_the_lease_looked_for_is_the_operators():
    assert LEASE_NAME == LEASE


async def test_unblock_lets_a_deletion_end_and_names_what_is_left():
    world = await deleted()
    world.kube.put(lease(world, 3600), "operator")
    operators = await live_operators(world.kube, [NAMESPACE], world.now_s)
    assert operators == (), "one that has not renewed for an hour is gone"
    said: list[str] = []
    await unblock(world.kube, await seen(world), operators, force=False, tell=said.append)
    assert said[0] == f"nano: {FINALIZER} is taken off"
    assert "other.dev/keep" in said[1]
    assert "2 StatefulSet" in said[2]
    world.kube.edit(KEY.object, {"metadata": {"finalizers": []}})
    world.kube.collect_garbage()
    left = {key.kind for key in world.kube.objects} - {"Event", "Lease", "Node"}
    assert left == set(), "garbage collection took all of it"


async def test_unblock_refuses_while_an_operator_is_at_work_unless_forced():
    world = await deleted()
    world.kube.put(lease(world, 3), "operator")
    operators = await live_operators(world.kube, [NAMESPACE], world.now_s)
    said: list[str] = []
    with pytest.raises(ConfigError, match="operator-1, its Lease was renewed 3s ago"):
        await unblock(world.kube, await seen(world), operators, force=False, tell=said.append)
    assert FINALIZER in world.resource["metadata"]["finalizers"]
    await unblock(world.kube, await seen(world), operators, force=True, tell=said.append)
    assert world.resource["metadata"]["finalizers"] == ["other.dev/keep"]
    await unblock(world.kube, await seen(world), (), force=False, tell=said.append)
    assert "others hold it: other.dev/keep" in said[-1]


async def test_unblock_of_what_is_not_being_deleted_is_refused():
    world = await running()
    with pytest.raises(ConfigError, match="is not being deleted; ask for that first"):
        await unblock(world.kube, await seen(world), (), force=True, tell=lambda _: None)


async def test_leases_are_looked_for_where_they_may_be_read():
    world = await deleted()
    world.kube.put(lease(world, 3), "operator")

    def forbidden(call: Any) -> None:
        if call.verb == "list" and call.kind.endswith("Lease"):
            raise ClusterRefused("leases is forbidden", code=403)

    world.kube.before = forbidden
    found = await live_operators(world.kube, ["kimistack", NAMESPACE], world.now_s)
    assert found == (Holder("kimistack", "operator-1", 3.0),)
    assert await live_operators(world.kube, [NAMESPACE], world.now_s) == ()


async def test_a_busy_server_is_no_missing_deployment():
    world = await running()

    def down(call: Any) -> None:
        raise ClusterBusy("the API server cannot be reached")

    world.kube.before = down
    with pytest.raises(ClusterBusy):
        await the_deployment(world.kube, NAMESPACE, "nano")


KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: here
clusters: [{name: c, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: u, user: {token: t}}]
contexts:
- {name: here, context: {cluster: c, user: u, namespace: llm}}
- {name: there, context: {cluster: c, user: u}}
"""


def test_the_namespace_is_the_flags_then_the_contexts(tmp_path: Any):
    file = tmp_path / "config"
    file.write_text(KUBECONFIG)
    assert Access(str(file)).where() == "llm"
    assert Access(str(file), "there").where() == "default"
    assert Access(str(file), namespace="other").where() == "other"
    assert Access(f"{tmp_path}/none:{file}").where() == "llm"
    with pytest.raises(ConfigError, match="no context elsewhere; there are: here, there"):
        Access(str(file), "elsewhere").where()
    with pytest.raises(ConfigError, match="there is no kubeconfig at"):
        Access(str(tmp_path / "none")).where()


def test_a_refusal_names_the_right_and_the_cluster_that_is_not_there(tmp_path: Any):
    file = tmp_path / "config"
    file.write_text(KUBECONFIG)

    async def refused(kube: Any, namespace: str) -> None:
        raise ClusterRefused("403: user u cannot list resource pods", code=403)

    with pytest.raises(ClusterRefused, match="cannot list resource pods; ask for that right"):
        Access(str(file)).run(refused)

    async def asked(kube: Any, namespace: str) -> None:
        await kube.get(ObjectKey("v1", "Pod", namespace, "any"))

    with pytest.raises(ClusterBusy, match="the API server cannot be reached"):
        Access(str(file)).run(asked)
