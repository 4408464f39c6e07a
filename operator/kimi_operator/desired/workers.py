"""Instances: one StatefulSet each, its pods started together and ranked by ordinal.

One instance is one object, so that a rollout and a scale-down choose which one goes. All that tells
instances apart is added here, to the template that its revision keeps.
"""

import copy
from collections.abc import Mapping
from typing import Any

from kimi_operator.desired.engines.base import PORT_VARIABLES
from kimi_operator.desired.labels import Owner, instance_labels, instance_selector, metadata_of
from kimi_operator.desired.names import MAX_INSTANCES, digest_of, instance_name, pod_host
from kimi_operator.desired.placement import apart, of_revision
from kimi_operator.desired.revision import Frozen, Revision
from kimi_operator.observed import (
    DEPLOYMENT_LABEL,
    INSTANCE_LABEL,
    REVISION_LABEL,
    ROLE_LABEL,
    InstanceId,
    Manifest,
)
from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.router import WorkerEndpoint
from kimi_runtime.spec.worker import Role as WorkerRole

FIRST_HOST_PORT, LAST_HOST_PORT, BLOCK_PORTS = 20000, 29999, 16
"""Below the NodePorts (30000-32767), where a port of the host may be taken at any time."""
_BLOCKS = (LAST_HOST_PORT + 1 - FIRST_HOST_PORT) // BLOCK_PORTS


def instance_objects(owner: Owner, revision: Revision, instance: InstanceId) -> list[Manifest]:
    """The headless Service and the StatefulSet of one instance."""
    return [instance_service(owner, revision, instance), instance_set(owner, revision, instance)]


def ports_of(owner: Owner, part: Frozen, instance: InstanceId) -> dict[str, int]:
    """Ports of an instance by name.

    On the host's network each instance has a block, found from its deployment, role and index. Two
    that meet on one node with the same block are not scheduled together: Kubernetes sees the ports.
    """
    if not part.host_network:
        return dict(part.ports)
    offset = int(digest_of([owner.namespace, owner.name])[:8], 16)
    slot = instance.index + (MAX_INSTANCES if instance.role == "decode" else 0)
    first = FIRST_HOST_PORT + (offset + slot) % _BLOCKS * BLOCK_PORTS
    # not in the order of the mapping, which a stored revision does not keep
    names = [name for name in PORT_VARIABLES if name in part.ports]
    return {name: first + position for position, name in enumerate(names)}


def instance_set(owner: Owner, revision: Revision, instance: InstanceId) -> Manifest:
    """The StatefulSet of one instance. Its pods are only ever replaced by the operator."""
    if not 0 <= instance.index < MAX_INSTANCES:
        raise ConfigError(
            f"instance {instance.index} of {instance.role}: a role has at most {MAX_INSTANCES}; "
            "use several KimiDeployments"
        )
    part = revision.role(instance.role)
    name = instance_name(owner.name, instance)
    labels = instance_labels(owner, instance)
    selector = instance_selector(owner, instance)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata_of(owner, name, "engine", labels=selector),
        "spec": {
            "replicas": part.nodes,
            "serviceName": name,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "revisionHistoryLimit": 1,
            "selector": {"matchLabels": selector},
            "template": _template(part, labels, ports_of(owner, part, instance)),
        },
    }


def _template(part: Frozen, labels: Mapping[str, str], ports: Mapping[str, int]) -> Manifest:
    pod = copy.deepcopy(part.pod)
    metadata = pod.setdefault("metadata", {})
    metadata["labels"] = {**metadata.get("labels", {}), **labels}
    spec = pod["spec"]
    of_revision(spec, labels[REVISION_LABEL])
    if part.spread is not None:
        like = {key: labels[key] for key in (DEPLOYMENT_LABEL, ROLE_LABEL, REVISION_LABEL)}
        own = {"key": INSTANCE_LABEL, "operator": "NotIn", "values": [labels[INSTANCE_LABEL]]}
        apart(spec, part.spread, like, own)
    if part.host_network:
        numbers = {PORT_VARIABLES[name]: str(number) for name, number in ports.items()}
        for container in (*spec["containers"], *spec.get("initContainers", [])):
            _renumber(container, numbers, ports)
    return dict(pod)


def _renumber(
    container: dict[str, Any], numbers: Mapping[str, str], ports: Mapping[str, int]
) -> None:
    for variable in container.get("env", []):
        if variable["name"] in numbers:
            variable["value"] = numbers[variable["name"]]
    for port in container.get("ports", []):
        if port.get("name") in ports:
            port["containerPort"] = port["hostPort"] = ports[port["name"]]


def instance_service(owner: Owner, revision: Revision, instance: InstanceId) -> Manifest:
    """Names for an instance's pods, from before they are ready: that is when they meet."""
    name = instance_name(owner.name, instance)
    selector = instance_selector(owner, instance)
    part = revision.role(instance.role)
    numbers = ports_of(owner, part, instance)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata_of(owner, name, "engine", labels=selector),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": selector,
            "ports": [
                {"name": port, "port": number, "targetPort": number, "protocol": "TCP"}
                for port, number in numbers.items()
            ],
        },
    }


def endpoint(
    owner: Owner, revision: Revision, instance: InstanceId, *, aggregated: bool
) -> WorkerEndpoint:
    """Where the router reaches an instance; `name` is its first pod's, as the worker says it."""
    part = revision.role(instance.role)
    host = pod_host(owner.name, owner.namespace, instance)
    port = ports_of(owner, part, instance)["http"]
    return WorkerEndpoint(
        name=host.partition(".")[0],
        role=WorkerRole.BOTH if aggregated else WorkerRole(instance.role),
        url=f"http://{host}:{port}",
    )
