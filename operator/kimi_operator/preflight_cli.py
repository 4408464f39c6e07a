"""The command `kimistack preflight`, and the one that a preflight pod runs.

Exit status 0: the machine has what the specs ask for, 1: it lacks something, 2: a wrong file.
"""

import json
from pathlib import Path
from platform import node as host_name
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kimi_operator.api.load import load_deployment
from kimi_operator.desired.effective import resolve
from kimi_operator.kubectl.flags import Output, OutputOption
from kimi_operator.preflight.checks import Finding, Wanted, findings
from kimi_operator.preflight.demand import wanted_of
from kimi_operator.preflight.machine import machine_facts
from kimi_operator.preflight.report import Report, last_words
from kimi_operator.presets.preset import load_preset
from kimi_runtime.errors import ConfigError

app = typer.Typer()
LACKS = 1


@app.command()
def preflight(
    file: Annotated[
        list[Path],
        typer.Option("--file", "-f", "--spec", help="A KimiDeployment; several are added up."),
    ],
    output: OutputOption = Output.TEXT,
    root: Annotated[Path, typer.Option(help="Where the machine's file system is mounted.")] = Path(
        "/"
    ),
) -> None:
    """Check whether this machine has what KimiDeployments ask for. Exit code 1 if it does not."""
    wanted = [wanted_of(resolve(load_deployment(path), load_preset, str(path))) for path in file]
    report = _looked(wanted, host_name(), root)
    if output is Output.JSON:
        typer.echo(json.dumps(report.model_dump(mode="json"), indent=1))
    else:
        _show(report, [one.deployment for one in wanted])
    if not report.ok:
        raise typer.Exit(LACKS)


@app.command(name="preflight-node", hidden=True)
def preflight_node(
    checks: Annotated[str, typer.Option(help="What to check, as JSON.")],
    root: Annotated[Path, typer.Option(help="Where the node's file system is mounted.")],
    report: Annotated[Path, typer.Option(help="The file for the result, in 4096 bytes.")],
    node: Annotated[str, typer.Option(envvar="NODE_NAME", help="Name of the node.")] = "",
) -> None:
    """Look at a node and leave the result where its kubelet finds it."""
    try:
        wanted = Wanted.model_validate_json(checks)
    except ValidationError as exc:
        raise ConfigError(f"--checks: {exc.errors(include_url=False)[0]['msg']}") from exc
    found = _looked([wanted], node or host_name(), root)
    report.write_text(last_words(found))
    _show(found, [wanted.deployment])
    if not found.ok:
        raise typer.Exit(LACKS)


def _looked(wanted: list[Wanted], node: str, root: Path) -> Report:
    facts = machine_facts(node, wanted, root)
    return Report(node=node, findings=findings(wanted, facts))


def _show(report: Report, deployments: list[str]) -> None:
    console = Console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("CHECK", "", "THERE IS", "WANTED"):
        table.add_column(column, overflow="fold")
    for finding in report.findings:
        table.add_row(finding.check, _word(finding), finding.have, finding.want)
    for_what = ", ".join(deployments)
    console.print(Text(f"{report.node}, for {for_what}", style="bold"), soft_wrap=True)
    console.print(table)
    for finding in report.findings:
        if not finding.ok:
            console.print(
                Text(f"{finding.check}: {finding.remedy}", style="yellow"), soft_wrap=True
            )


def _word(finding: Finding) -> Text:
    return Text("ok", style="green") if finding.ok else Text("no", style="red")
