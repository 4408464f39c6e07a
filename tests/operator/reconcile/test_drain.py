"""A drain ends when nothing is in flight any more, and the instance that costs least goes."""

import pytest

from operator_world import World, nano
from router_words import Words, router_pod, word, worker


def pod_of(world, role, index):
    return next(
        pod["metadata"]["name"]
        for pod in world.kube.of_kind("Pod")
        if pod["metadata"]["labels"].get("kimistack.dev/role") == role
        and pod["metadata"]["labels"].get("kimistack.dev/instance") == str(index)
    )


def sets(world, role="decode"):
    return {
        obj["metadata"]["labels"]["kimistack.dev/instance"]
        for obj in world.kube.of_kind("StatefulSet")
        if obj["metadata"]["labels"]["kimistack.dev/role"] == role
        and "deletionTimestamp" not in obj["metadata"]
    }


def marked(world):
    return {
        pod["metadata"]["name"]
        for pod in world.kube.of_kind("Pod")
        if pod["metadata"]["labels"].get("kimistack.dev/draining") == "true"
    }


@pytest.fixture
async def world():
    """One prefill and three decode instances, and a router that says what they do."""
    world = World()
    world.create(
        nano(decode={"replicas": 3, "drain": {"timeout": "10m", "preStop": "5s"}}),
    )
    world.words = Words()
    world.reconciler.loads = world.words
    await world.settle()
    world.kube.put(router_pod("nano-router-1", on="node-2"), "deployment-controller")
    return world


def say(world, *in_flight, cached=(0, 0, 0)):
    workers = [
        worker(pod_of(world, "decode", n), in_flight=count, cached_tokens=cached[n])
        for n, count in enumerate(in_flight)
        if str(n) in sets(world)
    ]
    world.words.told["nano-router-1"] = word(*workers)


async def passed(world, seconds):
    world.now_s += seconds
    await world.passes()
    world.controllers.settle()
    await world.passes()


async def test_the_instance_with_the_least_in_flight_goes_and_the_drain_waits_for_its_requests(
    world,
):
    say(world, 5, 2, 7)
    world.edit(decode={"replicas": 2})
    await passed(world, 1)
    assert marked(world) == {pod_of(world, "decode", 1)}
    for _ in range(20):
        say(world, 5, 1, 7)
        await passed(world, 10)
        assert sets(world) == {"0", "1", "2"}
    say(world, 5, 0, 7)
    await passed(world, 1)
    assert sets(world) == {"0", "2"}


async def test_of_equally_busy_instances_the_coldest_goes(world):
    say(world, 0, 0, 0, cached=(9000, 400, 100))
    world.edit(decode={"replicas": 2})
    await passed(world, 1)
    assert marked(world) == {pod_of(world, "decode", 2)}


async def test_an_idle_instance_goes_as_soon_as_routers_have_left_it(world):
    say(world, 5, 0, 7)
    world.edit(decode={"replicas": 2})
    await passed(world, 1)
    await passed(world, 3)
    assert sets(world) == {"0", "1", "2"}
    await passed(world, 3)
    assert sets(world) == {"0", "2"}


async def test_a_drain_ends_at_its_deadline_at_the_latest(world):
    say(world, 5, 2, 7)
    world.edit(decode={"replicas": 2})
    await passed(world, 1)
    await passed(world, 590)
    assert sets(world) == {"0", "1", "2"}
    await passed(world, 30)
    assert sets(world) == {"0", "2"}
