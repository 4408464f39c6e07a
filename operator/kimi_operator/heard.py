"""What the routers of a deployment say, as decisions read it. Pure.

A router's answer is as old as it is: what it says of a worker's load holds for a moment, what it
says of a worker's silence is a fact about the past.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kimi_operator.instances import LoadReport
from kimi_operator.observed import (
    DEPLOYMENT_LABEL,
    DRAINING_LABEL,
    INSTANCE_LABEL,
    Manifest,
    ObjectKey,
    Signals,
)
from kimi_runtime.spec.signals import RouterSignals, fleet_signals, workers_of

COMPONENT_LABEL = "app.kubernetes.io/component"
LOADS_FOR_S = 75.0
"""Beyond two polls of a quiet deployment nothing is known of what its workers do."""
DRAIN_LOADS_FOR_S = 5.0
"""A drain ends by what is in flight now."""
SILENT_S = 10.0
"""A worker that no router has heard of for so long may be on a lost node."""


@dataclass(frozen=True)
class RouterPod:
    """A router's pod, and where its document is."""

    name: str
    uid: str
    node: str
    url: str


@dataclass(frozen=True)
class Answer:
    """A router's document, `age_s` ago."""

    pod: RouterPod
    told: RouterSignals
    age_s: float


@dataclass(frozen=True)
class Heard:
    """All that is known of a deployment's routers.

    `watched_s`: for how long this operator has followed them; `gone` has, by node, how long ago
    the last router there was seen. Nothing is known of one that went before that.
    """

    answers: tuple[Answer, ...] = ()
    gone: Mapping[str, float] = field(default_factory=dict)
    watched_s: float = 0.0

    def loads(self, children: Mapping[ObjectKey, Manifest]) -> dict[str, LoadReport]:
        """Load reports by pod name, where they are recent enough."""
        draining = draining_pods(children)
        known = workers_of(a.told for a in self.answers if a.age_s <= LOADS_FOR_S)
        fresh = workers_of(a.told for a in self.answers if a.age_s <= DRAIN_LOADS_FOR_S)
        found = {}
        for name in known:
            worker = fresh.get(name) if name in draining else known[name]
            if worker is not None and worker.in_flight is not None:
                found[name] = LoadReport(worker.in_flight, worker.cached_tokens)
        return found

    def signals(self, unix_s: float) -> Signals:
        """The signals of all routers that were heard of lately; `unix_s` is the time of now."""
        recent = [answer for answer in self.answers if answer.age_s <= LOADS_FOR_S]
        if not recent:
            return Signals()
        fleet = fleet_signals([answer.told for answer in recent])
        return Signals(
            queue_s=fleet.queue_s,
            ttft_p95_s=fleet.ttft_p95_s,
            itl_p95_s=fleet.itl_p95_s,
            kv_use=fleet.kv_use,
            transfer_backlog_s=fleet.transfer_backlog_s,
            waiting_requests=fleet.waiting_requests,
            waiting_tokens=fleet.waiting_tokens,
            # a router that says nothing may have all the load: the oldest word counts
            at_s=unix_s - max(answer.age_s for answer in recent),
        )

    def silent(self) -> frozenset[str]:
        """Workers that every router that speaks has not heard of for a while."""
        names = {one.name for answer in self.answers for one in answer.told.workers}
        return frozenset(
            name
            for name in names
            if all(answer.told.silent_s(name) + answer.age_s > SILENT_S for answer in self.answers)
        )


@dataclass(frozen=True)
class News:
    """Of what the routers say, what a pass would decide by."""

    idle_drains: frozenset[str] = frozenset()
    asked_at_zero: bool = False
    silent: frozenset[str] = frozenset()
    speaking: bool = False
    """Whether the planner has signals; False where none counts by them."""

    def adds_to(self, before: "News") -> bool:
        """Whether there is something to do by it that there was not before."""
        asked = self.asked_at_zero and not before.asked_at_zero
        more = (self.idle_drains - before.idle_drains) or (self.silent - before.silent)
        return asked or bool(more) or self.speaking != before.speaking


