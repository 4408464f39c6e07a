"""Every kind of object the operator touches and what it may do with it: the source of its RBAC.

What is watched, pruned and granted comes from this one table, so that none of them can drift from
the others.
"""

from dataclasses import dataclass
from typing import Literal

from kimi_operator.observed import Capabilities

Verb = Literal["create", "delete", "get", "list", "patch", "update", "watch"]
_WATCHED: tuple[Verb, ...] = ("get", "list", "watch")
_OWNED: tuple[Verb, ...] = (*_WATCHED, "create", "patch", "delete")


@dataclass(frozen=True)
class Kind:
    """One kind. `child`: it is rendered, watched by label and pruned. `subresources` by verb."""

    api_version: str
    kind: str
    plural: str
    verbs: tuple[Verb, ...]
    child: bool = False
    subresources: tuple[tuple[str, tuple[Verb, ...]], ...] = ()
    namespaced: bool = True
    why: str = ""

    @property
    def id(self) -> str:
        """As `Capabilities` names it, e.g. `apps/v1/StatefulSet`."""
        return f"{self.api_version}/{self.kind}"

    @property
    def group(self) -> str:
        """API group; empty for the core group."""
        return self.api_version.rpartition("/")[0]


def _child(api_version: str, kind: str, plural: str) -> Kind:
    return Kind(api_version, kind, plural, _OWNED, child=True)


OURS = (
    Kind(
        "kimistack.dev/v1alpha1",
        "KimiDeployment",
        "kimideployments",
        (*_WATCHED, "patch"),
        subresources=(("finalizers", ("update",)), ("status", ("patch",))),
        why="patch: the finalizer of the teardown; the spec is never written. finalizers: some "
        "clusters ask for it where a child's owner reference blocks the owner's deletion",
    ),
)

CHILDREN = (
    _child("v1", "ConfigMap", "configmaps"),
    _child("v1", "Service", "services"),
    _child("v1", "ServiceAccount", "serviceaccounts"),
    _child("rbac.authorization.k8s.io/v1", "Role", "roles"),
    _child("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings"),
    _child("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    _child("apps/v1", "ControllerRevision", "controllerrevisions"),
    _child("apps/v1", "StatefulSet", "statefulsets"),
    _child("apps/v1", "DaemonSet", "daemonsets"),
    _child("apps/v1", "Deployment", "deployments"),
    _child("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    _child("policy/v1beta1", "PodDisruptionBudget", "poddisruptionbudgets"),
    _child("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers"),
    _child("autoscaling/v2beta2", "HorizontalPodAutoscaler", "horizontalpodautoscalers"),
    _child("keda.sh/v1alpha1", "ScaledObject", "scaledobjects"),
    _child("monitoring.coreos.com/v1", "PodMonitor", "podmonitors"),
    _child("monitoring.coreos.com/v1", "PrometheusRule", "prometheusrules"),
    _child("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes"),
    _child("batch/v1", "Job", "jobs"),
    _child("resource.k8s.io/v1", "ResourceClaimTemplate", "resourceclaimtemplates"),
    Kind(
        "kimistack.dev/v1alpha1",
        "KimiWorkers",
        "kimiworkers",
        _OWNED,
        child=True,
        subresources=(("status", ("patch",)),),
    ),
)
"""Kinds of rendered objects. A kind in two versions is written in the newest that is served."""

OTHERS = (
    Kind(
        "v1",
        "Pod",
        "pods",
        (*_WATCHED, "patch", "delete"),
        why="patch: the label that asks for a drain; delete: broken pods, those of lost nodes, and "
        "daemons of the pool whose spec changed",
    ),
    Kind("v1", "Secret", "secrets", ("create",), why="the call key, by POST alone: never read"),
    Kind("v1", "Event", "events", ("create", "patch")),
    Kind(
        "coordination.k8s.io/v1",
        "Lease",
        "leases",
        ("get", "create", "update", "list", "watch"),
        why="leader election",
    ),
)

CLUSTER_WIDE = (
    Kind(
        "v1",
        "Node",
        "nodes",
        ("get", "list"),
        namespaced=False,
        why="node eligibility; without this right the condition says so",
    ),
)

INSTALLED = (
    Kind("v1", "Namespace", "namespaces", ("get", "patch"), namespaced=False),
    Kind(
        "apiextensions.k8s.io/v1",
        "CustomResourceDefinition",
        "customresourcedefinitions",
        ("get", "patch"),
        namespaced=False,
    ),
    Kind(
        "rbac.authorization.k8s.io/v1",
        "ClusterRole",
        "clusterroles",
        ("get", "patch", "delete"),
        namespaced=False,
    ),
    Kind(
        "rbac.authorization.k8s.io/v1",
        "ClusterRoleBinding",
        "clusterrolebindings",
        ("get", "patch", "delete"),
        namespaced=False,
    ),
)
"""What `kimistack install` writes besides; the operator itself is granted none of it."""

KINDS = (*OURS, *CHILDREN, *OTHERS, *CLUSTER_WIDE)
BY_ID = {kind.id: kind for kind in (*KINDS, *INSTALLED)}


def watched_kinds(served: Capabilities) -> tuple[Kind, ...]:
    """Kinds of children and pods to watch: of a kind in several versions, the newest served."""
    found: dict[tuple[str, str], Kind] = {}
    for kind in (*CHILDREN, BY_ID["v1/Pod"]):
        if served.serves(kind.id):
            found.setdefault((kind.group, kind.kind), kind)
    return tuple(found.values())
