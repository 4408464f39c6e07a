"""kubectl's own flags, as every command that speaks to a cluster takes them."""

from enum import StrEnum
from typing import Annotated

import typer

Kubeconfig = Annotated[
    str | None,
    typer.Option(
        "--kubeconfig",
        envvar="KUBECONFIG",
        help="Without it: ~/.kube/config, or the pod's own account.",
    ),
]
Context = Annotated[
    str | None, typer.Option("--context", help="Of the kubeconfig; without it its current one.")
]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Without it the context's, or default.")
]


class Output(StrEnum):
    """How an answer is printed."""

    TEXT = "text"
    JSON = "json"


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="text or json.")]
