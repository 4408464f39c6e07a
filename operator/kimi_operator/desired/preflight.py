"""The Job that looks at one node of a class: a pod without any right that only reads."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.api.pods import Toleration
from kimi_operator.desired import pods, security
from kimi_operator.desired.labels import Owner, labels_of, metadata_of
from kimi_operator.desired.names import digest_of, engine_name
from kimi_operator.observed import Manifest
from kimi_operator.preflight.checks import Wanted

HOST = "/host"
CLASS_ANNOTATION = "kimistack.dev/node-class"
NODES_ANNOTATION = "kimistack.dev/nodes"
"""How many nodes the class had when the Job was made."""
WITHIN_S = 3600
"""A runtime image of tens of gigabytes may have to be pulled first."""
FAILED = 1
"""Exit code of a pod that looked and found something missing."""


@dataclass(frozen=True)
class Target:
    """The class by its digest, the node of it that is looked at, and how many it has."""

    digest: str
    node: str
    nodes: int


def job_name(owner: Owner, spec: DeploymentSpec, digest: str, wanted: Wanted) -> str:
    """The same for as long as class, checks and image are: another look is another Job."""
    asked = [digest, wanted.model_dump(mode="json"), pods.runtime_image(spec)]
    return f"{owner.name}-preflight-{digest_of(asked)[:8]}"


def preflight_job(owner: Owner, spec: DeploymentSpec, target: Target, wanted: Wanted) -> Manifest:
    """The Job. It stays when it has ended: its pod's last words are the result."""
    name = job_name(owner, spec, target.digest, wanted)
    labels = labels_of(owner, "preflight")
    annotations = {CLASS_ANNOTATION: target.digest, NODES_ANNOTATION: str(target.nodes)}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata_of(owner, name, "preflight", annotations=annotations),
        "spec": {
            "backoffLimit": 0,
            "completions": 1,
            "parallelism": 1,
            "activeDeadlineSeconds": WITHIN_S,
            "template": {
                "metadata": {"labels": labels},
                "spec": _pod(owner, spec, target, wanted),
            },
        },
    }


def _pod(owner: Owner, spec: DeploymentSpec, target: Target, wanted: Wanted) -> Manifest:
    mounts = _mounts(wanted)
    pod: Manifest = {
        "serviceAccountName": spec.security.service_account_name or engine_name(owner.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 5,
        "securityContext": _user(spec),
        "affinity": {"nodeAffinity": _on(target.node)},
        "containers": [_container(spec, target, wanted, mounts)],
        "volumes": [
            {"name": name, "hostPath": {"path": path, "type": kind}}
            for name, (path, kind) in mounts.items()
        ],
    }
    tolerations = _tolerations(spec)
    if tolerations:
        pod["tolerations"] = tolerations
    if spec.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in spec.image_pull_secrets]
    return pod


def _user(spec: DeploymentSpec) -> Manifest:
    """What the deployment's pool runs as, so that what its folders hold can be counted."""
    uid = security.pod_uid(spec)
    return {
        "runAsUser": uid,
        "runAsGroup": uid,
        **({"runAsNonRoot": True} if uid else {}),
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _on(node: str) -> Manifest:
    """That very node, by the scheduler: a cordoned one, or one with a taint, is waited for."""
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    terms = [{"matchFields": [field]}]
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}


def _container(
    spec: DeploymentSpec, target: Target, wanted: Wanted, mounts: Mapping[str, tuple[str, str]]
) -> Manifest:
    checks = json.dumps(wanted.model_dump(mode="json"), separators=(",", ":"), sort_keys=True)
    amounts = {"cpu": "50m", "memory": "128Mi"}
    return {
        "name": "preflight",
        "image": pods.runtime_image(spec),
        "imagePullPolicy": spec.image_pull_policy,
        "command": ["kimistack", "preflight-node"],
        "args": ["--checks", checks, "--root", HOST, "--report", "/dev/termination-log"],
        "env": [
            pods.field_variable("NODE_NAME", "spec.nodeName"),
            {"name": "HOME", "value": "/tmp"},
        ],
        "resources": {"requests": amounts, "limits": {"memory": "512Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "terminationMessagePolicy": "File",
        "volumeMounts": [
            {"name": name, "mountPath": f"{HOST}{path}", "readOnly": True}
            for name, (path, _) in mounts.items()
        ],
    }


def _mounts(wanted: Wanted) -> dict[str, tuple[str, str]]:
    """By volume, the host's folder and how the kubelet checks it.

    Folders that pool and engines would have made are made by this pod as well; a model's folder is
    looked for in the one above it, since a pod never starts without its volumes.
    """
    found = {
        "dev": ("/dev", "Directory"),
        "proc": ("/proc", "Directory"),
        "sys": ("/sys", "Directory"),
        "run": (wanted.socket_dir.rstrip("/"), "DirectoryOrCreate"),
    }
    for index, disk in enumerate(wanted.disks):
        path = disk.path.rstrip("/")
        if disk.read:
            above = path.rpartition("/")[0]
            found[f"disk-{index}"] = (above, "Directory") if above else (path, "Directory")
        else:
            found[f"disk-{index}"] = (path, "DirectoryOrCreate")
    unique: dict[str, tuple[str, str]] = {}
    for name, (path, kind) in found.items():
        if path not in {there for there, _ in unique.values()}:
            unique[name] = (path, kind)
    return unique


def _tolerations(spec: DeploymentSpec) -> list[Manifest]:
    """Of all roles: where their pods may run this one may look."""
    every: list[Toleration] = [t for _, role in spec.roles() for t in role.placement.tolerations]
    plain = [t.model_dump(mode="json", exclude_none=True) for t in every]
    return [one for index, one in enumerate(plain) if one not in plain[:index]]
