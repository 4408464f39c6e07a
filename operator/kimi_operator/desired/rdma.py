"""How the pods of a role reach RDMA network cards: the five modes, the same on both legs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.api.rdma import Rdma
from kimi_operator.api.roles import Role
from kimi_operator.observed import Manifest

NETWORKS_ANNOTATION = "k8s.v1.cni.cncf.io/networks"
DEVICES_DIR = "/dev/infiniband"
ON_HOST_NETWORK = ("hostNetwork", "devicePlugin", "hostDevice")
"""A pod's own network has no route to the rails, whoever hands it the verbs devices."""


@dataclass(frozen=True)
class Wiring:
    """What RDMA adds to a pod."""

    annotations: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    volumes: tuple[Manifest, ...] = ()
    mounts: tuple[Manifest, ...] = ()
    host_network: bool = False
    devices: bool = False


def wiring(spec: DeploymentSpec, role: Role) -> Wiring:
    """The wiring of a role's pods."""
    rdma = spec.rdma
    if rdma.mode == "none":
        return Wiring()
    cards = rdma.per_pod or max(role.gpus_per_pod, 1)
    # with the resource, the device plugin hands the devices over
    mounted = rdma.mode == "hostDevice" or (rdma.mode == "hostNetwork" and rdma.resource is None)
    volumes: list[Manifest] = []
    mounts: list[Manifest] = []
    if mounted:
        volumes.append({"name": "infiniband", "hostPath": {"path": DEVICES_DIR}})
        mounts.append({"name": "infiniband", "mountPath": DEVICES_DIR})
    if rdma.host_provider_lib is not None:
        path = rdma.host_provider_lib
        volumes.append({"name": "rdma-provider", "hostPath": {"path": path, "type": "File"}})
        mounts.append({"name": "rdma-provider", "mountPath": path, "readOnly": True})
    return Wiring(
        annotations=_networks(rdma, cards) if rdma.mode == "multus" else {},
        resources={rdma.resource: str(cards)} if rdma.resource and not mounted else {},
        env=_env(spec),
        volumes=tuple(volumes),
        mounts=tuple(mounts),
        host_network=rdma.mode in ON_HOST_NETWORK,
        devices=True,
    )


def _networks(rdma: Rdma, cards: int) -> dict[str, str]:
    """One attachment per card: the networks in rail order, or the only one for every card."""
    names = rdma.networks if len(rdma.networks) > 1 else rdma.networks * cards
    attachments = []
    for index, full in enumerate(names, 1):
        namespace, _, name = full.rpartition("/")
        where = {"namespace": namespace} if namespace else {}
        attachments.append({"name": name, **where, "interface": f"net{index}"})
    return {NETWORKS_ANNOTATION: json.dumps(attachments, separators=(",", ":"))}


def _env(spec: DeploymentSpec) -> dict[str, str]:
    """Variables of the libraries that open the cards; collectives use NCCL's with every engine."""
    rdma, backend = spec.rdma, spec.transfer.backend
    env = {"RDMAV_FORK_SAFE": "1"}
    devices = ",".join(rdma.devices)
    if devices:
        env["NCCL_IB_HCA"] = devices
    if rdma.gid_index is not None:
        env["NCCL_IB_GID_INDEX"] = str(rdma.gid_index)
    if rdma.traffic_class is not None:
        env["NCCL_IB_TC"] = str(rdma.traffic_class)
    if rdma.service_level is not None:
        env["NCCL_IB_SL"] = str(rdma.service_level)
    if backend == "mori":
        env |= _mori(rdma, devices)
    if backend == "mooncake":
        env["MC_DISABLE_HIP_TRANSPORT"] = "1"
        if rdma.gid_index is not None:
            env["MC_GID_INDEX"] = str(rdma.gid_index)
    return env


def _mori(rdma: Rdma, devices: str) -> dict[str, str]:
    env = {
        "MORI_IO_QP_MAX_CQE": "32768",
        "MORI_IO_QP_MAX_SEND_WR": "16384",
        "MORI_IO_SQ_BACKOFF_TIMEOUT_US": "50000",
        "MORI_SHMEM_MODE": "ISOLATION",
    }
    chosen = {
        "MORI_ENABLE_DMABUF_REG": "1" if rdma.dmabuf else None,
        "MORI_IB_GID_INDEX": rdma.gid_index,
        "MORI_RDMA_DEVICES": devices or None,
        "MORI_RDMA_SL": rdma.service_level,
        "MORI_RDMA_TC": rdma.traffic_class,
    }
    return env | {name: str(value) for name, value in chosen.items() if value is not None}
