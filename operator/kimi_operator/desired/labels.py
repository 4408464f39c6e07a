"""Metadata of what is rendered: labels that say what an object is and whose it is.

Labels of a selector never change. Nothing of the deployment's own labels or annotations is copied:
a GitOps tool's tracking label on a child would make that tool delete it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kimi_operator.api.base import API_VERSION
from kimi_operator.api.deployment import KimiDeployment
from kimi_operator.observed import (
    DEPLOYMENT_LABEL,
    INSTANCE_LABEL,
    OWNER_UID_LABEL,
    REVISION_LABEL,
    ROLE_LABEL,
    InstanceId,
    Manifest,
)

COMPONENT_LABEL = "app.kubernetes.io/component"
MANAGED_BY = {"app.kubernetes.io/managed-by": "kimi-operator"}
Component = Literal["engine", "umbp", "router", "deployment", "preflight"]


@dataclass(frozen=True)
class Owner:
    """The KimiDeployment that rendered objects belong to. `uid` is None off the cluster."""

    name: str
    namespace: str
    uid: str | None

    @classmethod
    def of(cls, deployment: KimiDeployment) -> "Owner":
        """The owner a deployment is; without a namespace of its own, in `default`."""
        metadata = deployment.metadata
        return cls(deployment.name, metadata.namespace or "default", metadata.uid)


def labels_of(owner: Owner, component: Component) -> dict[str, str]:
    """Labels of every object of a component."""
    return {
        "app.kubernetes.io/name": "kimistack",
        "app.kubernetes.io/instance": owner.name,
        COMPONENT_LABEL: component,
        **MANAGED_BY,
        DEPLOYMENT_LABEL: owner.name,
        **({OWNER_UID_LABEL: owner.uid} if owner.uid else {}),
    }


def selector_of(owner: Owner, component: Component) -> dict[str, str]:
    """What selects the pods of a component, whatever their revision."""
    return {DEPLOYMENT_LABEL: owner.name, COMPONENT_LABEL: component}


def instance_selector(owner: Owner, instance: InstanceId) -> dict[str, str]:
    """What selects the pods of one instance, and no others ever."""
    return {
        DEPLOYMENT_LABEL: owner.name,
        ROLE_LABEL: instance.role,
        REVISION_LABEL: instance.revision,
        INSTANCE_LABEL: str(instance.index),
    }


def instance_labels(owner: Owner, instance: InstanceId) -> dict[str, str]:
    """Labels of an instance's objects and pods."""
    return labels_of(owner, "engine") | instance_selector(owner, instance)


def metadata_of(
    owner: Owner,
    name: str,
    component: Component,
    *,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Manifest:
    """Metadata of an object that the deployment controls, so that it goes with it."""
    metadata: Manifest = {
        "name": name,
        "namespace": owner.namespace,
        "labels": labels_of(owner, component) | dict(labels or {}),
    }
    if annotations:
        metadata["annotations"] = dict(annotations)
    if owner.uid:
        metadata["ownerReferences"] = [
            {
                "apiVersion": API_VERSION,
                "kind": "KimiDeployment",
                "name": owner.name,
                "uid": owner.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
    return metadata
