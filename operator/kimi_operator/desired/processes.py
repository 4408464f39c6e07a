"""A deployment as processes of one machine: the files each of them starts from."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.api.roles import Role, RoleName
from kimi_operator.desired.effective import Effective
from kimi_operator.desired.engines.kimistack import transfer_network
from kimi_operator.desired.fit import known_model
from kimi_operator.desired.policy import explain_of, policy_of, session_admission_of
from kimi_operator.desired.pool_files import granted, has_peers, ssd_log
from kimi_runtime.errors import CapacityError, ConfigError
from kimi_runtime.spec.router import (
    PoolEndpoint,
    RecordSpec,
    RouterSpec,
    WorkerEndpoint,
)
from kimi_runtime.spec.sizes import weight_bytes
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.spec.worker import (
    EngineLimits,
    FileWeights,
    PackagedWeights,
    RandomWeights,
    TransferName,
    Weights,
    WorkerSpec,
)
from kimi_runtime.spec.worker import Role as WorkerRole

Kind = Literal["umbp", "worker", "router"]
LOCAL_HOST = "127.0.0.1"
PROCESS_BYTES = 600 * 2**20
"""Resident size of a worker before weights and KV, measured with torch's CPU build."""
ROUTER = "router-0"


@dataclass(frozen=True)
class Places:
    """What the machine contributes: folders, ports by process name, the router's front."""

    run_dir: Path
    call_key: Path
    ports: Mapping[str, int]
    host: str = LOCAL_HOST
    api_keys: Path | None = None
    vocabulary: Path | None = None
    explain: Path | None = None
    record: Path | None = None
    """Where a router that has reasons writes them."""
    nodes: int = 1
    """Pools, each with its part of the workers: as if on so many nodes."""


@dataclass(frozen=True)
class Machine:
    """What there is to use, in bytes: memory, and the shared memory file system within it."""

    memory_bytes: int
    shm_bytes: int
    shm_path: str


@dataclass(frozen=True)
class ProcessPlan:
    """One process: its spec, where it listens, how long it may take to start and to stop."""

    name: str
    kind: Kind
    role: str
    spec: WorkerSpec | UmbpSpec | RouterSpec
    host: str
    port: int
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class LocalPlan:
    """All processes of a deployment, in the order they start; they stop in the reverse."""

    name: str
    model: str
    processes: tuple[ProcessPlan, ...]

    @property
    def router(self) -> ProcessPlan:
        """The front door."""
        return next(process for process in self.processes if process.kind == "router")


def process_names(spec: DeploymentSpec, nodes: int = 1) -> tuple[str, ...]:
    """Names of a deployment's processes, in starting order."""
    return (*_pools(spec, nodes), *(name for name, _, _ in _workers(spec)), ROUTER)


def plan_processes(effective: Effective, places: Places, machine: Machine) -> LocalPlan:
    """The processes of an effective deployment on this machine.

    Raises ConfigError for what processes of one machine cannot do, CapacityError if they do not fit
    its memory.
    """
    spec = effective.deployment.spec
    _check_can_run_here(spec, places)
    _check_memory(spec, places.nodes, machine)
    served = spec.model.served_name or effective.deployment.name
    names = _pools(spec, places.nodes)
    pools = [_pool(spec, name, names, places) for name in names]
    workers = []
    for role_name, role in spec.roles():
        for index in range(role.least_replicas):
            # each role over all nodes, as in a cluster
            node = names[index % len(names)] if names else None
            name = f"{role_name}-{index}"
            workers.append(_worker(spec, name, role_name, role, node, places))
    router = _router(spec, effective, served, pools, workers, places)
    return LocalPlan(effective.deployment.name, served, (*pools, *workers, router))


def _pools(spec: DeploymentSpec, nodes: int) -> tuple[str, ...]:
    return tuple(f"umbp-{index}" for index in range(nodes)) if spec.kv_pool.enabled else ()


def _workers(spec: DeploymentSpec) -> Iterator[tuple[str, RoleName, Role]]:
    for role_name, role in spec.roles():
        for index in range(role.least_replicas):
            yield f"{role_name}-{index}", role_name, role


