"""An operator over `FakeKube`, pass by pass, with a clock that only the test moves."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml

from fakekube import Controllers, FakeKube
from kimi_operator.cache import Cache, Key
from kimi_operator.decide import Decider
from kimi_operator.kinds import watched_kinds
from kimi_operator.metrics import Metrics
from kimi_operator.observed import Manifest, ObjectKey
from kimi_operator.reconcile import Reconciler

NAMESPACE = "llm"
KEY = Key(NAMESPACE, "nano")
NANO = """
apiVersion: kimistack.dev/v1alpha1
kind: KimiDeployment
metadata: {name: nano, namespace: llm}
spec:
  engine: kimistack
  preset: kimi-nano/cpu
  prefill: {replicas: 1}
  decode: {replicas: 1}
"""
NODE: Manifest = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {"name": "node-1"},
    "status": {
        "allocatable": {"cpu": "16", "memory": "64Gi", "pods": "110", "amd.com/gpu": "8"},
        "conditions": [{"type": "Ready", "status": "True"}],
    },
}
MOST_PASSES = 60


def nano(**spec: Any) -> Manifest:
    """The deployment above, with fields of the spec laid over it."""
    document: Manifest = yaml.safe_load(NANO)
    for name, value in spec.items():
        below = document["spec"].get(name)
        merged = (
            {**below, **value} if isinstance(below, dict) and isinstance(value, dict) else value
        )
        document["spec"][name] = merged
    return document


@dataclass
class World:
    """A cluster and the operator in it."""

    kube: FakeKube = field(default_factory=FakeKube)
    now_s: float = 1_900_000_000.0
    reconciler: Reconciler = field(init=False)
    metrics: Metrics = field(default_factory=Metrics)

    def __post_init__(self) -> None:
        self.controllers = Controllers(self.kube)
        if not self.kube.of_kind("Node"):
            self.kube.put(NODE, "kubelet")
        self.restart()

    def restart(self) -> None:
        """A new process: it knows what the cluster tells, and nothing else."""
        self.kube.unsubscribe_all()
        cache = Cache()
        watched = {kind.kind for kind in watched_kinds(self.kube.served)} | {"KimiDeployment"}
        self.kube.subscribe(
            lambda change, obj: cache.saw(change, obj) if obj["kind"] in watched else None
        )
        self.reconciler = Reconciler(
            self.kube, cache, self.kube.served, Decider(), self.metrics, lambda: self.now_s
        )

    def create(self, document: Manifest) -> Manifest:
        """What `kubectl apply` does for a new resource."""
        return self.kube.put(copy.deepcopy(document), "kubectl")

    @property
    def resource(self) -> Manifest:
        """The KimiDeployment."""
        return self.kube.objects[KEY.object]

    @property
    def conditions(self) -> dict[str, tuple[str, str]]:
        """Status and reason by type."""
        found = self.resource.get("status", {}).get("conditions", [])
        return {c["type"]: (c["status"], c["reason"]) for c in found}

    def edit(self, **spec: Any) -> None:
        """A user's merge patch of the spec."""
        self.kube.edit(KEY.object, {"spec": spec}, "kubectl-edit")

    async def passes(self, count: int = 1) -> None:
        """Passes with nothing in between."""
        for _ in range(count):
            await self.reconciler.run_pass(KEY)

    async def settle(self, *, until: Callable[[], bool] | None = None) -> int:
        """Passes and controllers in turn until neither changes anything; how many passes."""
        for count in range(1, MOST_PASSES + 1):
            before = self.kube.version
            wait_s = await self.reconciler.run_pass(KEY)
            self.controllers.settle()
            if until is not None and until():
                return count
            if self.kube.version == before and self.reconciler.cache.deployment(KEY):
                if wait_s is None or wait_s >= 300:
                    return count
                self.now_s += wait_s
            self.now_s += 1
        raise AssertionError(f"still writing after {MOST_PASSES} passes: {self.kube.writes[-20:]}")

    def child(self, kind: str, name: str) -> Manifest | None:
        """A child by kind and name."""
        return next((o for o in self.kube.of_kind(kind) if o["metadata"]["name"] == name), None)

    def shape(self) -> dict[ObjectKey, Any]:
        """Everything but pods, Events and the resource, without what differs between two runs."""
        return {
            key: _stable(obj)
            for key, obj in sorted(self.kube.objects.items())
            if key.kind not in ("Event", "KimiDeployment", "Pod")
        }


def _stable(obj: Manifest) -> Any:
    metadata = obj["metadata"]
    kept = {
        "labels": dict(metadata.get("labels", {})),
        "owned": bool(metadata.get("ownerReferences")),
    }
    kept["labels"].pop("kimistack.dev/owner-uid", None)
    drawn = ("data", "stringData") if obj["kind"] == "Secret" else ()
    body = {k: v for k, v in obj.items() if k not in ("metadata", "status", *drawn)}
    text = json.dumps([body, kept], sort_keys=True)
    uid = metadata.get("ownerReferences", [{}])[0].get("uid", "")
    return text.replace(uid, "UID") if uid else text
