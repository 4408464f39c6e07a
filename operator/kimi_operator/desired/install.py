"""The operator's own objects: what `kimistack install` applies and what the Helm chart renders.

A test holds the chart to the same objects, so that the two cannot drift apart.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from kimi_operator.api.schema import crds
from kimi_operator.desired.rbac import PolicyRule, operator_rules, user_rules
from kimi_operator.observed import Manifest

RBAC = "rbac.authorization.k8s.io"
HTTP_PORT = 8080
UID = 65532


@dataclass(frozen=True)
class Install:
    """How the operator is installed. `namespaces`: where it looks; empty: its own only.

    `scope` Cluster looks everywhere. `node_access` lets it read nodes, which node eligibility
    needs; `user_roles` adds our resources to the cluster's `view` and `edit`.
    """

    image: str
    name: str = "kimistack-operator"
    instance: str = "kimistack"
    namespace: str = "kimistack"
    scope: Literal["Namespace", "Cluster"] = "Namespace"
    namespaces: tuple[str, ...] = ()
    version: str = ""
    image_pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    node_access: bool = True
    user_roles: bool = True
    pod_monitor: bool = False
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    cpu: str = "100m"
    memory: str = "256Mi"
    memory_limit: str = "1Gi"

    @property
    def watched(self) -> tuple[str, ...]:
        """Namespaces it looks at; of no meaning with scope Cluster."""
        return tuple(sorted(set(self.namespaces))) or (self.namespace,)

    @property
    def cluster_name(self) -> str:
        """Name of objects outside namespaces: another installation has others."""
        return f"{self.namespace}:{self.name}"


def crd_objects() -> list[Manifest]:
    """The CRDs of this version."""
    return [yaml.safe_load(text) for text in crds().values()]


def all_objects(install: Install) -> list[Manifest]:
    """Everything `kimistack install` writes, in the order of writing."""
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": install.namespace}}
    return [*crd_objects(), namespace, *install_objects(install)]


def install_objects(install: Install) -> list[Manifest]:
    """The operator's objects but for its CRDs and its namespace, in the order to apply them."""
    objects = [_service_account(install), *_rights(install)]
    if install.user_roles:
        objects += _user_roles(install)
    objects.append(_deployment(install))
    if install.pod_monitor:
        objects.append(_pod_monitor(install))
    return objects


def as_yaml(objects: Iterable[Manifest]) -> str:
    """The objects as one YAML stream, every one written out."""
    return yaml.dump_all(list(objects), Dumper=_Plain, sort_keys=False, explicit_start=True)


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def selector(install: Install) -> dict[str, str]:
    """What selects the operator's pod; it never changes."""
    return {
        "app.kubernetes.io/name": "kimistack-operator",
        "app.kubernetes.io/instance": install.instance,
    }


def _metadata(
    install: Install, name: str, *, namespace: str | None, labels: dict[str, str] | None = None
) -> dict[str, Any]:
    common = {**selector(install), "app.kubernetes.io/part-of": "kimistack"}
    if install.version:
        common["app.kubernetes.io/version"] = install.version
    inside = {} if namespace is None else {"namespace": namespace}
    return {"name": name, **inside, "labels": {**common, **(labels or {})}}


def _service_account(install: Install) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": _metadata(install, install.name, namespace=install.namespace),
        "automountServiceAccountToken": False,
    }


def _rights(install: Install) -> list[Manifest]:
    rules = operator_rules()
    if install.scope == "Cluster":
        everywhere = [*rules["namespaced"], *(rules["nodes"] if install.node_access else [])]
        return _granted(install, install.cluster_name, None, everywhere)
    objects: list[Manifest] = []
    for namespace in install.watched:
        objects += _granted(install, install.name, namespace, rules["namespaced"])
    if install.namespace not in install.watched:
        objects += _granted(install, install.name, install.namespace, rules["election"])
    if install.node_access:
        objects += _granted(install, f"{install.cluster_name}-nodes", None, rules["nodes"])
    return objects


def _granted(
    install: Install, name: str, namespace: str | None, rules: Sequence[PolicyRule]
) -> list[Manifest]:
    """A role and its binding to the operator's account."""
    kind = "ClusterRole" if namespace is None else "Role"
    metadata = _metadata(install, name, namespace=namespace)
    subject = {"kind": "ServiceAccount", "name": install.name, "namespace": install.namespace}
    return [
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": kind,
            "metadata": metadata,
            "rules": list(rules),
        },
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": f"{kind}Binding",
            "metadata": metadata,
            "roleRef": {"apiGroup": RBAC, "kind": kind, "name": name},
            "subjects": [subject],
        },
    ]


def _user_roles(install: Install) -> list[Manifest]:
    rules = user_rules()
    aggregated = {"view": ("view", "edit", "admin"), "edit": ("edit", "admin")}
    return [
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": "ClusterRole",
            "metadata": _metadata(
                install,
                f"{install.cluster_name}-{verb}",
                namespace=None,
                labels={f"{RBAC}/aggregate-to-{role}": "true" for role in roles},
            ),
            "rules": rules[verb],
        }
        for verb, roles in aggregated.items()
    ]


def _deployment(install: Install) -> Manifest:
    pod: dict[str, Any] = {
        "serviceAccountName": install.name,
        "automountServiceAccountToken": True,
        "terminationGracePeriodSeconds": 30,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UID,
            "runAsGroup": UID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(install)],
        "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}}],
    }
    if install.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in install.image_pull_secrets]
    labels = _metadata(install, install.name, namespace=None)["labels"]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(install, install.name, namespace=install.namespace),
        "spec": {
            "replicas": 1,
            # two versions at work at once would undo each other's writes
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": selector(install)},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _container(install: Install) -> Manifest:
    return {
        "name": "operator",
        "image": install.image,
        "imagePullPolicy": install.image_pull_policy,
        "command": ["python", "-m", "kimi_operator.main"],
        "env": [
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {
                "name": "POD_NAMESPACE",
                "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}},
            },
            {
                "name": "KIMISTACK_NAMESPACES",
                "value": "*" if install.scope == "Cluster" else ",".join(install.watched),
            },
            {"name": "KIMISTACK_HTTP_PORT", "value": str(HTTP_PORT)},
            {"name": "KIMISTACK_LOG_LEVEL", "value": install.log_level},
        ],
        "ports": [{"name": "http", "containerPort": HTTP_PORT}],
        "startupProbe": _probe("/healthz", period_s=2, failures=30),
        "livenessProbe": _probe("/healthz", period_s=10, failures=3),
        "readinessProbe": _probe("/readyz", period_s=5, failures=3),
        "resources": {
            "requests": {"cpu": install.cpu, "memory": install.memory},
            "limits": {"memory": install.memory_limit},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }


def _probe(path: str, *, period_s: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _pod_monitor(install: Install) -> Manifest:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": _metadata(install, install.name, namespace=install.namespace),
        "spec": {
            "selector": {"matchLabels": selector(install)},
            "podMetricsEndpoints": [{"port": "http", "path": "/metrics"}],
        },
    }
