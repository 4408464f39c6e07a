"""The base of every spec model: frozen, unknown keys refused."""

from pydantic import BaseModel, ConfigDict


class SpecModel(BaseModel):
    """A frozen value; an unknown key is an error that names it."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