def news_of(heard: Heard, children: Mapping[ObjectKey, Manifest]) -> News:
    """The news in what was heard."""
    loads = heard.loads(children)
    idle = {n for n in draining_pods(children) if n in loads and not loads[n].in_flight}
    waiting = any(
        a.told.fleet.waiting_requests for a in heard.answers if a.age_s <= DRAIN_LOADS_FOR_S
    )
    return News(
        idle_drains=frozenset(idle),
        asked_at_zero=waiting and not has_instances(children),
        silent=heard.silent() & worker_pods(children),
        speaking=is_scaled(children) and any(a.age_s <= LOADS_FOR_S for a in heard.answers),
    )


def outline(children: Mapping[ObjectKey, Manifest]) -> dict[ObjectKey, Manifest]:
    """Of the children, the small part that the functions of this module read."""
    return {
        key: {
            "metadata": {name: child["metadata"].get(name) for name in ("name", "uid", "labels")},
            **(_pod_outline(child) if key.kind == "Pod" else {}),
        }
        for key, child in children.items()
        if key.kind in ("Pod", "StatefulSet", "KimiWorkers")
    }


def _pod_outline(pod: Manifest) -> Manifest:
    spec, status = pod["spec"], pod.get("status") or {}
    ports = [{"ports": container.get("ports")} for container in spec.get("containers") or ()]
    return {
        "spec": {"nodeName": spec.get("nodeName"), "containers": ports},
        "status": {"podIP": status.get("podIP"), "phase": status.get("phase")},
    }


def router_pods(children: Mapping[ObjectKey, Manifest]) -> tuple[RouterPod, ...]:
    """The router's pods that have an address."""
    found = []
    for key, pod in sorted(children.items()):
        metadata, status = pod["metadata"], pod.get("status") or {}
        labels = metadata.get("labels") or {}
        if key.kind != "Pod" or labels.get(COMPONENT_LABEL) != "router":
            continue
        address, port = status.get("podIP"), _port(pod)
        if not address or port is None or status.get("phase") in ("Failed", "Succeeded"):
            continue
        host = f"[{address}]" if ":" in address else address
        found.append(
            RouterPod(
                name=metadata["name"],
                uid=metadata["uid"],
                node=pod["spec"].get("nodeName") or "",
                url=f"http://{host}:{port}",
            )
        )
    return tuple(found)


def _port(pod: Manifest) -> int | None:
    for container in pod["spec"].get("containers") or ():
        for port in container.get("ports") or ():
            if port.get("name") == "http":
                return int(port["containerPort"])
    return None


def worker_pods(children: Mapping[ObjectKey, Manifest]) -> frozenset[str]:
    """Names of the pods of instances."""
    return frozenset(
        key.name
        for key, child in children.items()
        if key.kind == "Pod" and INSTANCE_LABEL in (child["metadata"].get("labels") or {})
    )


def draining_pods(children: Mapping[ObjectKey, Manifest]) -> frozenset[str]:
    """Names of the pods whose drain was asked for."""
    return frozenset(
        key.name
        for key, child in children.items()
        if key.kind == "Pod"
        and (child["metadata"].get("labels") or {}).get(DRAINING_LABEL) == "true"
    )


def has_instances(children: Mapping[ObjectKey, Manifest]) -> bool:
    """Whether any instance is there or comes."""
    return any(
        key.kind == "StatefulSet" and DEPLOYMENT_LABEL in (child["metadata"].get("labels") or {})
        for key, child in children.items()
    )


def is_scaled(children: Mapping[ObjectKey, Manifest]) -> bool:
    """Whether somebody but the spec writes counts: only such deployments have KimiWorkers."""
    return any(key.kind == "KimiWorkers" for key in children)
