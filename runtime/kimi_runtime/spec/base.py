"""The bases of every spec model, all frozen: strict in what is asked, lenient in what is told."""

from pydantic import BaseModel, ConfigDict


class SpecModel(BaseModel):
    """A frozen value; an unknown key is an error that names it."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ReportModel(SpecModel):
    """What another process says of itself and its work; what a newer one adds is passed over.

    While a version is rolled out, processes of both read each other. A field that is added must
    have a default, and must be one that may be ignored: what changes how bytes are read changes the
    layout digest instead.
    """

    model_config = ConfigDict(extra="ignore")
