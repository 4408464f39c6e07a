"""The operator killed after every single write; an API server that fails: same end."""

import pytest

from fakekube import Call, Faults, Killed, KilledAfter, Snapshots, busy
from kimi_operator.observed import ObjectKey
from kimi_operator.reconcile import NODES_SOON_S
from kimi_operator.stamps import rfc3339
from kimi_operator.teardown import OVERDUE_S
from kimi_runtime.errors import ClusterBusy, ClusterConflict, ClusterError, ClusterRefused
from operator_world import KEY, World, nano

pytestmark = pytest.mark.asyncio


async def undisturbed() -> World:
    world = World()
    world.create(nano())
    await world.settle()
    return world


async def killed_after_each_write_of(world: World) -> int:
    """Let the pass run to its end; then begin anew from after each of its writes. How many."""
    snapshots = Snapshots(world.kube)
    world.kube.after = snapshots
    await world.settle()
    wanted = world.shape()
    for number, kube in enumerate(snapshots.taken, 1):
        revived = World(kube, now_s=world.now_s)
        await revived.settle()
        assert revived.shape() == wanted, f"killed after write {number}"
        assert revived.conditions["Ready"][0] == "True"
    return len(snapshots.taken)


async def test_killed_after_any_write_the_next_start_ends_at_the_same_objects():
    world = World()
    world.create(nano())
    assert await killed_after_each_write_of(world) > 25


async def test_killed_after_any_write_of_a_rollout_it_ends_at_the_new_revision():
    world = await undisturbed()
    world.edit(restartToken="again", decode={"replicas": 2})
    assert await killed_after_each_write_of(world) > 10


async def settled_through(world: World) -> None:
    """Passes as the daemon makes them, failed ones tried again."""
    for _ in range(60):
        before = len(world.kube.writes)
        try:
            await world.reconciler.run_pass(KEY)
        except ClusterError:
            world.now_s += 1
            continue
        world.controllers.settle()
        world.now_s += 1
        if len(world.kube.writes) == before:
            return
    raise AssertionError("it never settled")


@pytest.mark.parametrize(
    "error",
    [
        ClusterConflict("409", code=409),
        busy(429, retry_after_s=1.0),
        busy(500),
        busy(0),
    ],
    ids=["409", "429", "500", "unreachable"],
)
async def test_an_error_at_any_write_changes_nothing_of_the_end(error: ClusterError):
    wanted = (await undisturbed()).shape()
    for number in range(1, 36, 8):
        world = World()
        world.create(nano())
        world.kube.before = Faults({number: error, number + 3: error})
        await settled_through(world)
        assert world.shape() == wanted, f"write {number}"


async def test_a_write_that_was_done_and_whose_answer_was_lost_is_not_done_twice_differently():
    wanted = (await undisturbed()).shape()
    for number in range(1, 32, 6):
        world = World()
        world.create(nano())
        seen = 0

        def lost(call: Call, at: int = number) -> None:
            nonlocal seen
            seen += int(call.writes)
            if call.writes and seen == at:
                raise busy(0)

        world.kube.after = lost
        await settled_through(world)
        assert world.shape() == wanted, f"answer {number}"


async def test_a_refused_child_stalls_with_the_reason_and_does_not_stop_the_others():
    world = World()
    world.create(nano())

    def forbidden(call: Call) -> None:
        if (call.verb, call.kind) == ("apply", "NetworkPolicy"):
            raise ClusterRefused("the API server answers 403: quota", code=403)

    world.kube.before = forbidden
    await world.settle(until=lambda: bool(world.kube.of_kind("Deployment")))
    assert world.conditions["Stalled"] == ("True", "Rejected")
    wait_s = await world.reconciler.run_pass(KEY)
    assert 60 <= (wait_s or 0) <= 300, "tried again, but not hotly"
    world.kube.before = lambda _: None
    await world.settle()
    assert world.conditions["Ready"][0] == "True"


async def test_nodes_that_may_not_be_listed_are_a_condition_only():
    world = World()
    world.create(nano())

    def forbidden(call: Call) -> None:
        if call.kind == "v1/Node":
            raise ClusterRefused("403", code=403)

    world.kube.before = forbidden
    await world.settle()
    assert world.conditions["NodesEligible"] == ("Unknown", "NodesNotReadable")
    assert world.conditions["Ready"][0] == "True"


async def test_an_unreachable_server_is_no_answer_about_what_is_there():
    world = await undisturbed()
    before = world.shape()

    def down(_: Call) -> None:
        raise busy(0)

    world.kube.before = down
    world.edit(decode={"replicas": 2})
    with pytest.raises(ClusterBusy):
        await world.passes()
    world.kube.before = lambda _: None
    assert world.shape() == before


