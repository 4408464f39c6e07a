"""Our own engine: one process that starts from a WorkerSpec."""

from pathlib import PurePosixPath

from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.desired.engines.base import HTTP_PORT, Launch, Seat
from kimi_operator.desired.spec_files import spec_file
from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.transfer import RdmaCard, TransferNetwork
from kimi_runtime.spec.worker import (
    EngineLimits,
    FileWeights,
    PackagedWeights,
    RandomWeights,
    Weights,
    WorkerSpec,
)
from kimi_runtime.spec.worker import Role as WorkerRole

WORKER_FILE = "worker.json"
CONFIG_DIR = "/etc/kimistack"
CALL_KEY_FILE = "/etc/kimistack-keys/call-key"
POOL_SOCKET = "umbp.sock"
POOL_ARENA = "umbp.arena"
LEASE_S = 30.0
"""Routers ask five times a second, so that a worker which hears of none for so long has none."""
DEFAULT_KV_BYTES = 2**30
"""Where neither the spec nor a preset says: enough for any small model, and visibly small."""


def launch(seat: Seat) -> Launch:
    """`kimistack worker`, its name, addresses, ports and revision from the environment."""
    worker = worker_spec(seat)
    ports = {"http": HTTP_PORT}
    env = {
        "KIMISTACK_NAME": "$(POD_NAME)",
        "KIMISTACK_HOST": "$(POD_IP)",
        "KIMISTACK_NODE": "$(NODE_NAME)",
        "KIMISTACK_REVISION": "$(POD_REVISION)",
    }
    if worker.crosses_hosts:
        ports["transfer"] = worker.network.port
        env["KIMISTACK_TRANSFER_ADDRESS"] = "$(POD_IP)"
    # a transfer within one host has no network, and says nothing of it
    unused = frozenset() if worker.crosses_hosts else {"network"}
    return Launch(
        argv=("kimistack", "worker", "--spec", f"{CONFIG_DIR}/{WORKER_FILE}"),
        ready="/readyz",
        alive="/healthz",
        ports=ports,
        env=env,
        files={WORKER_FILE: spec_file(worker, without=unused)},
        lease_s=worker.lease,
    )


def worker_spec(seat: Seat) -> WorkerSpec:
    """The file of the role's pods; name, addresses, ports and revision are overridden per pod.

    Raises ConfigError where the port of hand-offs is the engine's own.
    """
    spec, role = seat.spec, seat.role
    if spec.transfer.ports.transfer == HTTP_PORT:
        raise ConfigError(
            f"spec.transfer.ports.transfer: {HTTP_PORT} is the engine's own port; use another"
        )
    run_dir = PurePosixPath(seat.run_dir)
    data = {
        "name": seat.role_name,
        "role": WorkerRole(seat.role_name) if seat.disaggregated else WorkerRole.BOTH,
        "host": "0.0.0.0",
        "port": HTTP_PORT,
        "weights": _weights(seat),
        "vocabulary": seat.vocabulary,
        "limits": EngineLimits(
            block_tokens=spec.limits.block_tokens,
            kv_bytes=role.limits.kv_memory or DEFAULT_KV_BYTES,
            max_running=role.limits.max_running,
            max_waiting=role.limits.max_waiting,
            step_tokens=role.limits.step_tokens,
            max_context_tokens=spec.limits.max_context_tokens,
        ),
        "threads": role.limits.threads,
        "run_dir": str(run_dir),
        "call_key": CALL_KEY_FILE,
        "umbp_socket": str(run_dir / POOL_SOCKET) if seat.uses_pool else None,
        # a worker for both roles hands nothing over
        "transfer": spec.transfer.backend if seat.disaggregated else "loopback",
        "network": transfer_network(spec),
        "drain": role.drain.timeout,
        "lease": LEASE_S,
        "log_level": spec.observability.log_level,
    }
    if seat.disaggregated and spec.transfer.host_memory:
        data["host_memory"] = True
    return WorkerSpec.model_validate(data)


def transfer_network(spec: DeploymentSpec) -> TransferNetwork:
    """How the deployment's workers meet across hosts; the port is that of a pod's own network."""
    rdma = spec.rdma
    return TransferNetwork(
        port=spec.transfer.ports.transfer,
        streams=spec.transfer.streams,
        rdma=RdmaCard(
            devices=rdma.devices,
            port=rdma.port,
            gid_index=rdma.gid_index,
            traffic_class=rdma.traffic_class or 0,
            service_level=rdma.service_level or 0,
            pkey_index=rdma.pkey_index,
            queue_pairs=rdma.queue_pairs,
        ),
    )


def _weights(seat: Seat) -> Weights:
    model = seat.spec.model
    if model.source == "packaged":
        return PackagedWeights()
    if model.source == "random":
        data = {"config": model.config, "seed": model.seed or 0}
        return RandomWeights.model_validate(data)
    return FileWeights.model_validate({"path": seat.model})
