"""For each rule of the API: a spec that breaks it, and the nearest spec that keeps it."""

from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]
RANDOM = {"source": "random"}


@dataclass(frozen=True)
class RuleCase:
    """`says` is part of the message; `cel` False where only Python can tell."""

    says: str
    bad: Spec
    good: Spec
    cel: bool = True


def _model(**model: Any) -> Spec:
    return {"model": model, "decode": {}}


def _decode(**decode: Any) -> Spec:
    return {"model": RANDOM, "decode": decode}


def _part(name: str, **part: Any) -> Spec:
    return {"model": RANDOM, "decode": {}, name: part}


_METRICS = [{"type": "QueueDepth", "target": 8}]
_KEDA = {"mode": "External", "external": {"render": "keda"}, "max": 4}
_SHAPE = {"tp": 4, "pp": 1, "dp": 1, "dpAttention": False, "nodes": 1}
_ENGINE = {"containers": [{"name": "engine", "command": ["sh"]}]}
_SIDE_CAR = {"containers": [{"name": "log", "command": ["sh"]}]}
_NODES = {"prefill": {}, "decode": {}, "model": RANDOM}
_IMAGES = {"model": RANDOM, "decode": {"image": "a"}}
_PVC_ADAPTER = {"name": "a", "source": "pvc", "path": "a"}
_SGLANG = {"engine": "sglang", "model": {"source": "local", "path": "m"}}
_SGLANG_LORA = {**_SGLANG, "decode": {}, "adapters": [{**_PVC_ADAPTER, "claim": "c"}]}

