"""The command `kimistack`: the local stack here, the runtime's own commands from the runtime."""

import json
import os
import signal
import sys
from collections.abc import Sequence
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kimi_operator.api.load import load_deployment
from kimi_operator.desired.install import as_yaml
from kimi_operator.desired.render import at_rest
from kimi_operator.install_cli import app as install_app
from kimi_operator.kimi_cli import app as kimi_app
from kimi_operator.kimi_cli import lacks_extra
from kimi_operator.local.child import tail
from kimi_operator.local.display import shown
from kimi_operator.local.events import Event
from kimi_operator.local.folders import Folders, deployments
from kimi_operator.local.inspect import StackReport, live, reports, take_down, the_one
from kimi_operator.local.logs import follow, log_files
from kimi_operator.local.stack import Stack
from kimi_operator.local.up import Front, StartFailed, effective_of, prepared
from kimi_operator.local.up import supervise as run_supervisor
from kimi_operator.observed import K8S_1_20, K8S_CURRENT, Capabilities
from kimi_operator.plan_cli import app as plan_app
from kimi_operator.preflight_cli import app as preflight_app
from kimi_operator.settings import shared_memory, state_home
from kimi_runtime.cli import app as runtime_app
from kimi_runtime.errors import KimistackError

app = typer.Typer(
    name="kimistack",
    help="Serve Kimi models: a deployment as processes of this machine, or its parts alone.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

FileOption = Annotated[
    Path | None,
    typer.Option("--file", "-f", help="A KimiDeployment; without it, the kimi-nano example."),
]
NameArgument = Annotated[
    str | None, typer.Argument(help="metadata.name of the deployment; not needed if there is one.")
]


class Server(StrEnum):
    """The Kubernetes API servers that objects are rendered for."""

    V1_20 = "1.20"
    CURRENT = "current"

    @property
    def capabilities(self) -> Capabilities:
        """What such a server serves."""
        return K8S_1_20 if self is Server.V1_20 else K8S_CURRENT


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
def up(
    file: FileOption = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return once it serves; it goes on running.")
    ] = False,
    host: Annotated[
        str, typer.Option(help="Where the router listens; other machines reach it at 0.0.0.0.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="The router's port, not the file's.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="API keys, one a line; without it none is asked for.")
    ] = None,
) -> None:
    """Start a deployment as processes of this machine, and keep them running."""
    home, shm = state_home(), shared_memory()
    front = Front(host, port, api_key_file)
    console = Console(stderr=True)
    with prepared(effective_of(file), home, shm, front) as ready:
        stack = ready.stack
        _say_first(console, stack, cleaned=ready.cleaned, front=front)
        with shown(stack, console) as tell:

            def heard(event: Event) -> None:
                tell(event)
                if event.kind == "serving":
                    _say_ready(stack, detached=detach, keyed=api_key_file is not None)

            if detach:
                ready.detach(heard, home, shm)
            else:
                ready.run(heard)


def _say_first(console: Console, stack: Stack, *, cleaned: bool, front: Front) -> None:
    if cleaned:
        console.print("cleaned up after a stack that was killed", highlight=False)
    if front.host not in ("127.0.0.1", "localhost", "::1") and front.api_keys is None:
        console.print(
            f"anybody who reaches {front.host} can use this model; ask for keys with "
            "--api-key-file",
            highlight=False,
        )
    console.print(f"starting {stack.name}; logs are in {stack.state_dir / 'logs'}", highlight=False)


