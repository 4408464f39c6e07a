"""What the cluster says, frozen: the only thing decisions are made from.

`kube` fills these models, everything that decides reads them. Nothing here is remembered between
two passes: a field that a pass cannot see again has no place in `Observed`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from kimi_operator.api.roles import RoleName

Manifest = dict[str, Any]
"""An object of the API as plain data, with the names of the YAML."""

DEPLOYMENT_LABEL = "kimistack.dev/deployment"
OWNER_UID_LABEL = "kimistack.dev/owner-uid"
ROLE_LABEL = "kimistack.dev/role"
REVISION_LABEL = "kimistack.dev/revision"
INSTANCE_LABEL = "kimistack.dev/instance"
DRAINING_LABEL = "kimistack.dev/draining"
"""On pods the router must not plan onto any more; the value is "true"."""
LEASE = "kimistack.dev/lease"
"""Annotation of pods whose worker ends its work by itself once no router has heard of it for so
many seconds."""
DRAINING_SINCE = "kimistack.dev/draining-since"
"""Annotation beside it: when the drain was asked for, in seconds since the epoch."""
EVICT = "kimistack.dev/evict"
"""Annotation of an instance's StatefulSet, set by a person: "true" has it drained, deleted and
replaced by a new one. It goes with the StatefulSet."""


class ObjectKey(NamedTuple):
    """What makes an object the same object. `namespace` is empty for a cluster-wide kind."""

    api_version: str
    kind: str
    namespace: str
    name: str

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> Self:
        """The key of a manifest."""
        metadata = manifest["metadata"]
        return cls(
            manifest["apiVersion"],
            manifest["kind"],
            metadata.get("namespace") or "",
            metadata["name"],
        )

    def __str__(self) -> str:
        """`StatefulSet ns/name`, as messages name it."""
        return (
            f"{self.kind} {self.namespace}/{self.name}"
            if self.namespace
            else f"{self.kind} {self.name}"
        )


FIELDS = frozenset(
    {
        "PodDisruptionBudget.spec.unhealthyPodEvictionPolicy",
        "Service.spec.internalTrafficPolicy",
        "StatefulSet.spec.minReadySeconds",
        "StatefulSet.spec.persistentVolumeClaimRetentionPolicy",
        "StatefulSet.spec.template.spec.containers.lifecycle.preStop.sleep",
        "StatefulSet.spec.template.spec.containers.livenessProbe.grpc",
        "StatefulSet.spec.template.spec.containers.livenessProbe.terminationGracePeriodSeconds",
        "StatefulSet.spec.template.spec.initContainers.restartPolicy",
        "StatefulSet.spec.template.spec.resourceClaims",
        "StatefulSet.spec.template.spec.schedulingGates",
        "StatefulSet.spec.template.spec.securityContext.seccompProfile",
        "StatefulSet.spec.template.spec.topologySpreadConstraints",
        "StatefulSet.spec.template.spec.topologySpreadConstraints.matchLabelKeys",
        "StatefulSet.spec.template.spec.volumes.image",
    }
)
"""Fields that not every server has. A server-side apply of one that it lacks is answered with 500,
so renderers ask first; lists are walked into without an index."""


@dataclass(frozen=True)
class Capabilities:
    """What the API server serves: kinds as `policy/v1/PodDisruptionBudget` and `v1/Service`."""

    version: tuple[int, int]
    kinds: frozenset[str]
    fields: frozenset[str]

    def serves(self, kind: str) -> bool:
        """Whether objects of the kind (`group/version/Kind`) can be written."""
        return kind in self.kinds

    def has_field(self, path: str) -> bool:
        """Whether the server knows the field; `path` is one of `FIELDS` (KeyError otherwise)."""
        if path not in FIELDS:
            raise KeyError(f"{path} is not probed for: add it to observed.FIELDS")
        return path in self.fields


_EVERYWHERE = frozenset(
    {
        "v1/ConfigMap",
        "v1/Event",
        "v1/Node",
        "v1/Pod",
        "v1/Secret",
        "v1/Service",
        "v1/ServiceAccount",
        "apps/v1/ControllerRevision",
        "apps/v1/DaemonSet",
        "apps/v1/Deployment",
        "apps/v1/StatefulSet",
        "batch/v1/Job",
        "coordination.k8s.io/v1/Lease",
        "kimistack.dev/v1alpha1/KimiDeployment",
        "kimistack.dev/v1alpha1/KimiWorkers",
        "networking.k8s.io/v1/NetworkPolicy",
        "rbac.authorization.k8s.io/v1/Role",
        "rbac.authorization.k8s.io/v1/RoleBinding",
    }
)

K8S_1_20 = Capabilities(
    version=(1, 20),
    kinds=_EVERYWHERE
    | {
        "autoscaling/v1/HorizontalPodAutoscaler",
        "autoscaling/v2beta2/HorizontalPodAutoscaler",
        "policy/v1beta1/PodDisruptionBudget",
    },
    fields=frozenset(
        {
            "StatefulSet.spec.template.spec.securityContext.seccompProfile",
            "StatefulSet.spec.template.spec.topologySpreadConstraints",
        }
    ),
)
"""A bare server of Kubernetes 1.20."""

K8S_CURRENT = Capabilities(
    version=(1, 36),
    kinds=_EVERYWHERE
    | {
        "autoscaling/v1/HorizontalPodAutoscaler",
        "autoscaling/v2/HorizontalPodAutoscaler",
        "keda.sh/v1alpha1/ScaledObject",
        "monitoring.coreos.com/v1/PodMonitor",
        "monitoring.coreos.com/v1/PrometheusRule",
        "policy/v1/PodDisruptionBudget",
        "resource.k8s.io/v1/ResourceClaimTemplate",
    },
    fields=FIELDS,
)
"""A server of today, with KEDA and the Prometheus operator installed."""


@dataclass(frozen=True, order=True)
class InstanceId:
    """One instance: a StatefulSet of `parallelism.nodes` pods."""

    role: RoleName
    revision: str
    index: int


@dataclass(frozen=True)
class InstanceView:
    """One instance as the cluster and its own load report show it.

    `serving`: every pod is ready and no drain was asked for. `in_flight` and `cached_tokens` are
    None where no load report arrived. Times are in seconds since the epoch. `failures` are one
    line each, reason first (`ImagePullBackOff: …`), of its pods.
    """

    id: InstanceId
    pods_desired: int
    pods_ready: int
    serving: bool
    draining: bool = False
    in_flight: int | None = None
    cached_tokens: int | None = None
    created_s: float = 0.0
    ready_since_s: float | None = None
    failures: tuple[str, ...] = ()
    pods_scheduled: int = 0
    nodes: tuple[str, ...] = ()
    """Names of the nodes its pods are on."""
    terminating: bool = False
    """Deletion was asked for; its pods still count as GPUs in use."""
    draining_since_s: float | None = None
    """When the drain was asked for, as its pods' annotation says."""
    unready_since_s: float | None = None
    """When the first of its pods stopped being ready; None while ready or never seen ready."""
    pods_made: int = 0
    """Pods that are there and not ending, on a node or not."""
    pods_not_started: tuple[str, ...] = ()
    """Names of pods on a node of which no container has begun."""
    evicted: bool = False
    """A person asked for it to be drained and replaced."""

    @property
    def ready(self) -> bool:
        """Whether all its pods are."""
        return self.pods_desired > 0 and self.pods_ready >= self.pods_desired


