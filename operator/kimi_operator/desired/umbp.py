"""The KV pool's daemon on every node where an engine that uses it may run."""

import json
from collections.abc import Sequence
from pathlib import Path

from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.api.kvpool import KvPool, TenantShare
from kimi_operator.api.roles import Role
from kimi_operator.desired import pods, security
from kimi_operator.desired.effective import Effective
from kimi_operator.desired.engine_pod import RUN_DIR, own_folder, uses_pool
from kimi_operator.desired.engines.kimistack import CALL_KEY_FILE, POOL_ARENA, POOL_SOCKET
from kimi_operator.desired.labels import Owner, labels_of, metadata_of, selector_of
from kimi_operator.desired.names import config_name, peers_name, pool_name
from kimi_operator.desired.placement import place_pool
from kimi_operator.desired.revision import Frozen
from kimi_operator.desired.spec_files import spec_file
from kimi_operator.observed import Manifest
from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.router import FleetSpec, PoolEndpoint
from kimi_runtime.spec.ssd import SsdSpec
from kimi_runtime.spec.umbp import TenantTerms, UmbpSpec

POOL_PORT, POOL_TRANSFER_PORT, POOL_GRPC_PORT = 8100, 8101, 8102
"""Feed, health and metrics; what peers copy from; what peers and operators ask for."""
POOL_FILE = "umbp.json"
PEERS_DIR, PEERS_FILE = "/etc/kimistack-peers", "peers.json"
STOP_S = 30.0
"""Of a daemon that has nothing to move."""
OVERHEAD_BYTES = 2**30
"""Of the daemon itself: its index takes some hundred bytes a block."""
SSD_DIR = "/var/lib/kimistack/ssd"
SSD_BYTES_PER_INDEX_BYTE = 2048
"""Its index of the SSD takes some 500 bytes a block, and blocks of large models take over 1 MiB."""
CPU = "250m"
"""Enough to answer; copying is done by engines. It may use what is free."""
HUGE_BYTES = {"2Mi": 2**21, "1Gi": 2**30}
START_S = 1800.0
"""Prefaulting hundreds of gigabytes took up to five minutes where the page cache was full."""


def pool_roles(effective: Effective) -> list[Role]:
    """The roles whose engines use the pool; none: there is no pool."""
    return [role for name, role in effective.deployment.spec.roles() if uses_pool(effective, name)]


def frozen_pool(effective: Effective, inputs: str) -> Frozen:
    """The daemon's pods. Raises ConfigError where the size of the pool is not written."""
    owner, spec = Owner.of(effective.deployment), effective.deployment.spec
    if spec.kv_pool.dram is None:
        raise ConfigError(
            "spec.kvPool.dram: write how much memory of a node the pool gets, e.g. 512GiB, or "
            "kvPool.enabled: false"
        )
    files = {POOL_FILE: _spec_file(spec)}
    name = config_name(owner.name, "umbp", files)
    template: Manifest = {"metadata": {}, "spec": _pod(effective, owner, name)}
    return Frozen(inputs=inputs, pod=template, configs={name: files}, ports=_ports(spec))


def _ports(spec: DeploymentSpec) -> dict[str, int]:
    ports = {"http": POOL_PORT}
    if has_peers(spec):
        ports |= {"transfer": POOL_TRANSFER_PORT, "grpc": POOL_GRPC_PORT}
    return ports


def has_peers(spec: DeploymentSpec) -> bool:
    """Whether the pool's daemons fetch from each other."""
    return spec.kv_pool.peers == "Enabled"


def evacuation_s(spec: DeploymentSpec) -> float:
    """How long a daemon that is stopped moves blocks to peers."""
    pool = spec.kv_pool
    return pool.evacuation if has_peers(spec) and not pool.keep_arena else 0.0


def ssd_log(spec: DeploymentSpec, folder: str) -> SsdSpec | None:
    """The SSD tier in `folder`, as its daemon sees it. Raises ConfigError if it is too small."""
    ssd = spec.kv_pool.ssd
    if ssd is None:
        return None
    try:
        return SsdSpec.sized(Path(folder), ssd.capacity)
    except ConfigError as exc:
        raise ConfigError(f"spec.kvPool.ssd.capacity: {exc}") from exc