def _check_can_run_here(spec: DeploymentSpec, places: Places) -> None:
    if places.nodes > 1 and not spec.kv_pool.enabled:
        raise ConfigError("--nodes: nodes differ by their pools, and spec.kvPool.enabled is false")
    problems = {
        "engine": spec.engine != "kimistack" and f"{spec.engine} is not started here",
        "model.source": spec.model.source not in ("local", "hostPath", "packaged", "random")
        and f"{spec.model.source} needs a cluster; download the model and use local",
        "kvPool.dram": spec.kv_pool.enabled
        and spec.kv_pool.dram is None
        and "is needed, e.g. 128MiB",
        "router.apiKeysSecretRef": spec.router.api_keys_secret_ref is not None
        and places.api_keys is None
        and "there are no Secrets here; give the keys with --api-key-file",
    }
    for name, role in spec.roles():
        problems[f"{name}.parallelism"] = role.parallelism.gpus > 1 and (
            f"a worker started here is one process, this takes {role.parallelism.gpus}"
        )
        problems[f"{name}.limits.kvMemory"] = (
            role.limits.kv_memory is None and "is needed, e.g. 256MiB"
        )
        problems[f"{name}.replicas"] = role.least_replicas == 0 and "at least 1 is needed here"
    for field, problem in problems.items():
        if problem:
            raise ConfigError(f"spec.{field}: {problem}")


