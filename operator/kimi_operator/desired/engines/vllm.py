"""vLLM on ROCm."""

import json
from typing import Any

from kimi_operator.desired.engines.base import (
    HTTP_PORT,
    Launch,
    Seat,
    adapter_paths,
    command_line,
    one_node,
    var,
)
from kimi_runtime.errors import ConfigError

RESERVED = frozenset(
    {"config", "data-parallel-size", "dp", "enable-expert-parallel", "kv-transfer-config"}
    | {"max-model-len", "model", "nnodes", "node-rank", "pipeline-parallel-size", "pp", "tp"}
    | {
        "tensor-parallel-size",
        "data-parallel-address",
        "enable-lora",
        "lora-modules",
        "master-addr",
    }
)
_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def launch(seat: Seat) -> Launch:
    """`vllm serve`. ConfigError for several nodes and for attention that is data-parallel."""
    one_node(seat)
    p, spec = seat.role.parallelism, seat.spec
    if p.dp_attention:
        raise ConfigError(
            f"spec.{seat.role_name}.parallelism.dpAttention: vllm splits attention by tp or serves "
            "dp whole copies of it; set dp without dpAttention"
        )
    ports = {"http": HTTP_PORT}
    flags = ["vllm", "serve", seat.model, "--served-model-name", seat.served_name]
    flags += ["--host", "0.0.0.0", "--port", var("http"), "--tensor-parallel-size", str(p.tp)]
    if p.pp > 1:
        flags += ["--pipeline-parallel-size", str(p.pp)]
    if p.dp > 1:
        flags += ["--data-parallel-size", str(p.dp)]
    if p.ep is not None:
        flags += ["--enable-expert-parallel"]
    if spec.limits.max_context_tokens is not None:
        flags += ["--max-model-len", str(spec.limits.max_context_tokens)]
    if spec.adapters:
        flags += ["--enable-lora", "--lora-modules", *adapter_paths(spec.adapters)]
    if seat.disaggregated:
        flags += _hand_off(seat, ports)
    kind = "mori_high_throughput" if seat.role_name == "prefill" else "mori_low_latency"
    experts = [["--all2all-backend", kind]] if p.ep is not None else []
    argv = command_line(seat, flags, reserved=RESERVED, yielding=experts)
    return Launch(argv, ready="/health", alive="/health", ports=ports, env=_env(seat))


def _hand_off(seat: Seat, ports: dict[str, int]) -> list[str]:
    transfer = seat.spec.transfer
    config: dict[str, Any] = {"kv_role": _KV_ROLES[seat.role_name]}
    extra: dict[str, Any] = {}
    more = []
    if transfer.backend == "mooncake":
        config = {"kv_connector": "MooncakeConnector", **config}
        ports["bootstrap"] = transfer.ports.bootstrap
        # without it the bootstrap address is 0.0.0.0 and requests hang until they time out
        more = ["--data-parallel-address", "$(POD_IP)"]
    else:
        config = {"kv_connector": "MoRIIOConnector", **config}
        ports |= {"handshake": transfer.ports.handshake, "notify": transfer.ports.notify}
        extra = {
            "http_port": var("http"),
            "handshake_port": var("handshake"),
            "notify_port": var("notify"),
            "read_mode": transfer.mode == "read",
        }
    extra |= dict(transfer.extra or {})
    if extra:
        config["kv_connector_extra_config"] = extra
    return [*more, "--kv-transfer-config", json.dumps(config, separators=(",", ":"))]


def _env(seat: Seat) -> dict[str, str]:
    env = {
        # without it every process derives other cache keys
        "PYTHONHASHSEED": "0",
        "VLLM_CACHE_ROOT": "/var/cache/engine/vllm",
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": "3600",
        "VLLM_HOST_IP": "$(POD_IP)",
        "VLLM_ROCM_USE_AITER": "1",
    }
    if seat.disaggregated and seat.spec.transfer.backend == "mooncake":
        env["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = var("bootstrap")
    elif seat.disaggregated:
        # both legs must agree
        env["VLLM_MORIIO_CONNECTOR_READ_MODE"] = "1" if seat.spec.transfer.mode == "read" else "0"
    return env
