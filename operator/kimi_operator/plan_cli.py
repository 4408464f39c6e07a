"""The command `kimistack plan`.

Exit status, as `kubectl diff` has it: 0 nothing would change, 1 something would, above 1 it cannot
be said: 2 for a file, flag or spec that is refused, 3 for a cluster that does not answer.
"""

import json
from typing import Annotated

import typer
from rich.console import Console

from kimi_operator.kubectl.flags import (
    Context,
    Kubeconfig,
    Namespace,
    Output,
    OutputOption,
)

app = typer.Typer()
CHANGES, REFUSED = 1, 2


@app.command()
def plan(
    file: Annotated[
        str, typer.Option("--file", "-f", help="A KimiDeployment; - for standard input.")
    ],
    output: OutputOption = Output.TEXT,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """Say what applying a KimiDeployment would change, and every step of it. Writes nothing.

    Exit code 0: nothing would change, 1: something would, 2: the spec is refused.
    """
    from kimi_operator.clock import unix_s
    from kimi_operator.kube import Kube
    from kimi_operator.kubectl.access import Access
    from kimi_operator.kubectl.plan_display import show_plan
    from kimi_operator.kubectl.planning import as_data, deployment_from, namespace_of, plan_for
    from kimi_operator.plan import Plan

    deployment = deployment_from(file)
    access = Access(kubeconfig, context, namespace)

    async def run(kube: Kube, default: str) -> Plan:
        where = namespace_of(deployment, namespace, default)
        return await plan_for(kube, deployment, where, unix_s())

    found = access.run(run)
    if output is Output.JSON:
        typer.echo(json.dumps(as_data(found), indent=1))
    else:
        show_plan(found, Console())
    if found.refusal is not None:
        raise typer.Exit(REFUSED)
    if not found.empty:
        raise typer.Exit(CHANGES)
