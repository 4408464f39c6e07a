"""ATOM."""

import json
from typing import Any

from kimi_operator.desired.engines.base import (
    HTTP_PORT,
    Launch,
    Seat,
    command_line,
    one_node,
    var,
)
from kimi_runtime.errors import ConfigError

RESERVED = frozenset(
    {"config", "data-parallel-size", "enable-dp-attention", "enable-expert-parallel", "host"}
    | {"kv-transfer-config", "max-model-len", "model", "port", "server-port"}
    | {"tensor-parallel-size", "tp"}
)
_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
_CONNECTORS = {"mori": "moriio", "mooncake": "mooncake"}


def launch(seat: Seat) -> Launch:
    """`atom.entrypoints.openai_server`. ConfigError for what ATOM cannot do."""
    one_node(seat)
    p, spec = seat.role.parallelism, seat.spec
    if spec.adapters:
        raise ConfigError("spec.adapters: engine atom serves no LoRA adapters")
    if p.pp > 1 or (p.dp > 1 and not p.dp_attention):
        raise ConfigError(
            f"spec.{seat.role_name}.parallelism: engine atom splits a model by tp, with attention "
            "data-parallel by dpAttention, not by pp or dp"
        )
    ports = {"http": HTTP_PORT}
    flags = ["python3", "-m", "atom.entrypoints.openai_server", "--model", seat.model]
    flags += ["--host", "0.0.0.0", "--server-port", var("http")]
    flags += ["--tensor-parallel-size", str(p.tp)]
    if p.dp_attention:
        flags += ["--enable-dp-attention"]
    if p.dp_attention or p.ep is not None:
        flags += ["--enable-expert-parallel"]
    if spec.limits.max_context_tokens is not None:
        flags += ["--max-model-len", str(spec.limits.max_context_tokens)]
    plain: list[list[str]] = []
    if seat.disaggregated:
        ports["handshake"] = spec.transfer.ports.handshake
        flags += ["--kv-transfer-config", _hand_off(seat)]
        plain = [["--no-enable_prefix_caching"]]
    argv = command_line(seat, flags, reserved=RESERVED, yielding=plain)
    env = {"AITER_QUICK_REDUCE_QUANTIZATION": "INT4", "ATOM_HOST_IP": "$(POD_IP)"}
    return Launch(argv, ready="/health", alive="/health", ports=ports, env=env)


def _hand_off(seat: Seat) -> str:
    config: dict[str, Any] = {
        "kv_role": _KV_ROLES[seat.role_name],
        "kv_connector": _CONNECTORS[seat.spec.transfer.backend or "mori"],
        "proxy_ip": "$(POD_IP)",
        **dict(seat.spec.transfer.extra or {}),
    }
    # these two are numbers, which JSON writes without the quotes a variable would need
    numbers = f'"handshake_port":{var("handshake")},"http_port":{var("http")}'
    return json.dumps(config, separators=(",", ":"))[:-1] + f",{numbers}}}"