def _spec_file(spec: DeploymentSpec) -> str:
    pool = spec.kv_pool
    ssd = pool.ssd
    data: dict[str, object] = {
        "name": "umbp",
        "host": "0.0.0.0",
        "port": POOL_PORT,
        "socket": f"{RUN_DIR}/{POOL_SOCKET}",
        "arena": f"{RUN_DIR}/{POOL_ARENA}",
        "dram_bytes": spec.kv_pool.dram,
        "page_bytes": spec.kv_pool.page,
        "ssd": ssd_log(spec, SSD_DIR),
        "ssd_write_rate": None if ssd is None else ssd.write_rate,
        "call_key": CALL_KEY_FILE,
        "log_level": spec.observability.log_level,
    }
    if has_peers(spec):
        data["peers_file"] = f"{PEERS_DIR}/{PEERS_FILE}"
        data["network"] = {"port": POOL_TRANSFER_PORT}
    data |= granted(pool)
    return spec_file(UmbpSpec.model_validate(data))


def granted(pool: KvPool) -> dict[str, object]:
    """What a user may say of a daemon's memory, as fields of its file; nothing that was not."""
    found: dict[str, object] = {}
    if pool.keep_arena:
        found["keep_arena"] = True
    if pool.numa_nodes:
        found["numa_nodes"] = pool.numa_nodes
    if pool.tenants:
        found["tenants"] = {name: _terms(share) for name, share in pool.tenants.items()}
    if pool.tenant_default is not None:
        found["tenant_default"] = _terms(pool.tenant_default)
    return found


def _terms(share: TenantShare) -> TenantTerms:
    return TenantTerms(weight=share.weight, quota=share.quota)


def peers_file(pools: Sequence[PoolEndpoint]) -> dict[str, str]:
    """What tells the daemons of each other. They read it again when it changes."""
    fleet = FleetSpec(workers=(), pools=tuple(pools))
    return {PEERS_FILE: fleet.model_dump_json(indent=2, exclude_unset=True) + "\n"}


def _pod(effective: Effective, owner: Owner, config: str) -> Manifest:
    spec = effective.deployment.spec
    shares_gpu = spec.kv_pool.gpu_access == "HipIpc"
    pod: Manifest = {
        "serviceAccountName": pool_name(owner.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": round(STOP_S + evacuation_s(spec)),
        "securityContext": security.pod_security(spec, own_image=True, gpus=shares_gpu),
        **place_pool(spec, pool_roles(effective)),
    }
    if spec.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in spec.image_pull_secrets]
    if shares_gpu:
        pod["hostIPC"] = True
    if security.pod_uid(spec):
        image = pods.runtime_image(spec)
        pod["initContainers"] = [own_folder(image, spec.image_pull_policy)]
        if spec.kv_pool.ssd is not None:
            pod["initContainers"].append(_own_ssd(pod["initContainers"][0]))
    folder = {"path": pods.host_folder(owner, spec), "type": "DirectoryOrCreate"}
    volumes: list[Manifest] = [
        {"name": "run", "hostPath": folder},
        security.call_key_volume(owner.name),
        pods.config_volume("config", config),
        pods.scratch("tmp"),
    ]
    if has_peers(spec):
        volumes.append(pods.config_volume("peers", peers_name(owner.name)))
    if spec.kv_pool.ssd is not None:
        log = {"path": spec.kv_pool.ssd.path, "type": "DirectoryOrCreate"}
        volumes.append({"name": "ssd", "hostPath": log})
    if shares_gpu:
        # without consuming amd.com/gpu, which engines would then lack
        volumes += [
            {"name": "kfd", "hostPath": {"path": "/dev/kfd"}},
            {"name": "dri", "hostPath": {"path": "/dev/dri"}},
        ]
    return pod | {"containers": [_container(spec, shares_gpu=shares_gpu)], "volumes": volumes}


def _own_ssd(own_folder: Manifest) -> Manifest:
    """The same for the folder of the log."""
    script = f"chmod 0700 {SSD_DIR} && chown {security.UID}:{security.UID} {SSD_DIR}"
    return {
        **own_folder,
        "name": "own-ssd",
        "command": ["/bin/sh", "-c", script],
        "volumeMounts": [{"name": "ssd", "mountPath": SSD_DIR}],
    }