CASES = (
    RuleCase(
        "exactly one of pvc and hostPath",
        _model(source="hf", id="a/b", cache={"pvc": "a", "hostPath": "/b"}),
        _model(source="hf", id="a/b", cache={"pvc": "a"}),
    ),
    RuleCase("hf needs id", _model(source="hf"), _model(source="hf", id="a/b")),
    RuleCase("pvc needs claim", _model(source="pvc"), _model(source="pvc", claim="c")),
    RuleCase(
        "hostPath needs path", _model(source="hostPath"), _model(source="hostPath", path="/m")
    ),
    RuleCase("oci needs image", _model(source="oci"), _model(source="oci", image="i:1")),
    RuleCase("local needs path", _model(source="local"), _model(source="local", path="m")),
    RuleCase(
        "revision goes with",
        _model(source="random", revision="r"),
        _model(source="hf", id="a/b", revision="r"),
    ),
    RuleCase("claim goes with", _model(source="random", claim="c"), _model(source="random")),
    RuleCase("path goes with", _model(source="random", path="p"), _model(source="random")),
    RuleCase("image goes with", _model(source="random", image="p"), _model(source="random")),
    RuleCase("seed goes with", _model(source="local", path="m", seed=1), _model(**RANDOM, seed=1)),
    RuleCase(
        "config goes with",
        _model(source="local", path="m", config="c"),
        _model(**RANDOM, config="c"),
    ),
    RuleCase(
        "tokenSecretRef goes with",
        _model(source="random", tokenSecretRef={"name": "a", "key": "b"}),
        _model(source="hf", id="a/b", tokenSecretRef={"name": "a", "key": "b"}),
    ),
    RuleCase(
        "cache goes with",
        _model(source="random", cache={"pvc": "a"}),
        _model(source="oci", image="i", cache={"pvc": "a"}),
    ),
    RuleCase(
        "checksum goes with",
        _model(source="random", checksum="sha256:" + "0" * 64),
        _model(source="local", path="m", checksum="sha256:" + "0" * 64),
    ),
    RuleCase(
        "path must be absolute for hostPath",
        _model(source="hostPath", path="m"),
        _model(source="hostPath", path="/m"),
    ),
    RuleCase(
        "source pvc needs claim",
        {**_SGLANG, "decode": {}, "adapters": [_PVC_ADAPTER]},
        _SGLANG_LORA,
    ),
    RuleCase(
        "min must not exceed max",
        _decode(scaling={"mode": "Managed", "min": 5, "max": 4}),
        _decode(scaling={"mode": "Managed", "min": 4, "max": 4}),
    ),
    RuleCase(
        "min: 0 is not possible",
        _decode(scaling={"mode": "Static", "min": 0}),
        _decode(scaling={"mode": "Managed", "min": 0, "max": 4}),
    ),
    RuleCase(
        "max is needed",
        _decode(scaling={"mode": "Managed"}),
        _decode(scaling={"mode": "Managed", "max": 1}),
    ),
    RuleCase(
        "external goes with",
        _decode(scaling={"external": {}}),
        _decode(scaling={"mode": "External", "external": {}}),
    ),
    RuleCase(
        "targets goes with",
        _decode(scaling={"targets": {"ttft": "2s"}}),
        _decode(scaling={"mode": "Managed", "max": 2, "targets": {"ttft": "2s"}}),
    ),
    RuleCase(
        "external.render needs metrics",
        _decode(scaling=_KEDA),
        _decode(scaling={**_KEDA, "metrics": _METRICS}),
    ),
    RuleCase(
        "at most one of value and valueFrom",
        _decode(env=[{"name": "A", "value": "1", "valueFrom": {"fieldRef": {}}}]),
        _decode(env=[{"name": "A", "value": "1"}]),
    ),
    RuleCase(
        "never tolerated",
        _decode(placement={"tolerations": [{"key": "amd-dcm", "operator": "Exists"}]}),
        _decode(placement={"tolerations": [{"key": "amd.com/gpu", "operator": "Exists"}]}),
    ),
    RuleCase(
        "never tolerated",
        _decode(placement={"tolerations": [{"operator": "Exists"}]}),
        _decode(placement={"tolerations": []}),
    ),
    RuleCase(
        "spread: rail needs topologyKey",
        _decode(placement={"spread": "rail"}),
        _decode(placement={"spread": "rail", "topologyKey": "rack"}),
    ),
    RuleCase(
        "may take 1h at most",
        _decode(drain={"timeout": "58m56s"}),
        _decode(drain={"timeout": "58m55s"}),
    ),
    RuleCase(
        "may take 1h at most", _decode(drain={"timeout": "1d"}), _decode(drain={"timeout": "0s"})
    ),
    RuleCase(
        "with dpAttention, dp must divide tp",
        _decode(parallelism={"tp": 4, "dp": 3, "dpAttention": True}),
        _decode(parallelism={"tp": 4, "dp": 2, "dpAttention": True}),
    ),
    RuleCase(
        "ep must divide tp x dp",
        _decode(parallelism={"tp": 4, "dp": 1, "ep": 3}),
        _decode(parallelism={"tp": 4, "dp": 1, "ep": 2}),
    ),
    RuleCase(
        "resource or dra, not both",
        _decode(gpu={"resource": "amd.com/gpu", "dra": {}}),
        _decode(gpu={"dra": {}}),
    ),
    RuleCase(
        "replicas has one writer",
        _decode(replicas=2, scaling={"mode": "External"}),
        _decode(scaling={"mode": "External"}),
    ),
    RuleCase(
        "must equal nodes x gpu.perPod",
        {"preset": "p", "decode": {"parallelism": _SHAPE, "gpu": {"perPod": 8}}},
        {"preset": "p", "decode": {"parallelism": {"tp": 4}, "gpu": {"perPod": 8}}},
    ),
    RuleCase(
        "must equal nodes x gpu.perPod",
        _decode(parallelism={"tp": 4}, gpu={"perPod": 8}),
        _decode(parallelism={"tp": 4, "dp": 2}, gpu={"perPod": 8}),
    ),
    RuleCase(
        "must equal nodes x gpu.perPod",
        {**_NODES, "rdma": {"allowTCP": True}, "prefill": {"gpu": {"perPod": 2}}},
        {**_NODES, "rdma": {"allowTCP": True}, "prefill": {"gpu": {"perPod": 1}}},
    ),
    RuleCase(
        "a multiple of nodes",
        _decode(parallelism={"tp": 4, "nodes": 3}),
        _decode(parallelism={"tp": 4, "nodes": 2}),
    ),
    RuleCase(
        "engineArgs may not set",
        {**_SGLANG, "decode": {"engineArgs": ["--tp-size=4"]}},
        {**_SGLANG, "decode": {"engineArgs": ["--page-size=64"]}},
    ),
    RuleCase(
        "may not set the engine's command",
        _decode(podTemplate={"spec": _ENGINE}),
        _decode(podTemplate={"spec": _SIDE_CAR}),
        cel=False,
    ),
    RuleCase(
        "mode multus needs networks",
        {**_part("rdma", mode="multus"), "security": {"profile": "RDMA"}},
        {**_part("rdma", mode="multus", networks=["a/b"]), "security": {"profile": "RDMA"}},
    ),
    RuleCase(
        "devicePlugin needs resource",
        {**_part("rdma", mode="devicePlugin"), "security": {"profile": "RDMA"}},
        {
            **_part("rdma", mode="devicePlugin", resource="rdma/hca"),
            "security": {"profile": "RDMA"},
        },
    ),
    RuleCase(
        "path must be absolute",
        _part("kvPool", ssd={"path": "a", "capacity": "1TiB"}),
        _part("kvPool", ssd={"path": "/a", "capacity": "1TiB"}),
    ),
    RuleCase("roles must name", _part("kvPool", roles=[]), _part("kvPool", roles=["prefill"])),
    RuleCase(
        "page must be a power of two",
        _part("kvPool", page="5000"),
        _part("kvPool", page="8KiB"),
        cel=False,
    ),
    RuleCase(
        "dram must hold at least one page",
        _part("kvPool", dram="128"),
        _part("kvPool", dram="128MiB"),
        cel=False,
    ),
    RuleCase(
        "gateway routes to a Service of type ClusterIP",
        _part("router", gateway={"name": "g"}, service={"type": "NodePort"}),
        _part("router", gateway={"name": "g"}, service={"type": "ClusterIP"}),
    ),
    RuleCase(
        "must not both be 0",
        _part("rollout", maxUnavailable=0),
        _part("rollout", maxUnavailable=0, maxSurge=1),
    ),
    RuleCase(
        "min must not exceed max",
        _part("budget", ratio={"min": "3:4", "max": "2:3"}),
        _part("budget", ratio={"min": "2:3", "max": "3:4"}),
    ),
    RuleCase("write preset or model", {"decode": {}}, {"preset": "p", "decode": {}}),
    RuleCase("model needs source", {"model": {"id": "a"}}, {"preset": "p", "model": {"id": "a"}}),
    RuleCase("prefill needs decode", {"preset": "p", "prefill": {}}, {"preset": "p", "decode": {}}),
    RuleCase(
        "transfer.backend is verbs",
        _part("transfer", backend="mori"),
        {**_part("transfer", backend="mori"), **_SGLANG},
    ),
    RuleCase(
        "transfer.backend is verbs",
        {**_part("transfer", backend="tcp"), **_SGLANG},
        _part("transfer", backend="tcp"),
    ),
    RuleCase("by RDMA", _NODES, {**_NODES, "transfer": {"backend": "shm"}}),
    RuleCase("by RDMA", _NODES, {**_NODES, "rdma": {"allowTCP": True}}),
    RuleCase("by RDMA", _NODES, {**_NODES, "transfer": {"backend": "tcp"}}),
    RuleCase(
        "verbs needs rdma.mode",
        {**_NODES, "transfer": {"backend": "verbs"}, "rdma": {"allowTCP": True}},
        {
            **_NODES,
            "transfer": {"backend": "verbs"},
            "rdma": {"mode": "hostNetwork"},
            "security": {"profile": "RDMA"},
        },
    ),
    RuleCase("different images", _IMAGES, {**_IMAGES, "rollout": {"allowMixedImages": True}}),
    RuleCase(
        "vllm needs the same tp",
        {
            **_SGLANG,
            "engine": "vllm",
            "rdma": {"allowTCP": True},
            "prefill": {"parallelism": {"tp": 4}},
            "decode": {"parallelism": {"tp": 8}},
        },
        {
            **_SGLANG,
            "rdma": {"allowTCP": True},
            "prefill": {"parallelism": {"tp": 4}},
            "decode": {"parallelism": {"tp": 8}},
        },
    ),
    RuleCase(
        "kimistack takes no engineArgs",
        _decode(engineArgs=["--page-size=64"]),
        {**_SGLANG, "decode": {"engineArgs": ["--page-size=64"]}},
    ),
    RuleCase(
        "no LoRA adapters",
        {"model": RANDOM, "decode": {}, "adapters": _SGLANG_LORA["adapters"]},
        _SGLANG_LORA,
    ),
    RuleCase(
        "packaged and random weights are known to engine kimistack",
        {"engine": "sglang", **_decode()},
        _decode(),
    ),
    RuleCase(
        "profile does not cover rdma.mode",
        {**_part("rdma", mode="hostDevice"), "security": {"profile": "RDMA"}},
        {**_part("rdma", mode="hostDevice"), "security": {"profile": "Privileged"}},
    ),
    RuleCase(
        "profile does not cover rdma.mode",
        _part("rdma", mode="hostNetwork"),
        {**_part("rdma", mode="hostNetwork"), "security": {"profile": "RDMA"}},
    ),
    RuleCase(
        "kvPool.numaNodes needs",
        _part("kvPool", numaNodes=[0, 1]),
        {**_part("kvPool", numaNodes=[0, 1]), "security": {"profile": "RDMA"}},
    ),
    RuleCase(
        "HipIpc needs",
        _part("kvPool", gpuAccess="HipIpc"),
        {**_part("kvPool", gpuAccess="HipIpc"), "security": {"profile": "Privileged"}},
    ),
    RuleCase(
        "more GPUs than budget.maxGPUs",
        {**_decode(replicas=3, parallelism={"tp": 4}), "budget": {"maxGPUs": 8}},
        {**_decode(replicas=2, parallelism={"tp": 4}), "budget": {"maxGPUs": 8}},
    ),
    RuleCase(
        "more GPUs than budget.maxGPUs",
        {
            **_decode(parallelism={"tp": 4}, scaling={"mode": "Managed", "min": 3, "max": 4}),
            "budget": {"maxGPUs": 8},
        },
        {
            **_decode(gpu={"perPod": 0}, scaling={"mode": "Managed", "min": 9, "max": 9}),
            "budget": {"maxGPUs": 8},
        },
    ),
)


def document(spec: Spec, name: str = "case") -> dict[str, Any]:
    """A KimiDeployment with this spec."""
    return {
        "apiVersion": "kimistack.dev/v1alpha1",
        "kind": "KimiDeployment",
        "metadata": {"name": name},
        "spec": spec,
    }
