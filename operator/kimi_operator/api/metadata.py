"""Object metadata, as far as this project reads it."""

from typing import Annotated

from pydantic import ConfigDict, Field, NonNegativeInt
from pydantic.alias_generators import to_camel

from kimi_operator.api.base import ApiModel, Name, Text

NAME_CAP = 30
"""A StatefulSet's name plus its revision hash must fit a label value of 63 characters."""

ObjectName = Annotated[
    str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", min_length=1, max_length=NAME_CAP)
]


class ObjectMeta(ApiModel):
    """Kubernetes adds many more fields to a stored object; they are not ours to refuse."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel)

    name: ObjectName = Field(description="A DNS label of at most 30 characters.")
    namespace: Name | None = Field(None, description="Namespace.")
    labels: dict[Name, Text] = Field({}, description="Labels.")
    annotations: dict[Name, str] = Field({}, description="Annotations.")
    uid: Name | None = Field(None, description="Set by the API server.")
    generation: NonNegativeInt | None = Field(None, description="Set by the API server.")
    resource_version: Name | None = Field(None, description="Set by the API server.")
    deletion_timestamp: Name | None = Field(None, description="Set once deletion was asked for.")
