"""A child that one apply cannot put right: replaced, explained, or left alone for a while."""

from base64 import b64encode

import pytest

from fakekube import Call
from kimi_operator.observed import Manifest, ObjectKey
from kimi_operator.repairs import FREE_REPAIRS
from kimi_runtime.errors import ClusterBusy, ClusterError, ClusterRefused
from operator_world import KEY, World, nano

pytestmark = pytest.mark.asyncio


async def settled() -> World:
    world = World()
    world.create(nano())
    await world.settle()
    return world


def refusing_changes_of(world: World, at: ObjectKey) -> None:
    """As a server that holds a field of that object to be immutable."""

    def refuse(call: Call) -> None:
        if (call.verb, call.kind, call.name) == ("apply", at.kind, at.name) and (
            at in world.kube.objects
        ):
            raise ClusterRefused("the API server answers 422: field is immutable", code=422)

    world.kube.before = refuse


def meddled(world: World, at: ObjectKey) -> None:
    """Somebody else changes what we set."""
    labels = {"app.kubernetes.io/component": "meddled"}
    world.kube.edit(at, {"metadata": {"labels": labels}}, "rival")


def condition(world: World, kind: str) -> Manifest:
    found: Manifest = next(c for c in world.resource["status"]["conditions"] if c["type"] == kind)
    return found


async def test_a_child_that_may_not_change_and_holds_nothing_is_made_anew():
    world = await settled()
    at = next(key for key in world.kube.objects if key.kind == "NetworkPolicy")
    old = world.kube.objects[at]["metadata"]["uid"]
    refusing_changes_of(world, at)
    meddled(world, at)
    await world.settle()
    assert world.kube.objects[at]["metadata"]["uid"] != old
    assert world.conditions["Ready"][0] == "True"


async def test_a_workload_that_may_not_change_stalls_with_what_to_do_and_no_hot_loop():
    world = await settled()
    at = next(key for key in world.kube.objects if key.kind == "Deployment")
    old = world.kube.objects[at]["metadata"]["uid"]
    refusing_changes_of(world, at)
    world.kube.edit(
        at, {"spec": {"replicas": None, "selector": {"matchLabels": {"a": "b"}}}}, "rival"
    )
    await world.passes()
    stalled = condition(world, "Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "ImmutableField")
    assert f"kubectl -n llm delete deployment {at.name}" in stalled["message"]
    wait_s = await world.reconciler.run_pass(KEY)
    assert (wait_s or 0) >= 60
    assert world.kube.objects[at]["metadata"]["uid"] == old
    world.kube.remove(at)
    await world.settle()
    assert world.conditions["Ready"][0] == "True"


async def test_who_keeps_changing_a_field_of_ours_is_named_and_not_fought_for_ever():
    world = await settled()
    at = next(key for key in world.kube.objects if key.kind == "NetworkPolicy")
    before = len(world.kube.writes)
    for _ in range(4 * FREE_REPAIRS):
        meddled(world, at)
        await world.passes()
        world.now_s += 1
    applies = [c for c in world.kube.writes[before:] if (c.verb, c.name) == ("apply", at.name)]
    assert len(applies) == FREE_REPAIRS
    degraded = condition(world, "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "FieldConflict")
    assert degraded["message"].startswith(f"FieldConflict: rival keeps changing fields of {at}")
    world.now_s += 100
    await world.settle()
    assert condition(world, "Degraded")["status"] == "False"


@pytest.mark.parametrize("error", [ClusterRefused, ClusterBusy])
async def test_a_refusal_that_quotes_the_call_key_gives_it_away_to_nobody(
    error: type[ClusterError],
):
    world = World()
    world.create(nano())
    call_key = "c0ffee" * 10
    world.reconciler.new_key = lambda: call_key
    quoted = b64encode(f"{call_key}\n".encode()).decode()

    def quoting(call: Call) -> None:
        if call.kind == "Secret":
            raise error(f"a webhook denies {call_key} and {quoted}", code=422)

    world.kube.before = quoting
    try:
        await world.passes()
        told = str(world.resource["status"])
    except ClusterBusy as exc:
        told = str(exc)
    assert "a webhook denies (the call key) and (the call key)" in told
