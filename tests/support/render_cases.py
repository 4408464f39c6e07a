"""Deployments whose rendered objects are kept in tests/goldens/operator.

`python tests/support/render_cases.py` (with operator, runtime and tests/support on the path) writes
them anew; the difference is then reviewed like any other.
"""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kimi_operator.api.deployment import KimiDeployment
from kimi_operator.api.load import validated
from kimi_operator.desired.render import Rendered, rendered
from kimi_operator.observed import K8S_1_20, K8S_CURRENT, Capabilities

GOLDENS = Path(__file__).parent.parent / "goldens" / "operator"
UID = "0f7c6a52-6a5e-4c0b-9d2c-3d1b7f1e2a90"
Spec = dict[str, Any]

MULTUS = {
    "mode": "multus",
    "resource": "amd.com/vnic",
    "networks": ["default/amd-host-device-nad"],
    "gidIndex": 1,
    "trafficClass": 104,
}
HOST_MODEL = {"source": "hostPath", "path": "/models/Kimi-K2.6-MXFP4"}
QUEUE = [{"type": "QueueDepth", "target": 8}]
K26 = "kimi-k2.6-mxfp4/mi355x"


@dataclass(frozen=True)
class Case:
    """A deployment and the server it is rendered for."""

    name: str
    spec: Spec
    capabilities: Capabilities = K8S_CURRENT
    annotations: dict[str, str] = field(default_factory=dict)

    @property
    def deployment(self) -> KimiDeployment:
        """The resource as the API server would hand it out."""
        metadata = {"name": "kimi", "namespace": "llm", "uid": UID, "annotations": self.annotations}
        return deployment(self.spec, metadata)


def deployment(spec: Spec, metadata: dict[str, Any] | None = None) -> KimiDeployment:
    """A KimiDeployment called kimi."""
    document = {
        "apiVersion": "kimistack.dev/v1alpha1",
        "kind": "KimiDeployment",
        "metadata": metadata or {"name": "kimi", "namespace": "llm", "uid": UID},
        "spec": spec,
    }
    return validated(document, "kimi.yaml")


def _external(render: str, **scaling: Any) -> Spec:
    scaling = {"mode": "External", "min": 1, "max": 4, "metrics": QUEUE} | scaling
    return {"scaling": {**scaling, "external": {"render": render}}}


