"""`KimiWorkers`: the `/scale` of one role, for scaling modes External and Managed."""

from typing import ClassVar, Literal

from pydantic import Field, NonNegativeInt

from kimi_operator.api.base import API_VERSION, ApiModel, Name, UpdateRule
from kimi_operator.api.metadata import ObjectMeta
from kimi_operator.api.roles import RoleName
from kimi_operator.api.status import WorkersStatus


class WorkersSpec(ApiModel):
    """How many instances a role has. Seeded by the operator with what is there, never with 0."""

    deployment: Name = Field(description="Name of the KimiDeployment. Immutable.")
    role: RoleName = Field(description="Its role. Immutable.")
    replicas: NonNegativeInt | None = Field(
        None, description="Instances; written through `/scale`."
    )

    update_rules: ClassVar = (
        UpdateRule(
            "deployment and role are immutable: the object is one role's scale",
            lambda old, new: (old.deployment, old.role) == (new.deployment, new.role),
            "self.deployment == oldSelf.deployment && self.role == oldSelf.role",
        ),
    )


class KimiWorkers(ApiModel):
    """The instances of one role of a KimiDeployment, as an autoscaler sees them."""

    api_version: Literal["kimistack.dev/v1alpha1"] = Field(
        API_VERSION, description="Version of this schema."
    )
    kind: Literal["KimiWorkers"] = Field("KimiWorkers", description="Kind of object.")
    metadata: "WorkersMeta" = Field(description="Name and labels.")
    spec: WorkersSpec = Field(description="What is wanted.")
    status: WorkersStatus | None = Field(None, description="What is; the operator writes it.")


class WorkersMeta(ObjectMeta):
    """Metadata of a KimiWorkers, whose name is the deployment's and the role's."""

    name: Name = Field(description="<deployment>-<role>.")
