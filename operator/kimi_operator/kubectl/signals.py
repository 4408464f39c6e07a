"""What the routers of a deployment say of its load, read by way of the API server."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pydantic import ValidationError

from kimi_operator.changes import is_owned
from kimi_operator.desired.labels import COMPONENT_LABEL
from kimi_operator.instances import LoadReport
from kimi_operator.kube import Kube
from kimi_operator.kubectl.sight import Sight
from kimi_operator.observed import Manifest, ObjectKey
from kimi_runtime.errors import ClusterError
from kimi_runtime.spec.signals import RouterSignals, WorkerSignal, workers_of

PATH = "signals"


@dataclass(frozen=True)
class Heard:
    """`silent` has, by pod, why a router was not heard."""

    routers: tuple[RouterSignals, ...] = ()
    silent: tuple[tuple[str, str], ...] = ()

    @property
    def workers(self) -> dict[str, WorkerSignal]:
        """By name, which is that of an instance's first pod."""
        return workers_of(self.routers)


def routers_of(children: Mapping[ObjectKey, Manifest]) -> list[tuple[ObjectKey, int]]:
    """The running router pods, each with its HTTP port."""
    found = []
    for key, child in sorted(children.items()):
        labels = child["metadata"].get("labels") or {}
        if key.kind != "Pod" or labels.get(COMPONENT_LABEL) != "router":
            continue
        if child.get("status", {}).get("phase") == "Running":
            found.append((key, _port(child)))
    return found


def _port(pod: Manifest) -> int:
    for container in pod["spec"].get("containers", ()):
        for port in container.get("ports") or ():
            if port.get("name") == "http":
                return int(port["containerPort"])
    return 8000


async def heard(kube: Kube, sight: Sight) -> Heard:
    """What every running router says; one that does not answer is named, no error."""
    routers, silent = [], []
    for key, port in routers_of(sight.children):
        try:
            answer = await kube.proxied(key.namespace, key.name, port, PATH)
            routers.append(RouterSignals.model_validate(answer))
        except ValidationError:
            silent.append((key.name, "what it answers is not of this version"))
        except ClusterError as exc:
            silent.append((key.name, str(exc)))
    return Heard(tuple(routers), tuple(silent))


def with_loads(sight: Sight, known: Heard) -> Sight:
    """The sight with what is in flight on each instance, where a router knows it."""
    loads = {
        name: LoadReport(worker.in_flight, worker.cached_tokens)
        for name, worker in known.workers.items()
        if worker.in_flight is not None
    }
    return replace(sight, loads=loads)


def pods_of(sight: Sight, stateful_set: Manifest) -> list[Manifest]:
    """The pods of an instance, in the order of their ranks."""
    uid = stateful_set["metadata"]["uid"]
    found = [
        child for at, child in sight.children.items() if at.kind == "Pod" and is_owned(child, uid)
    ]
    return sorted(found, key=lambda pod: _ordinal(pod["metadata"]["name"]))


def _ordinal(name: str) -> tuple[int, str]:
    tail = name.rpartition("-")[2]
    return (int(tail) if tail.isdigit() else 0, name)
