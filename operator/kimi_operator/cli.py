"""The command `kimistack`: the local stack here, the runtime's own commands from the runtime."""

import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from kimi_operator.capacity_cli import capacity_spec
from kimi_operator.desired.install import as_yaml
from kimi_operator.desired.render import at_rest
from kimi_operator.install_cli import app as install_app
from kimi_operator.kimi_cli import app as kimi_app
from kimi_operator.kimi_cli import lacks_extra
from kimi_operator.local.up import StartFailed, effective_of
from kimi_operator.local_cli import FileOption
from kimi_operator.local_cli import app as local_app
from kimi_operator.observed import K8S_1_20, K8S_CURRENT, Capabilities
from kimi_operator.plan_cli import app as plan_app
from kimi_operator.preflight_cli import app as preflight_app
from kimi_runtime.cli import app as runtime_app
from kimi_runtime.cli import tell_capacity
from kimi_runtime.errors import KimistackError

app = typer.Typer(
    name="kimistack",
    help="Serve Kimi models: a deployment as processes of this machine, or its parts alone.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Server(StrEnum):
    """The Kubernetes API servers that objects are rendered for."""

    V1_20 = "1.20"
    CURRENT = "current"

    @property
    def capabilities(self) -> Capabilities:
        """What such a server serves."""
        return K8S_1_20 if self is Server.V1_20 else K8S_CURRENT


app.registered_commands += local_app.registered_commands


@app.callback(invoke_without_command=True)
def _top(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", is_eager=True)
    ] = False,
) -> None:
    if show_version:
        try:
            typer.echo(f"kimistack {version('kimistack')}")
        except PackageNotFoundError:
            typer.echo("kimistack (not installed: run from its source)")
        raise typer.Exit


@app.command()
def spec(
    file: FileOption = None,
    effective: Annotated[
        bool,
        typer.Option(
            "--effective", help="All values, each with its origin: user, preset, default."
        ),
    ] = False,
) -> None:
    """Check a KimiDeployment without starting anything, and print what it says."""
    resolved = effective_of(file)
    typer.echo(resolved.as_text() if effective else resolved.as_written_text(), nl=False)


@app.command()
def render(
    file: FileOption = None,
    server: Annotated[
        Server, typer.Option("--server", help="What the API server can be asked for.")
    ] = Server.CURRENT,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON List instead of YAML.")] = False,
) -> None:
    """Print every object a KimiDeployment becomes; what keeps one from serving goes to stderr."""
    objects = at_rest(effective_of(file), server.capabilities)
    for left in objects.left_out:
        typer.echo(f"left out: {left.what}: {left.reason}", err=True)
    for obstacle in objects.obstacles:
        typer.echo(f"cannot serve: {obstacle.reason}: {obstacle.message}", err=True)
    if as_json:
        items = {"apiVersion": "v1", "kind": "List", "items": list(objects.manifests)}
        typer.echo(json.dumps(items, indent=2))
    else:
        typer.echo(as_yaml(objects.manifests), nl=False)


@app.command()
def capacity(
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help="A KimiDeployment, or model, gpu and shapes alone; none: the kimi-nano example.",
        ),
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option("--concurrency", min=1, help="Requests at once; repeat it for more."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the same as JSON.")
    ] = None,
) -> None:
    """Say what a deployment's GPUs hold, its largest context, and how it bears load."""
    asked = capacity_spec(file)
    if concurrency:
        asked = asked.model_copy(update={"concurrency": tuple(concurrency)})
    tell_capacity(asked, json_file)


for part in (plan_app, preflight_app, kimi_app, install_app):
    app.registered_commands += part.registered_commands
# The runtime's commands stand beside ours; they load torch only once they run.
app.registered_commands += runtime_app.registered_commands
app.registered_groups += runtime_app.registered_groups


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. A KimistackError is one line on stderr and its exit code."""
    try:
        app(None if arguments is None else list(arguments))
    except StartFailed as exc:  # its further lines are the end of a log
        typer.echo(f"kimistack: {exc}", err=True)
        sys.exit(exc.exit_code)
    except KimistackError as exc:
        typer.echo(f"kimistack: {' '.join(str(exc).split())}", err=True)
        sys.exit(exc.exit_code)
    except ModuleNotFoundError as exc:
        text = lacks_extra(exc)
        if text is None:
            raise
        typer.echo(f"kimistack: {text}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
