"""The commands of the stack on this machine: up, down, status, logs."""

import json
import os
import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kimi_operator.api.load import load_deployment
from kimi_operator.local.child import tail
from kimi_operator.local.display import shown
from kimi_operator.local.events import Event
from kimi_operator.local.folders import Folders, deployments
from kimi_operator.local.inspect import StackReport, live, reports, take_down, the_one
from kimi_operator.local.logs import follow, log_files
from kimi_operator.local.stack import Stack
from kimi_operator.local.up import Front, effective_of, prepared
from kimi_operator.local.up import supervise as run_supervisor
from kimi_operator.settings import shared_memory, state_home

app = typer.Typer()

FileOption = Annotated[
    Path | None,
    typer.Option("--file", "-f", help="A KimiDeployment; without it, the kimi-nano example."),
]
NameArgument = Annotated[
    str | None, typer.Argument(help="metadata.name of the deployment; not needed if there is one.")
]


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
    nodes: Annotated[
        int,
        typer.Option(
            min=1, max=10, help="As if on so many nodes: a pool each, and the workers over them."
        ),
    ] = 1,
) -> None:
    """Start a deployment as processes of this machine, and keep them running."""
    home, shm = state_home(), shared_memory()
    front = Front(host, port, api_key_file, nodes)
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
            # what any model can answer, kimi-nano included
            "messages": [
                {"role": "user", "content": "The garage key is 9932.\n\nWhat is the garage key?"}
            ],
            "max_tokens": 64,
            "temperature": 0,
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
    folders = Folders(home, shm, the_one(home, shm, name, "--name"))
    files = log_files(folders, process)
    for log in files:
        for line in tail(log, lines, within_bytes=2**22):
            typer.echo(line if process else f"{log.stem:>10} | {line}")
    if following:
        for log, line in follow(files):
            typer.echo(line if process else f"{log.stem:>10} | {line}")
