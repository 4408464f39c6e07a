"""What the API server says of one deployment, read once: what the operator learns from watches."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kimi_operator.api.base import API_VERSION
from kimi_operator.instances import LoadReport, instance_views
from kimi_operator.kinds import BY_ID, Kind, watched_kinds
from kimi_operator.kube import Kube
from kimi_operator.nodes import node_view
from kimi_operator.observed import (
    DEPLOYMENT_LABEL,
    Capabilities,
    Manifest,
    NodeView,
    ObjectKey,
    Observed,
    Signals,
)
from kimi_operator.scale import workers_replicas
from kimi_runtime.errors import ClusterError, ClusterRefused, ConfigError

DEPLOYMENTS = f"{API_VERSION}/KimiDeployment"
RUNNING = (
    "v1/Pod",
    "apps/v1/StatefulSet",
    "apps/v1/DaemonSet",
    "apps/v1/Deployment",
    "apps/v1/ControllerRevision",
    "kimistack.dev/v1alpha1/KimiWorkers",
)
"""Kinds that tell what runs; a user may read these without reading everything."""
SHOWN = 10


@dataclass(frozen=True)
class Sight:
    """One deployment and its children. `resource` is None where it is not there."""

    resource: Manifest | None
    children: Mapping[ObjectKey, Manifest]
    loads: Mapping[str, LoadReport] = field(default_factory=dict)

    def observed(
        self,
        capabilities: Capabilities,
        nodes: tuple[NodeView, ...] | None = None,
        signals: Signals | None = None,
    ) -> Observed:
        """As decisions are made from it."""
        uid = self.resource["metadata"]["uid"] if self.resource else ""
        revisions = [c for at, c in self.children.items() if at.kind == "ControllerRevision"]
        return Observed(
            children=self.children,
            instances=instance_views(self.children, uid, self.loads),
            revisions=tuple(
                sorted(revisions, key=lambda r: (r["revision"], r["metadata"]["name"]))
            ),
            nodes=nodes,
            signals=signals or Signals(),
            workers_replicas=workers_replicas(self.children, uid),
            capabilities=capabilities,
        )


def key_of(namespace: str, name: str) -> ObjectKey:
    """Of a KimiDeployment."""
    return ObjectKey(API_VERSION, "KimiDeployment", namespace, name)


async def deployments(kube: Kube, namespace: str | None) -> list[Manifest]:
    """The KimiDeployments there are. Raises ConfigError where the cluster has no such kind."""
    try:
        return await kube.list(DEPLOYMENTS, namespace)
    except ClusterError as exc:
        if exc.code == 404:
            raise ConfigError(
                "the cluster has no KimiDeployments: their CRD is not installed; install it with "
                "kimistack install"
            ) from exc
        raise


async def the_deployment(kube: Kube, namespace: str, name: str | None) -> Manifest:
    """The named one, or the only one of the namespace. Raises ConfigError naming those there are.

    What is not found is looked for among all, so that the answer can say what is there.
    """
    if name is not None:
        found = await kube.get(key_of(namespace, name))
        if found is not None:
            return found
    there = sorted(d["metadata"]["name"] for d in await deployments(kube, namespace))
    if name is None and len(there) == 1:
        only = await kube.get(key_of(namespace, there[0]))
        if only is not None:
            return only
    if not there:
        asked = f"no KimiDeployment {name}" if name else "no KimiDeployment"
        raise ConfigError(f"there is {asked} in namespace {namespace}, nor any other; try -n")
    some = ", ".join(there[:SHOWN]) + (" …" if len(there) > SHOWN else "")
    asked = f"there is no KimiDeployment {name}" if name else "which one? name it"
    raise ConfigError(f"{asked}; namespace {namespace} has: {some}")


async def look(kube: Kube, resource: Manifest, kinds: Iterable[str] = RUNNING) -> Sight:
    """The children of these kinds (ids as in `kinds.BY_ID`) of a deployment that is there."""
    metadata = resource["metadata"]
    children = await children_of(kube, metadata["namespace"], metadata["name"], kinds)
    return Sight(resource, children)


async def look_at_all(kube: Kube, namespace: str, name: str, capabilities: Capabilities) -> Sight:
    """A deployment, there or not, with children of every kind the server serves."""
    resource = await kube.get(key_of(namespace, name))
    kinds: tuple[Kind, ...] = watched_kinds(capabilities)
    return Sight(resource, await children_of(kube, namespace, name, [kind.id for kind in kinds]))


async def children_of(
    kube: Kube, namespace: str, name: str, kinds: Iterable[str]
) -> dict[ObjectKey, Manifest]:
    """Objects that carry the deployment's label."""
    labels = f"{DEPLOYMENT_LABEL}={name}"
    try:
        async with asyncio.TaskGroup() as tasks:
            lists = [tasks.create_task(_listed(kube, kind, namespace, labels)) for kind in kinds]
    except ExceptionGroup as group:
        raise group.exceptions[0] from group  # one refusal tells as much as all of them
    return {ObjectKey.of(child): child for each in lists for child in each.result()}


async def _listed(kube: Kube, kind: str, namespace: str, labels: str) -> list[Manifest]:
    try:
        return await kube.list(kind, namespace, labels)
    except ClusterError as exc:
        if exc.code == 404 and BY_ID[kind].child:
            return []  # a kind that is not served has no objects
        raise


async def look_at_readable(kube: Kube, resource: Manifest) -> Sight:
    """A deployment with children of every kind that may be read, for what only counts them."""
    metadata = resource["metadata"]
    children: dict[ObjectKey, Manifest] = {}
    for kind in watched_kinds(await kube.capabilities()):
        try:
            found = await children_of(kube, metadata["namespace"], metadata["name"], [kind.id])
        except ClusterRefused:
            continue
        children |= found
    return Sight(resource, children)


async def nodes_of(kube: Kube) -> tuple[NodeView, ...] | None:
    """The nodes; None where they may not be listed."""
    try:
        return tuple(node_view(node) for node in await kube.list("v1/Node", None))
    except ClusterRefused:
        return None