def _check_memory(spec: DeploymentSpec, nodes: int, machine: Machine) -> None:
    workers = [role for _, _, role in _workers(spec)]
    pool = len(_pools(spec, nodes)) * (spec.kv_pool.dram or 0)
    kv = sum(role.limits.kv_memory or 0 for role in workers)
    model = None if spec.model.config else known_model(spec.model.id)
    weights = (weight_bytes(model) if model else 0) * len(workers)
    parts = (
        f"{_gib(weights)} of weights, {_gib(kv)} of KV, {_gib(pool)} of pool, "
        f"{_gib(PROCESS_BYTES * len(workers))} for {len(workers)} worker processes"
    )
    in_files = _transfer(spec) == "shm" or (spec.prefill and spec.transfer.host_memory)
    shared_kv = kv if in_files else 0
    fix = "lower kvPool.dram, limits.kvMemory or replicas, or use a larger machine"
    total = weights + kv + pool + PROCESS_BYTES * len(workers)
    if total > machine.memory_bytes:
        raise CapacityError(
            "the deployment",
            need=f"{_gib(total)} ({parts})",
            have=f"{_gib(machine.memory_bytes)} available",
            where="this machine's memory",
            fix=fix,
        )
    if shared_kv + pool > machine.shm_bytes:
        raise CapacityError(
            "KV that processes share",
            need=f"{_gib(shared_kv + pool)} ({_gib(shared_kv)} of KV, {_gib(pool)} of pool)",
            have=f"{_gib(machine.shm_bytes)} free",
            where=machine.shm_path,
            fix=f"{fix}; or name a larger memory file system in KIMISTACK_SHM",
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _pool(spec: DeploymentSpec, name: str, names: Sequence[str], places: Places) -> ProcessPlan:
    ssd, alone = spec.kv_pool.ssd, len(names) == 1
    pool = UmbpSpec.model_validate(
        {
            "name": name,
            "host": LOCAL_HOST,
            "port": places.ports[name],
            "socket": places.run_dir / f"{name}.sock",
            "arena": places.run_dir / f"{name}.arena",
            "dram_bytes": spec.kv_pool.dram,
            "page_bytes": spec.kv_pool.page,
            # each has a log of its own
            "ssd": ssd and ssd_log(spec, ssd.path if alone else f"{ssd.path}/{name}"),
            "ssd_write_rate": ssd and ssd.write_rate,
            "call_key": places.call_key,
            "peers": () if alone or not has_peers(spec) else [_at(one, places) for one in names],
            **granted(spec.kv_pool),
            "log_level": spec.observability.log_level,
        }
    )
    return ProcessPlan(name, "umbp", "pool", pool, LOCAL_HOST, pool.port, 60.0, 10.0)


def _at(pool: str, places: Places) -> PoolEndpoint:
    return PoolEndpoint(name=pool, url=f"http://{LOCAL_HOST}:{places.ports[pool]}")


def _worker(
    spec: DeploymentSpec,
    name: str,
    role_name: RoleName,
    role: Role,
    node: str | None,
    places: Places,
) -> ProcessPlan:
    uses_pool = node is not None and role_name in spec.kv_pool.roles
    worker_role = WorkerRole(role_name) if spec.prefill is not None else WorkerRole.BOTH
    worker = WorkerSpec(
        name=name,
        role=worker_role,
        host=LOCAL_HOST,
        port=places.ports[name],
        weights=_weights(spec),
        vocabulary=places.vocabulary,
        limits=EngineLimits(
            block_tokens=spec.limits.block_tokens,
            kv_bytes=role.limits.kv_memory or 0,
            max_running=role.limits.max_running,
            max_waiting=role.limits.max_waiting,
            step_tokens=role.limits.step_tokens,
            max_context_tokens=spec.limits.max_context_tokens,
        ),
        threads=role.limits.threads,
        run_dir=places.run_dir,
        call_key=places.call_key,
        umbp_socket=places.run_dir / f"{node}.sock" if uses_pool else None,
        # a node is named by its pool; where there is one alone, it is everybody's
        node=node or "" if places.nodes > 1 else "",
        transfer=_transfer(spec),
        # each listens on a port that is free when it starts, which its tickets name
        network=transfer_network(spec).model_copy(update={"port": 0}),
        host_memory=spec.transfer.host_memory,
        drain=role.drain.timeout,
        log_level=spec.observability.log_level,
    )
    stop_s = role.drain.timeout + 5.0
    start_s = role.probes.startup_timeout
    return ProcessPlan(
        name, "worker", worker_role.value, worker, LOCAL_HOST, worker.port, start_s, stop_s
    )


def _transfer(spec: DeploymentSpec) -> TransferName:
    """How its workers hand KV over; a worker for both roles hands nothing over."""
    if spec.prefill is None:
        return "loopback"
    match spec.transfer.backend:
        case "tcp" | "verbs" as between_hosts:
            return between_hosts
        case _:  # other engines' are refused before
            return "shm"


def _weights(spec: DeploymentSpec) -> Weights:
    if spec.model.source == "packaged":
        return PackagedWeights()
    if spec.model.source == "random":
        config = Path(spec.model.config) if spec.model.config else None
        return RandomWeights(config=config, seed=spec.model.seed or 0)
    return FileWeights(path=Path(spec.model.path or ""))


def _router(
    spec: DeploymentSpec,
    effective: Effective,
    served: str,
    pools: list[ProcessPlan],
    workers: list[ProcessPlan],
    places: Places,
) -> ProcessPlan:
    architecture = effective.preset.architecture if effective.preset else spec.model.id
    model = known_model(architecture)
    router = RouterSpec(
        name=ROUTER,
        host=places.host,
        port=places.ports[ROUTER],
        model_name=served,
        family="k3" if model and model.family in ("k3", "k31") else "k2",
        thinking=spec.router.thinking,
        vocabulary=places.vocabulary,
        workers=tuple(
            WorkerEndpoint(name=p.name, role=WorkerRole(p.role), url=_url(p)) for p in workers
        ),
        pools=tuple(_at(p.name, places) for p in pools),
        policy=policy_of(effective),
        explain=explain_of(spec.router, places.explain) if places.explain else None,
        record=RecordSpec(path=places.record) if places.record else None,
        call_key=places.call_key,
        api_keys=places.api_keys,
        max_body=spec.router.max_body,
        max_in_flight=spec.router.max_in_flight,
        sessions=session_admission_of(spec.router),
        default_max_tokens=spec.router.default_max_tokens,
        request_deadline=spec.router.request_timeout,
        log_level=spec.observability.log_level,
    )
    return ProcessPlan(ROUTER, "router", "router", router, places.host, router.port, 60.0, 10.0)


def _url(process: ProcessPlan) -> str:
    return f"http://{process.host}:{process.port}"