CASES = (
    Case("nano", {"preset": "kimi-nano/cpu"}),
    Case("nano-1.20", {"preset": "kimi-nano/cpu"}, K8S_1_20),
    Case(
        "nano-tls",
        {
            "preset": "kimi-nano/cpu",
            "prefill": {},
            "decode": {},
            "kvPool": {"dram": "128MiB"},
            "security": {"tlsSecretName": "pool-tls"},
        },
    ),
    Case("nano-shm", {"preset": "kimi-nano/cpu", "transfer": {"backend": "shm"}}),
    Case(
        "nano-verbs-host-network",
        {
            "preset": "kimi-nano/cpu",
            "prefill": {},
            "decode": {"replicas": 2, "placement": {"spread": "host"}},
            "transfer": {"backend": "verbs", "hostMemory": True},
            "rdma": {
                "mode": "hostNetwork",
                "devices": ["rdma0", "rdma1"],
                "gidIndex": 3,
                "trafficClass": 104,
                "queuePairs": 8,
            },
            "security": {"profile": "RDMA"},
        },
    ),
    Case(
        "k26-multus",
        {
            "preset": K26,
            "model": HOST_MODEL,
            "decode": {"replicas": 2, "placement": {"spread": "host"}},
            "kvPool": {
                "ssd": {"path": "/mnt/nvme/kimi", "capacity": "4TiB", "writeRate": "500MB/s"},
                "evacuation": "2m",
                "numaNodes": [0, 1],
                "tenants": {"batch": {"weight": 0.5, "quota": "64GiB"}},
                "tenantDefault": {"quota": "256GiB"},
            },
            "rdma": MULTUS,
            "router": {"apiKeysSecretRef": {"name": "kimi-api-keys", "key": "keys"}},
            "security": {"profile": "RDMA"},
        },
    ),
    Case(
        "k26-sglang-multus-1.20",
        {
            "preset": K26,
            "engine": "sglang",
            "image": "lmsysorg/sglang-rocm@sha256:" + "1" * 64,
            "model": HOST_MODEL,
            "decode": _external("hpa"),
            "rdma": MULTUS,
            "security": {"profile": "RDMA"},
        },
        K8S_1_20,
    ),
    Case(
        "k26-sglang-nodes-device-plugin",
        {
            "engine": "sglang",
            "image": "lmsysorg/sglang-rocm@sha256:" + "1" * 64,
            "model": {"id": "amd/Kimi-K2.6-MXFP4", **HOST_MODEL},
            "prefill": {
                "parallelism": {"tp": 16, "dp": 16, "dpAttention": True, "ep": 16, "nodes": 2},
                "placement": {"spread": "rail", "topologyKey": "example.com/rail-group"},
            },
            "decode": {"parallelism": {"tp": 8}},
            "rdma": {"mode": "devicePlugin", "resource": "rdma/hca", "devices": ["rdma0", "rdma1"]},
            "security": {"profile": "RDMA"},
        },
    ),
    Case(
        "k26-vllm-host-network",
        {
            "preset": K26,
            "engine": "vllm",
            "image": "vllm/vllm-openai-rocm@sha256:" + "2" * 64,
            "model": HOST_MODEL,
            "rdma": {"mode": "hostNetwork", "gidIndex": 3},
            "security": {"profile": "RDMA"},
        },
    ),
    Case(
        "k26-vllm-mooncake-host-device",
        {
            "preset": K26,
            "engine": "vllm",
            "image": "vllm/vllm-openai-rocm@sha256:" + "2" * 64,
            "model": HOST_MODEL,
            "transfer": {"backend": "mooncake"},
            "rdma": {"mode": "hostDevice", "hostProviderLib": "/usr/lib/libionic.so.1"},
            "security": {"profile": "Privileged"},
        },
    ),
    Case(
        "k26-atom-multus",
        {
            "preset": K26,
            "engine": "atom",
            "image": "rocm/atom@sha256:" + "3" * 64,
            "model": HOST_MODEL,
            "rdma": MULTUS,
            "security": {"profile": "RDMA"},
        },
    ),
    Case(
        "k3-hf-keda",
        {
            "preset": "kimi-k3/mi355x",
            "model": {
                "revision": "0123456789abcdef",
                "cache": {"pvc": "weights"},
                "checksum": "sha256:" + "a" * 64,
                "tokenSecretRef": {"name": "hub", "key": "token"},
            },
            "decode": _external("keda", min=0),
        },
        annotations={"kimistack.dev/prometheus": "http://prometheus.monitoring:9090"},
    ),
    Case(
        "k31-pro-oci-dra",
        {
            "preset": "kimi-k3.1-pro/mi355x",
            "model": {"source": "oci", "image": "registry.example/k3.1-pro:1"},
            "decode": {
                "gpu": {"dra": {"selectors": ["device.attributes['gpu.amd.com'].vram > 280"]}},
                "scaling": {"mode": "Managed", "min": 1, "max": 3, "targets": {"ttft": "2s"}},
                "podTemplate": {"spec": {"priorityClassName": "serving"}},
            },
        },
    ),
)


def golden(result: Rendered) -> str:
    """The objects as YAML; what a ControllerRevision and a dashboard hold is in others, shortened.

    The tests that need the whole of those look at the objects.
    """
    shown = copy.deepcopy(list(result.manifests))
    for manifest in shown:
        if manifest["kind"] == "ControllerRevision":
            manifest["data"] = {"name": manifest["data"]["name"], "templates": "..."}
        if manifest["metadata"]["name"].endswith("-dashboard"):
            manifest["data"] = dict.fromkeys(manifest["data"], "...")
        for name in manifest.get("data", {}) if manifest["kind"] == "ConfigMap" else {}:
            if name.endswith(".py"):
                manifest["data"][name] = "..."
    notes = [{"leftOut": one.what, "reason": one.reason} for one in result.left_out]
    notes += [{"obstacle": one.reason, "message": one.message} for one in result.obstacles]
    documents = [*shown, *([{"notes": notes}] if notes else [])]
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=100)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        del data
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def render_case(case: Case) -> Rendered:
    """The objects of a case."""
    return rendered(case.deployment, case.capabilities)


def write_goldens() -> None:
    """Write every golden anew, and remove those of no case."""
    GOLDENS.mkdir(parents=True, exist_ok=True)
    wanted = {f"{case.name}.yaml": golden(render_case(case)) for case in CASES}
    for old in GOLDENS.glob("*.yaml"):
        if old.name not in wanted:
            old.unlink()
    for name, text in wanted.items():
        (GOLDENS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_goldens()