async def test_teardown_takes_the_router_first_and_the_pool_last_and_leaves_nothing():
    world = await undisturbed()
    world.kube.edit(KEY.object, {"metadata": {"finalizers": ["kimistack.dev/teardown"]}})
    world.kube.remove(KEY.object)
    gone: list[str] = []
    world.kube.subscribe(
        lambda change, obj: gone.append(obj["kind"]) if change == "DELETED" else None
    )
    stages: list[str | None] = []
    for _ in range(20):
        stages.append(await world.reconciler.tear_down(KEY))
        world.controllers.settle()
        if stages[-1] is None:
            break
    assert list(dict.fromkeys(stages)) == ["router", "decode", "prefill", "umbp", None]
    workloads = [kind for kind in gone if kind in ("Deployment", "StatefulSet", "DaemonSet")]
    assert workloads == ["Deployment", "StatefulSet", "StatefulSet", "DaemonSet"]
    world.kube.edit(KEY.object, {"metadata": {"finalizers": []}})
    world.controllers.settle()
    left = {key.kind for key in world.kube.objects}
    assert left <= {"Event", "Node"}


@pytest.mark.parametrize(
    "node", ["node-1 is not ready", "node-1 is gone", "nodes are not readable"]
)
@pytest.mark.parametrize("component", ["router", "engine", "umbp"])
async def test_a_teardown_waits_for_no_pod_that_nobody_ends(component: str, node: str):
    world = await undisturbed()
    stay = _without_kubelet(world, component)
    if node == "node-1 is not ready":
        unready = {"conditions": [{"type": "Ready", "status": "Unknown"}]}
        at = ObjectKey("v1", "Node", "", "node-1")
        world.kube.edit(at, {"status": unready}, "kcm", subresource="status")
    elif node == "node-1 is gone":
        world.kube.remove(ObjectKey("v1", "Node", "", "node-1"))
    else:
        world.kube.before = _no_nodes
        world.now_s += OVERDUE_S
    world.now_s += NODES_SOON_S
    world.kube.remove(KEY.object)
    stages: list[str | None] = []
    while None not in stages and len(stages) < 20:
        stages.append(await world.reconciler.tear_down(KEY))
        world.kube.collect_garbage()
    assert list(dict.fromkeys(stages)) == ["router", "decode", "prefill", "umbp", None]
    pods = {pod["metadata"]["name"] for pod in world.kube.of_kind("Pod")}
    assert pods == stay, "only Kubernetes may say that a pod of a lost node is no more"


async def test_a_teardown_waits_for_a_pod_that_is_ending():
    world = await undisturbed()
    _without_kubelet(world, "engine")
    world.kube.remove(KEY.object)
    for _ in range(20):
        stage = await world.reconciler.tear_down(KEY)
        world.kube.collect_garbage()
    assert stage == "decode"


def _without_kubelet(world: World, component: str) -> set[str]:
    """Nobody ends the component's pods, nor the finalizer's resource; the names of the pods."""
    world.kube.edit(KEY.object, {"metadata": {"finalizers": ["kimistack.dev/teardown"]}})
    for kind in ("Deployment", "DaemonSet"):
        for workload in world.kube.of_kind(kind):
            template, name = workload["spec"]["template"], workload["metadata"]["name"]
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": f"{name}-x",
                    "namespace": KEY.namespace,
                    "labels": template["metadata"]["labels"],
                    "ownerReferences": [
                        {
                            "apiVersion": "apps/v1",
                            "kind": kind,
                            "name": name,
                            "uid": workload["metadata"]["uid"],
                        }
                    ],
                },
                "spec": {"nodeName": "node-1", "containers": []},
            }
            world.kube.put(pod, "controller")
    stay = set()
    for pod in world.kube.of_kind("Pod"):
        if pod["metadata"]["labels"]["app.kubernetes.io/component"] == component:
            patch = {"finalizers": ["test/kubelet"], "deletionTimestamp": rfc3339(world.now_s)}
            world.kube.edit(ObjectKey.of(pod), {"metadata": patch}, "kubelet")
            stay.add(pod["metadata"]["name"])
    assert stay
    return stay


def _no_nodes(call: Call) -> None:
    if call.kind == "Node":
        raise ClusterRefused("nodes is forbidden", code=403)


async def test_a_teardown_killed_at_any_write_goes_on():
    for kills in range(1, 5):
        world = await undisturbed()
        world.kube.edit(KEY.object, {"metadata": {"finalizers": ["kimistack.dev/teardown"]}})
        world.kube.remove(KEY.object)
        world.kube.after = KilledAfter(kills)
        stage: str | None = "begun"
        for _ in range(20):
            try:
                stage = await world.reconciler.tear_down(KEY)
            except Killed:
                world.kube.after = lambda _: None
                world.restart()
            world.controllers.settle()
            if stage is None:
                break
        assert stage is None
        workloads = ("DaemonSet", "Deployment", "StatefulSet")
        assert not any(key.kind in workloads for key in world.kube.objects)


async def test_a_namesake_created_after_a_deletion_gets_children_of_its_own():
    world = await undisturbed()
    old = world.resource["metadata"]["uid"]
    world.kube.remove(KEY.object)
    world.controllers.settle()
    world.create(nano())
    await world.settle()
    uid = world.resource["metadata"]["uid"]
    assert uid != old
    router = world.kube.objects[ObjectKey("apps/v1", "Deployment", "llm", "nano-router")]
    assert router["metadata"]["ownerReferences"][0]["uid"] == uid
    assert world.child("Secret", "nano-call-key") is not None
