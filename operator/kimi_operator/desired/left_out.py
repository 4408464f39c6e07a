"""What is not rendered, and what keeps rendered pods from ever serving: both reach a condition."""

from dataclasses import dataclass
from typing import Literal

from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.desired.effective import Effective
from kimi_operator.observed import Capabilities

IMAGE_VOLUME = "StatefulSet.spec.template.spec.volumes.image"
RESOURCE_CLAIMS = "StatefulSet.spec.template.spec.resourceClaims"


@dataclass(frozen=True)
class LeftOut:
    """An object or field that is asked for and not written, and why, for people."""

    what: str
    reason: str


@dataclass(frozen=True)
class Obstacle:
    """Why the engines of this spec cannot serve here, whatever else is done."""

    reason: Literal["EngineNotConnected", "NotInThisVersion", "NotServedByCluster"]
    message: str


def obstacles(effective: Effective, capabilities: Capabilities) -> tuple[Obstacle, ...]:
    """Everything that keeps engine pods of the spec from serving.

    With `NotInThisVersion` and `NotServedByCluster` a pod would fail as it starts, or could not be
    written: none should be made. With `EngineNotConnected` engines run, but no router plans onto
    them.
    """
    spec = effective.deployment.spec
    found = [*_ours(spec)] if spec.engine == "kimistack" else [_foreign(spec)]
    if spec.model.source == "oci" and not capabilities.has_field(IMAGE_VOLUME):
        found.append(
            Obstacle(
                "NotServedByCluster",
                "model.source oci needs image volumes, which this cluster does not serve; use "
                "hf, pvc or hostPath",
            )
        )
    uses_claims = any(role.gpu.dra and role.gpus for _, role in spec.roles())
    if uses_claims and not capabilities.has_field(RESOURCE_CLAIMS):
        found.append(
            Obstacle(
                "NotServedByCluster",
                "gpu.dra needs dynamic resource allocation, which this cluster does not serve; "
                "use gpu.resource",
            )
        )
    return tuple(found)


def _foreign(spec: DeploymentSpec) -> Obstacle:
    return Obstacle(
        "EngineNotConnected",
        f"the router of this version does not speak to {spec.engine}; its pods run, and nothing "
        "is routed to them",
    )


def _ours(spec: DeploymentSpec) -> list[Obstacle]:
    return [
        Obstacle(
            "NotInThisVersion",
            f"{name}.parallelism: engine kimistack runs as one process on one device, this takes "
            f"{role.parallelism.gpus}",
        )
        for name, role in spec.roles()
        if role.parallelism.gpus > 1
    ]