def _say_ready(stack: Stack, *, detached: bool, keyed: bool) -> None:
    body = json.dumps(
        {
            "model": stack.model,
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 16,
        }
    )
    key = " -H 'Authorization: Bearer YOUR_KEY'" if keyed else ""
    typer.echo(f"\n{stack.name} serves {stack.model} at {stack.url}/v1\n")
    typer.echo(
        f"curl {stack.url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    )
    end = f"kimistack down {stack.name}" if detached else "Ctrl-C"
    typer.echo(f"\nstop it with: {end}")


@app.command(hidden=True)
def supervise(stack_file: Path, home: Path, shm: Path, events_fd: int) -> None:
    """Run a prepared stack; `up --detach` starts this and hands it the deployment's lock."""
    stack = Stack.model_validate_json(stack_file.read_bytes())
    watcher: int | None = events_fd

    def tell(event: Event) -> None:
        nonlocal watcher
        line = event.model_dump_json() + "\n"
        typer.echo(line, nl=False)
        if watcher is None:
            return
        try:
            os.write(watcher, line.encode())
        except BrokenPipeError:
            os.close(watcher)
            watcher = None  # whoever started us is gone; the log has it all

    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    run_supervisor(stack, Folders(home, shm, stack.name), tell)


@app.command()
def down(
    name: NameArgument = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="The deployment that this file names.")
    ] = None,
) -> None:
    """Stop a deployment and remove its shared memory. Stopping what is stopped is no error."""
    home, shm = state_home(), shared_memory()
    if file is not None:
        name = load_deployment(file).name
    elif name is not None:
        name = the_one(home, shm, name)
    elif not live(home, shm):
        typer.echo("nothing is running")
        return
    else:
        name = the_one(home, shm, None)
    was_running = name in deployments(home) and take_down(Folders(home, shm, name))
    typer.echo(f"{name} is stopped" if was_running else f"{name} was not running")


@app.command()
def status(
    name: NameArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show deployments of this machine and their processes. Exit code 1 if one is not ready."""
    home, shm = state_home(), shared_memory()
    names = (the_one(home, shm, name),) if name else deployments(home)
    found = reports(home, shm, names)
    if name is None:
        found = tuple(report for report in found if report.phase != "down")
    if as_json:
        typer.echo(json.dumps([report.model_dump(mode="json") for report in found], indent=1))
    else:
        _show(found)
    if any(report.phase != "ready" for report in found):
        raise typer.Exit(1)


def _show(found: tuple[StackReport, ...]) -> None:
    console = Console()
    if not found:
        console.print("nothing is running; start with: kimistack up", highlight=False)
    for report in found:
        where = f", {report.model} at {report.url}/v1" if report.url else ""
        console.print(f"{report.name}: {report.phase}{where}", highlight=False, soft_wrap=True)
        if not report.processes:
            continue
        table = Table(box=None, pad_edge=False)
        for column in ("PROCESS", "ROLE", "PID", "PORT", "READY", "RESTARTS", "UPTIME", "MEMORY"):
            table.add_column(column, no_wrap=True)
        for line in report.processes:
            table.add_row(
                line.process,
                line.role,
                str(line.pid or "-"),
                str(line.port),
                "yes" if line.ready else line.phase,
                str(line.restarts),
                "-" if line.uptime_s is None else _age(line.uptime_s),
                "-" if line.memory_bytes is None else f"{line.memory_bytes / 2**20:.0f}MiB",
            )
        console.print(table)


def _age(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


@app.command()
def logs(
    process: Annotated[
        str | None, typer.Argument(help="E.g. decode-0; without it, all processes.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Which deployment.")] = None,
    lines: Annotated[int, typer.Option("-n", min=0, help="How many of the last lines.")] = 50,
    following: Annotated[bool, typer.Option("--follow", "-f", help="Go on printing.")] = False,
) -> None:
    """Print what processes wrote."""
    home, shm = state_home(), shared_memory()
    folders = Folders(home, shm, the_one(home, shm, name))
    files = log_files(folders, process)
    for log in files:
        for line in tail(log, lines, within_bytes=2**22):
            typer.echo(line if process else f"{log.stem:>10} | {line}")
    if following:
        for log, line in follow(files):
            typer.echo(line if process else f"{log.stem:>10} | {line}")


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
