"""The files a process proves itself with, and knows its peers by."""

from pathlib import Path

from pydantic import Field

from kimi_runtime.spec.base import SpecModel


class TlsFiles(SpecModel):
    """PEM files. They are read again when they change, so whoever renews them replaces them.

    One certificate serves both ways: daemons are servers and clients of each other.
    """

    certificate: Path = Field(description="This process' certificate, and any between it and `ca`.")
    key: Path = Field(description="Its private key.")
    ca: Path = Field(description="Who signs the certificates of the deployment's processes.")
    name: str | None = Field(
        None,
        description="What peers' certificates are made out to; none: to the host that is called.",
    )
