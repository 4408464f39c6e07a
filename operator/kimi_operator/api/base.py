"""The base of every API model: frozen, camelCase in YAML, unknown keys refused, rules in two forms.

A rule across fields is one `Rule` on the model that owns the fields. It holds both forms, so that
they are changed together: `holds` runs in Python (files, `kimistack up`, the operator's own
re-validation), `cel` runs in the API server (`x-kubernetes-validations`).

What a preset may set must reach the operator as "not written", so such fields keep their default
out of the schema (`presettable`): an API server that filled them in would hide the preset.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

GROUP = "kimistack.dev"
VERSION = "v1alpha1"
API_VERSION: Literal["kimistack.dev/v1alpha1"] = "kimistack.dev/v1alpha1"

Name = Annotated[str, Field(min_length=1, max_length=253)]
Text = Annotated[str, Field(max_length=4096)]
Folder = Annotated[str, Field(min_length=1, max_length=1024)]
FreeForm = Annotated[dict[str, Any], Field(json_schema_extra={"x-preserve": True})]
StringMap = Annotated[dict[Name, Text], Field(max_length=64)]


@dataclass(frozen=True)
class Rule:
    """A rule across the fields of one model.

    `holds` and `cel` say the same of the model and of `self`. `cel` is None where the API server
    cannot say it; `why_not_cel` then gives the reason. `field` is the path, below the model, that
    an error names. `figures` adds the numbers at hand to the message.
    """

    message: str
    holds: Callable[[Any], bool]
    cel: str | None
    field: str = ""
    why_not_cel: str = ""
    figures: Callable[[Any], str] | None = None

    def enforce(self, model: Any) -> None:
        """Raise pydantic's error of type `rule`, with `field` and `text` in its context."""
        if not self.holds(model):
            text = self.message + (f": {self.figures(model)}" if self.figures else "")
            raise PydanticCustomError("rule", "{text}", {"text": text, "field": self.field})


@dataclass(frozen=True)
class UpdateRule:
    """A rule between the stored object and its update; `cel` reads `oldSelf` and `self`."""

    message: str
    holds: Callable[[Any, Any], bool]
    cel: str


class ApiModel(BaseModel):
    """A frozen part of a resource."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        protected_namespaces=(),
        serialize_by_alias=True,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()
    update_rules: ClassVar[tuple[UpdateRule, ...]] = ()

    @model_validator(mode="after")
    def _keeps_its_rules(self) -> Self:
        for rule in self.rules:
            rule.enforce(self)
        return self

    def wrote(self, *fields: str) -> bool:
        """Whether all of these fields (Python names) were given, not defaulted."""
        return all(field in self.model_fields_set for field in fields)


def presettable(default: Any, description: str, **constraints: Any) -> Any:
    """A field that a preset may set: its default is left out of the CRD's schema."""
    extra = {"x-presettable": True, **constraints.pop("json_schema_extra", {})}
    return Field(default, description=description, json_schema_extra=extra, **constraints)


def keyed(*keys: str) -> dict[str, Any]:
    """Schema of a list that server-side apply merges by these keys."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


def given(path: str) -> str:
    """CEL: whether every step of `self.a.b.c` is there."""
    steps = path.split(".")
    return " && ".join(f"has({'.'.join(steps[:end])})" for end in range(2, len(steps) + 1))


def value_or(path: str, default: str) -> str:
    """CEL: the value at the path, or the default where it is absent."""
    return f"({given(path)} ? {path} : {default})"


def implies(condition: str, consequence: str) -> str:
    """CEL: the consequence wherever the condition holds."""
    return f"!({condition}) || ({consequence})"