def _container(spec: DeploymentSpec, *, shares_gpu: bool) -> Manifest:
    mounts: list[Manifest] = [
        {"name": "run", "mountPath": RUN_DIR},
        {"name": "call-key", "mountPath": security.CALL_KEY_DIR, "readOnly": True},
        {"name": "config", "mountPath": pods.CONFIG_DIR, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if has_peers(spec):
        mounts.append({"name": "peers", "mountPath": PEERS_DIR, "readOnly": True})
    if spec.kv_pool.ssd is not None:
        mounts.append({"name": "ssd", "mountPath": SSD_DIR})
    if shares_gpu:
        mounts += [
            {"name": "kfd", "mountPath": "/dev/kfd"},
            {"name": "dri", "mountPath": "/dev/dri"},
        ]
    period_s = 5.0
    ready = {"period_s": period_s, "timeout_s": 5.0}
    generated = {"HOME": "/tmp", "KIMISTACK_HOST": "$(POD_IP)", "KIMISTACK_NAME": "$(NODE_NAME)"}
    if has_peers(spec):
        # not in the file: an image of 0.2 refuses a field that it does not know
        generated["KIMISTACK_GRPC_PORT"] = str(POOL_GRPC_PORT)
        generated["KIMISTACK_TRANSFER_ADDRESS"] = "$(POD_IP)"
    container: Manifest = {
        "name": "umbp",
        "image": pods.runtime_image(spec),
        "imagePullPolicy": spec.image_pull_policy,
        "command": ["kimistack", "umbp", "--spec", f"{pods.CONFIG_DIR}/{POOL_FILE}"],
        "env": pods.variables(pods.identity(), generated, (), "spec.kvPool"),
        "ports": pods.container_ports(_ports(spec)),
        "resources": pool_resources(spec),
        "securityContext": _container_security(spec, shares_gpu=shares_gpu),
        "startupProbe": pods.http_probe("/readyz", failures=round(START_S / period_s), **ready),
        "readinessProbe": pods.http_probe("/readyz", failures=3, **ready),
        "volumeMounts": mounts,
    }
    within_s = evacuation_s(spec)
    if within_s:
        file = f"{pods.CONFIG_DIR}/{POOL_FILE}"
        leave = ["kimistack", "umbp", "drain", "--spec", file, "--within", f"{within_s:g}s"]
        container["lifecycle"] = {"preStop": {"exec": {"command": leave}}}
    return container


def _container_security(spec: DeploymentSpec, *, shares_gpu: bool) -> Manifest:
    context = security.container_security(spec, own_image=True, devices=shares_gpu)
    if spec.kv_pool.numa_nodes and not context.get("privileged"):
        # container runtimes' profile lets only its holders bind memory
        context["capabilities"]["add"] = ["SYS_NICE"]
    return context


def pool_resources(spec: DeploymentSpec) -> Manifest:
    """Requests and limits of one node's daemon.

    The arena is charged to the pod whose process first touches it: the daemon's.
    """
    dram = spec.kv_pool.dram or 0
    own = OVERHEAD_BYTES
    if spec.kv_pool.ssd is not None:
        own += spec.kv_pool.ssd.capacity // SSD_BYTES_PER_INDEX_BYTE
    huge = spec.kv_pool.hugepages
    if huge == "None":
        amounts = {"memory": str(dram + own)}
    else:
        pages = -(-dram // HUGE_BYTES[huge]) * HUGE_BYTES[huge]
        amounts = {"memory": str(own), f"hugepages-{huge}": str(pages)}
    return {"requests": {"cpu": CPU, **amounts}, "limits": amounts}


def pool_objects(owner: Owner, part: Frozen) -> list[Manifest]:
    """The daemons' Service and DaemonSet.

    A daemon is replaced when its pod is deleted: by the operator together with its node's engines,
    or by whoever deletes it.
    """
    name, labels = pool_name(owner.name), labels_of(owner, "umbp")
    selector = selector_of(owner, "umbp")
    # canonical plain data: what a stored revision returns is not to be changed here
    template = json.loads(json.dumps(part.pod))
    template["metadata"]["labels"] = {**template["metadata"].get("labels", {}), **labels}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata_of(owner, name, "umbp"),
            "spec": {
                "clusterIP": "None",
                "selector": selector,
                "ports": [
                    {"name": port, "port": number, "targetPort": number, "protocol": "TCP"}
                    for port, number in part.ports.items()
                ],
            },
        },
        {
            "apiVersion": "apps/v1",
            "kind": "DaemonSet",
            "metadata": metadata_of(owner, name, "umbp"),
            "spec": {
                "selector": {"matchLabels": selector},
                "updateStrategy": {"type": "OnDelete"},
                "revisionHistoryLimit": 1,
                "template": template,
            },
        },
    ]