@dataclass(frozen=True)
class Signals:
    """What the routers report over their last window, None where nothing was reported.

    `kv_use` is the used share of the KV memory, 0 to 1; `at_s` when it was read, since the epoch.
    """

    queue_s: float | None = None
    ttft_p95_s: float | None = None
    itl_p95_s: float | None = None
    kv_use: float | None = None
    transfer_backlog_s: float | None = None
    at_s: float | None = None
    waiting_requests: float | None = None
    """Requests that no worker has taken yet, those parked while no worker runs included."""
    waiting_tokens: float | None = None
    """Prompt tokens of these requests."""


@dataclass(frozen=True)
class NodeView:
    """A node. `allocatable` is in whole units: cores, bytes, devices."""

    name: str
    labels: Mapping[str, str]
    taints: tuple[Mapping[str, str], ...]
    allocatable: Mapping[str, float]
    ready: bool
    unschedulable: bool = False
    unready_since_s: float | None = None
    """Since when its kubelet has not said that it is ready, in seconds since the epoch."""
    taken: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """What pods of other deployments request there: amounts by resource, by `namespace/name`."""


@dataclass(frozen=True)
class LostPod:
    """A worker's pod on a node that is not ready any more, so that nobody may stop it there.

    `expired`: its worker's lease has certainly ended, so it does nothing any more and the pod can
    be taken away. Otherwise `waits_for` says what that still needs, in words that time alone does
    not change; `heals`: nobody need do anything.
    """

    pod: str
    uid: str
    instance: InstanceId
    node: str
    since_s: float | None
    expired: bool
    heals: bool
    waits_for: str = ""


@dataclass(frozen=True)
class Observed:
    """All that one pass decides from.

    `children` are the objects that carry the deployment's owner label, ControllerRevisions
    included; `revisions` are those of its rendered revisions, oldest first. `nodes` is None where
    the operator may not list nodes. `workers_replicas` has the roles whose KimiWorkers says a
    number.
    """

    children: Mapping[ObjectKey, Manifest]
    instances: tuple[InstanceView, ...]
    revisions: tuple[Manifest, ...]
    nodes: tuple[NodeView, ...] | None
    signals: Signals
    workers_replicas: Mapping[RoleName, int]
    capabilities: Capabilities
    lost: tuple[LostPod, ...] = ()
