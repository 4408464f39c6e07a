"""Routers are made to read their list of workers when it changes, and only then."""

import copy
import json

from kimi_operator.desired.router import FLEET_FILE
from kimi_operator.fleet_marks import FLEET_ANNOTATION
from operator_world import NAMESPACE, World, nano


def routers(world):
    pods = world.kube.of_kind("Pod")
    return [
        pod for pod in pods if pod["metadata"]["labels"]["app.kubernetes.io/component"] == "router"
    ]


def marks(world):
    return {
        (pod["metadata"].get("annotations") or {}).get(FLEET_ANNOTATION) for pod in routers(world)
    }


def workers_listed(world):
    (text,) = [
        config["data"][FLEET_FILE]
        for config in world.kube.of_kind("ConfigMap")
        if FLEET_FILE in config["data"]
    ]
    return {worker["name"] for worker in json.loads(text)["workers"]}


async def settled():
    """Serving, with two router pods as their Deployment makes them."""
    world = World()
    world.create(nano())
    await world.settle()
    (router,) = world.kube.of_kind("Deployment")
    for number in range(2):
        metadata = {
            **copy.deepcopy(router["spec"]["template"]["metadata"]),
            "name": f"nano-router-{number}",
            "namespace": NAMESPACE,
        }
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": []}}
        world.kube.put(pod, "controller-manager")
    await world.settle()
    return world


async def test_every_routers_pod_names_the_list_that_was_written_last():
    world = await settled()
    first = marks(world)
    assert len(routers(world)) == 2
    assert len(first) == 1
    assert first != {None}
    listed = workers_listed(world)
    world.edit(decode={"replicas": 2})
    await world.settle()
    assert workers_listed(world) > listed
    assert len(marks(world)) == 1
    assert marks(world) != first


async def test_a_list_that_stays_costs_no_write():
    world = await settled()
    world.kube.calls.clear()
    await world.passes(3)
    assert world.kube.writes == []
