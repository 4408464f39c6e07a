"""Parts of a pod that every component's pod has."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.api.pods import Drain, Resources
from kimi_operator.desired.labels import Component, Owner, metadata_of
from kimi_operator.observed import DRAINING_LABEL, REVISION_LABEL, Manifest
from kimi_runtime.errors import ConfigError

RUNTIME_IMAGE = "kimistack/runtime:0.3.0"
"""Of router and pool where the deployment's image is another engine's, or none."""
RESERVED_VARIABLES = ("KIMISTACK_", "POD_", "NODE_NAME")
"""Beginnings of variables that say who and where a pod is; nobody else sets them."""
CACHE_DIR = "/var/cache/engine"
CONFIG_DIR = "/etc/kimistack"
DRAIN_DIR, DRAIN_FILE = "/etc/kimistack-drain", "draining"


def runtime_image(spec: DeploymentSpec) -> str:
    """Image with our own processes."""
    ours = spec.image if spec.engine == "kimistack" else None
    return spec.router.image or ours or RUNTIME_IMAGE


def identity() -> list[Manifest]:
    """Who and where the pod is: first, so that other variables may refer to it."""
    paths = {
        "POD_NAME": "metadata.name",
        "POD_NAMESPACE": "metadata.namespace",
        "POD_IP": "status.podIP",
        "NODE_NAME": "spec.nodeName",
    }
    return [field_variable(name, path) for name, path in paths.items()]


def revision_variable() -> Manifest:
    """The revision of an engine's pod, from its label."""
    return field_variable("POD_REVISION", f"metadata.labels['{REVISION_LABEL}']")


def field_variable(name: str, path: str) -> Manifest:
    """A variable with a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def variables(
    first: Sequence[Manifest], generated: Mapping[str, str], user: Sequence[Manifest], where: str
) -> list[Manifest]:
    """Environment: identity, what is generated (sorted), what the user adds or sets otherwise.

    Raises ConfigError for a user's variable that says who the pod is.
    """
    for variable in user:
        refuse_reserved(variable["name"], where)
    theirs = {variable["name"] for variable in user}
    ours = [{"name": k, "value": v} for k, v in sorted(generated.items()) if k not in theirs]
    return [*first, *ours, *user]


def refuse_reserved(name: str, where: str) -> None:
    """Raise ConfigError for a variable that only the operator sets."""
    if name.startswith(RESERVED_VARIABLES):
        raise ConfigError(f"{where}: {name} is set by the operator; remove it")


def resources(wanted: Resources, extended: Mapping[str, str]) -> Manifest:
    """Requests and limits, the same; devices cannot be overcommitted and memory must not be."""
    amounts: dict[str, Any] = {}
    if wanted.cpu is not None:
        amounts["cpu"] = wanted.cpu
    if wanted.memory is not None:
        amounts["memory"] = wanted.memory
    amounts |= extended
    return {"requests": dict(amounts), "limits": dict(amounts)} if amounts else {}


def shared_memory(size: str | None) -> Manifest:
    """Volume `shm` for /dev/shm; its content counts against the pod's memory."""
    medium: Manifest = {"medium": "Memory"}
    return {"name": "shm", "emptyDir": medium | ({"sizeLimit": size} if size else {})}


def scratch(name: str) -> Manifest:
    """An empty folder for as long as the pod lives."""
    return {"name": name, "emptyDir": {}}


def config_volume(name: str, config: str) -> Manifest:
    """Volume `name` with the files of a ConfigMap."""
    return {"name": name, "configMap": {"name": config}}


def config_map(
    owner: Owner, name: str, component: Component, data: Mapping[str, str], **labels: str
) -> Manifest:
    """A ConfigMap of files."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata_of(owner, name, component, labels=labels),
        "data": dict(data),
    }


def pause_before_stop(drain: Drain, *, told: bool = False) -> Manifest:
    """Lifecycle of a container that goes on serving until nobody plans onto it any more.

    `told`: it has a drain file, which the operator lets the kubelet write long before it deletes
    the pod; then routers have left already.
    """
    wait = f"sleep {drain.pre_stop:g}"
    script = f"test -s {DRAIN_DIR}/{DRAIN_FILE} || {wait}" if told else wait
    return {"preStop": {"exec": {"command": ["/bin/sh", "-c", script]}}}


def drain_volume() -> Manifest:
    """Volume `drain`: a file that has a text while the pod carries the mark of a drain.

    The kubelet writes it as soon as it hears of the mark, where a ConfigMap takes up to a minute.
    """
    mark = {"fieldPath": f"metadata.labels['{DRAINING_LABEL}']"}
    return {"name": "drain", "downwardAPI": {"items": [{"path": DRAIN_FILE, "fieldRef": mark}]}}


def http_probe(
    path: str,
    *,
    period_s: float,
    timeout_s: float,
    failures: int,
    scheme: Literal["http", "https"] = "http",
) -> Manifest:
    """A probe of the port of that name. Of one by https the kubelet checks no certificate."""
    encrypted = {"scheme": "HTTPS"} if scheme == "https" else {}
    return {
        "httpGet": {"path": path, "port": scheme, **encrypted},
        "periodSeconds": max(1, round(period_s)),
        "timeoutSeconds": max(1, round(timeout_s)),
        "failureThreshold": failures,
    }


def container_ports(ports: Mapping[str, int]) -> list[Manifest]:
    """Ports of a container by name."""
    return [
        {"name": name, "containerPort": number, "protocol": "TCP"} for name, number in ports.items()
    ]


def host_folder(owner: Owner, spec: DeploymentSpec) -> str:
    """The node's folder that the deployment's pods share: sockets, arena, shared memory."""
    return f"{spec.kv_pool.socket_dir.rstrip('/')}/{owner.namespace}.{owner.name}"
