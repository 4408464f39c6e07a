"""`kubectl kimi top`: what every worker has to do now, as the routers know it. Pure."""

from collections.abc import Iterator

from kimi_operator.instances import instance_id
from kimi_operator.kubectl.report import Told
from kimi_operator.kubectl.sight import Sight
from kimi_operator.kubectl.signals import Heard
from kimi_operator.observed import Manifest
from kimi_runtime.spec.signals import FleetSignals, WorkerSignal, fleet_signals


class WorkerLoad(Told):
    """One worker; None: not known. `kv_use` is the used share of its KV memory, 0 to 1."""

    pod: str
    node: str | None
    role: str
    revision: str | None
    ready: bool
    draining: bool
    in_flight: int | None
    waiting: int | None
    queued_tokens: int | None
    kv_use: float | None
    cached_tokens: int | None
    tokens_per_s: float | None
    silent_s: float | None


class FleetLoad(Told):
    """The whole deployment, over the routers' last minute."""

    queue_s: float | None
    ttft_p90_s: float | None
    itl_p90_s: float | None
    kv_use: float | None
    transfer_backlog_s: float | None
    waiting_requests: int
    routers: int
    parked_requests: int


class TopReport(Told):
    """`silent` names routers that were not heard, and why."""

    namespace: str
    name: str
    fleet: FleetLoad
    workers: tuple[WorkerLoad, ...]
    silent: tuple[str, ...]


def top_of(sight: Sight, known: Heard) -> TopReport:
    """The report of a deployment that is there."""
    assert sight.resource is not None
    metadata = sight.resource["metadata"]
    told = fleet_signals(known.routers)
    return TopReport(
        namespace=metadata["namespace"],
        name=metadata["name"],
        fleet=_fleet(told, known),
        workers=tuple(_workers(sight, known)),
        silent=tuple(f"{pod}: {why}" for pod, why in known.silent),
    )


def _fleet(told: FleetSignals, known: Heard) -> FleetLoad:
    return FleetLoad(
        queue_s=told.queue_s,
        ttft_p90_s=told.ttft_p90_s,
        itl_p90_s=told.itl_p90_s,
        kv_use=told.kv_use,
        transfer_backlog_s=told.transfer_backlog_s,
        waiting_requests=told.waiting_requests,
        routers=len(known.routers),
        parked_requests=sum(router.parked_requests for router in known.routers),
    )


def _workers(sight: Sight, known: Heard) -> Iterator[WorkerLoad]:
    pods = {key.name: child for key, child in sight.children.items() if key.kind == "Pod"}
    for name, worker in sorted(known.workers.items(), key=lambda one: (one[1].role, one[0])):
        if worker.left:
            continue
        yield _worker(worker, pods.get(name))


def _worker(worker: WorkerSignal, pod: Manifest | None) -> WorkerLoad:
    found = instance_id((pod or {}).get("metadata", {}).get("labels") or {})
    total = worker.total_blocks
    free = None if worker.free_blocks is None else min(worker.free_blocks, total or 0)
    return WorkerLoad(
        pod=worker.name,
        node=(pod or {}).get("spec", {}).get("nodeName"),
        role=str(worker.role.value),
        revision=found.revision if found else None,
        ready=worker.ready,
        draining=worker.draining,
        in_flight=worker.in_flight,
        waiting=worker.waiting,
        queued_tokens=worker.queued_tokens,
        kv_use=None if not total or free is None else 1 - free / total,
        cached_tokens=worker.cached_tokens,
        tokens_per_s=worker.tokens_per_s,
        silent_s=worker.silent_s,
    )
