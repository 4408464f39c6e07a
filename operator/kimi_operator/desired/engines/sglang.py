"""SGLang on ROCm."""

from kimi_operator.desired.engines.base import (
    DIST_PORT,
    HTTP_PORT,
    Launch,
    Seat,
    adapter_paths,
    command_line,
    var,
)

RESERVED = frozenset(
    {"config", "dp", "dp-size", "data-parallel-size", "enable-dp-attention", "ep", "ep-size"}
    | {"expert-parallel-size", "model", "model-path", "nnodes", "node-rank", "pp", "pp-size"}
    | {"pipeline-parallel-size", "tensor-parallel-size", "tp", "tp-size", "dist-init-addr"}
    | {"disaggregation-mode", "disaggregation-transfer-backend", "disaggregation-bootstrap-port"}
    | {"disaggregation-ib-device", "context-length", "lora-paths", "enable-lora", "nccl-init-addr"}
)
_JOIN = (
    'i="${POD_NAME%-*}"; exec "$@" --node-rank "${POD_NAME##*-}" '
    '--dist-init-addr "$i-0.$i.$POD_NAMESPACE.svc:$KIMISTACK_DIST_PORT"'
)
"""The rank is the pod's ordinal; the first pod of the instance is where the others meet."""


def launch(seat: Seat) -> Launch:
    """`sglang.launch_server`; on several nodes, rank and meeting point come from the pod's name."""
    p, spec = seat.role.parallelism, seat.spec
    ports = {"http": HTTP_PORT}
    flags = ["python3", "-m", "sglang.launch_server", "--model-path", seat.model]
    flags += ["--served-model-name", seat.served_name]
    flags += ["--host", "0.0.0.0", "--port", var("http"), "--tp-size", str(p.tp)]
    if p.pp > 1:
        flags += ["--pp-size", str(p.pp)]
    if p.dp > 1:
        flags += ["--dp-size", str(p.dp)]
    if p.dp_attention:
        flags += ["--enable-dp-attention"]
    if p.ep is not None:
        flags += ["--ep-size", str(p.ep)]
    if spec.limits.max_context_tokens is not None:
        flags += ["--context-length", str(spec.limits.max_context_tokens)]
    if spec.adapters:
        flags += ["--enable-lora", "--lora-paths", *adapter_paths(spec.adapters)]
    if seat.disaggregated:
        flags += ["--disaggregation-mode", seat.role_name]
        flags += ["--disaggregation-transfer-backend", spec.transfer.backend or "mori"]
        if spec.rdma.devices:
            flags += ["--disaggregation-ib-device", ",".join(spec.rdma.devices)]
        if seat.role_name == "prefill":
            ports["bootstrap"] = spec.transfer.ports.bootstrap
            flags += ["--disaggregation-bootstrap-port", var("bootstrap")]
    if p.nodes > 1:
        ports["dist"] = DIST_PORT
        flags += ["--nnodes", str(p.nodes)]
    experts = [["--moe-a2a-backend", "mori"]] if p.ep is not None else []
    argv = command_line(seat, flags, reserved=RESERVED, yielding=experts)
    if p.nodes > 1:
        argv = ("/bin/sh", "-c", _JOIN, "sglang", *argv)
    return Launch(argv, ready="/health", alive="/health", ports=ports, env=_env(seat))


def _env(seat: Seat) -> dict[str, str]:
    env = {
        "HOST_IP": "$(POD_IP)",
        "SGLANG_HEALTH_CHECK_TIMEOUT": "600",
        "SGLANG_HOST_IP": "$(POD_IP)",
        "SGLANG_USE_AITER": "1",
    }
    if seat.disaggregated:
        env["SGLANG_DISAGGREGATION_WAITING_TIMEOUT"] = "1800"
        if seat.spec.transfer.backend == "mori":
            env |= {"SGLANG_MORI_NUM_WORKERS": "4", "SGLANG_MORI_QP_PER_TRANSFER": "4"}
        # SGLang's connectors are set by variables
        env |= dict(seat.spec.transfer.extra or {})
    if seat.role.parallelism.ep is not None:
        env["RCCL_MSCCL_ENABLE"] = "0"
    return env
