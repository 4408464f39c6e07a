"""What routers say, made up; and the pods that say it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kimi_operator.cache import Key
from kimi_operator.heard import Answer, Heard, router_pods
from kimi_operator.observed import Manifest, ObjectKey
from kimi_runtime.spec.signals import RouterSignals, Spread, WorkerSignal, fleet_signals
from kimi_runtime.spec.worker import Role


def router_pod(
    name: str = "r-0", on: str = "b", address: str = "10.0.0.9", port: int = 8000
) -> Manifest:
    """A router's pod of the deployment `llm/nano`."""
    labels = {
        "app.kubernetes.io/component": "router",
        "app.kubernetes.io/managed-by": "kimi-operator",
        "kimistack.dev/deployment": "nano",
    }
    ports = [{"name": "http", "containerPort": port}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "llm", "uid": f"uid-{name}", "labels": labels},
        "spec": {"nodeName": on, "containers": [{"name": "router", "ports": ports}]},
        "status": {"podIP": address, "phase": "Running"},
    }


def word(*workers: WorkerSignal, known_for_s: float = 1e4, **more: Any) -> RouterSignals:
    """A router's document."""
    told = RouterSignals(
        router="r",
        uptime_s=known_for_s,
        known_for_s=known_for_s,
        window_s=60.0,
        in_flight=0,
        **({"ttft": Spread(), "itl": Spread(), "hand_off": Spread()} | more),
        workers=workers,
    )
    return told.model_copy(update={"fleet": fleet_signals([told])})


def worker(name: str, role: Role = Role.DECODE, **changes: Any) -> WorkerSignal:
    """A worker that is well and idle, but for the changes."""
    fields: dict[str, Any] = {
        "ready": True,
        "draining": False,
        "silent_s": 0.1,
        "in_flight": 0,
        "waiting": 0,
        "queued_tokens": 0,
        "free_blocks": 100,
        "total_blocks": 100,
    }
    return WorkerSignal(name=name, role=role, **(fields | changes))


def answer(pod: Manifest, told: RouterSignals, age_s: float = 0.5) -> Answer:
    """That document, from that pod."""
    (found,) = router_pods({ObjectKey.of(pod): pod})
    return Answer(found, told, age_s)


@dataclass
class Words:
    """Routers that say what a test wants; as `Loads` of a reconciler."""

    told: dict[str, RouterSignals] = field(default_factory=dict)
    watched_s: float = 1e6
    gone: dict[str, float] = field(default_factory=dict)

    def read(self, key: Key, children: Mapping[ObjectKey, Manifest]) -> Heard:
        """See `Loads`: the routers' pods that are in the cluster say their words."""
        del key
        answers = [
            Answer(pod, self.told[pod.name], 0.5)
            for pod in router_pods(children)
            if pod.name in self.told
        ]
        return Heard(tuple(answers), dict(self.gone), self.watched_s)
