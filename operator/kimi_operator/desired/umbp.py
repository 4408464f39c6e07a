"""The KV pool's daemon on every node where an engine that uses it may run."""

import functools
import json
from dataclasses import replace
from typing import Literal

from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.api.roles import Role
from kimi_operator.desired import pods, pool_tls, security
from kimi_operator.desired.effective import Effective
from kimi_operator.desired.engine_pod import RUN_DIR, own_folder, uses_pool
from kimi_operator.desired.labels import Owner, labels_of, metadata_of, selector_of
from kimi_operator.desired.names import config_name, digest_of, peers_name, pool_name
from kimi_operator.desired.placement import place_pool
from kimi_operator.desired.pool_files import (
    PEERS_DIR,
    POOL_FILE,
    POOL_GRPC_PORT,
    POOL_PORT,
    POOL_TRANSFER_PORT,
    SSD_DIR,
    daemon_file,
    has_peers,
)
from kimi_operator.desired.revision import Frozen
from kimi_operator.observed import Manifest
from kimi_runtime.errors import ConfigError

STOP_S = 30.0
"""Of a daemon that has nothing to move."""
OVERHEAD_BYTES = 2**30
"""Of the daemon itself: its index takes some hundred bytes a block."""
SSD_BYTES_PER_INDEX_BYTE = 2048
"""Its index of the SSD takes some 500 bytes a block, and blocks of large models take over 1 MiB."""
CPU = "250m"
"""Enough to answer; copying is done by engines. It may use what is free."""
HUGE_BYTES = {"2Mi": 2**21, "1Gi": 2**30}
DAEMON_ANNOTATION = "kimistack.dev/daemon"
"""On the daemons' pods: digest of what they were made from, which tells old ones from new ones."""
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
    files = {POOL_FILE: daemon_file(owner, spec)}
    name = config_name(owner.name, "umbp", files)
    pod = _pod(effective, owner, name)
    annotations = {DAEMON_ANNOTATION: digest_of(pod)[:16]}
    template: Manifest = {"metadata": {"annotations": annotations}, "spec": pod}
    return Frozen(inputs=inputs, pod=template, configs={name: files}, ports=_ports(spec))


def marked_as_before(part: Frozen, before: Frozen | None) -> Frozen:
    """`part`, without its mark where `before` has none and is the same in all else.

    Else daemons that an operator up to 0.3 made would go for the mark alone.
    """
    if before is None or before.pod["metadata"].get("annotations"):
        return part
    unmarked = replace(part, pod={**part.pod, "metadata": before.pod["metadata"]})
    return unmarked if digest_of(unmarked.content) == digest_of(before.content) else part


def _ports(spec: DeploymentSpec) -> dict[str, int]:
    ports: dict[str, int] = {_scheme(spec): POOL_PORT}
    if has_peers(spec):
        ports |= {"transfer": POOL_TRANSFER_PORT, "grpc": POOL_GRPC_PORT}
    return ports


def _scheme(spec: DeploymentSpec) -> Literal["http", "https"]:
    return "http" if spec.security.tls_secret_name is None else "https"


def encrypts(part: Frozen | None) -> bool:
    """Whether the daemons of these pods speak TLS; None: there are none."""
    return part is not None and "https" in part.ports


def evacuation_s(spec: DeploymentSpec) -> float:
    """How long a daemon that is stopped moves blocks to peers."""
    pool = spec.kv_pool
    return pool.evacuation if has_peers(spec) and not pool.keep_arena else 0.0


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
    first: list[Manifest] = []
    if security.pod_uid(spec):
        image = pods.runtime_image(spec)
        first.append(own_folder(image, spec.image_pull_policy))
        if spec.kv_pool.ssd is not None:
            first.append(_own_ssd(first[0]))
    secret = spec.security.tls_secret_name
    if secret is not None:
        plain = {
            "image": pods.runtime_image(spec),
            "imagePullPolicy": spec.image_pull_policy,
            "securityContext": security.container_security(spec, own_image=True, devices=False),
        }
        first.append(pool_tls.gate(owner, secret, pool_tls.DAEMON_KEYS, plain))
    if first:
        pod["initContainers"] = first
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
    if secret is not None:
        volumes.append(pool_tls.volume(secret, pool_tls.DAEMON_KEYS))
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
    if spec.security.tls_secret_name is not None:
        mounts.append(pool_tls.mount())
    if shares_gpu:
        mounts += [
            {"name": "kfd", "mountPath": "/dev/kfd"},
            {"name": "dri", "mountPath": "/dev/dri"},
        ]
    period_s = 5.0
    ready = functools.partial(
        pods.http_probe, "/readyz", period_s=period_s, timeout_s=5.0, scheme=_scheme(spec)
    )
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
        "startupProbe": ready(failures=round(START_S / period_s)),
        "readinessProbe": ready(failures=3),
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
