"""Our own engine: one process that starts from a WorkerSpec."""

from pathlib import PurePosixPath

from kimi_operator.desired.engines.base import HTTP_PORT, Launch, Seat
from kimi_runtime.spec.worker import EngineLimits, FileWeights, RandomWeights, WorkerSpec
from kimi_runtime.spec.worker import Role as WorkerRole

WORKER_FILE = "worker.json"
CONFIG_DIR = "/etc/kimistack"
CALL_KEY_FILE = "/etc/kimistack-keys/call-key"
POOL_SOCKET = "umbp.sock"
POOL_ARENA = "umbp.arena"
DEFAULT_KV_BYTES = 2**30
"""Where neither the spec nor a preset says: enough for any small model, and visibly small."""


def launch(seat: Seat) -> Launch:
    """`kimistack worker`, its name, address, port and revision from the environment."""
    return Launch(
        argv=("kimistack", "worker", "--spec", f"{CONFIG_DIR}/{WORKER_FILE}"),
        ready="/readyz",
        alive="/healthz",
        ports={"http": HTTP_PORT},
        env={
            "KIMISTACK_NAME": "$(POD_NAME)",
            "KIMISTACK_HOST": "$(POD_IP)",
            "KIMISTACK_REVISION": "$(POD_REVISION)",
        },
        files={WORKER_FILE: worker_spec(seat).model_dump_json(indent=2) + "\n"},
    )


def worker_spec(seat: Seat) -> WorkerSpec:
    """The file of the role's pods; name, host, port and revision are overridden per pod."""
    spec, role = seat.spec, seat.role
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
        "drain": role.drain.timeout,
        "log_level": spec.observability.log_level,
    }
    return WorkerSpec.model_validate(data)


def _weights(seat: Seat) -> RandomWeights | FileWeights:
    model = seat.spec.model
    if model.source == "random":
        data = {"config": model.config, "seed": model.seed or 0}
        return RandomWeights.model_validate(data)
    return FileWeights.model_validate({"path": seat.model})
