"""The runtime's subcommands: `worker`, `router`, `umbp`, each started from one spec file,
`quality`, which examines a model, `sim`, which simulates deployments, `bench`, which replays
sessions against a live endpoint, and `explain`, which tells why a router decided as it did.

Exit status 0 after a drain, 2 with one line on standard error for a wrong spec, file, key or port,
1 with one line for everything else that was foreseen.
"""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, ValidationError

from kimi_runtime.bench.replay.cli import bench
from kimi_runtime.capacity_cli import tell_capacity
from kimi_runtime.errors import ConfigError, KimistackError
from kimi_runtime.explain_cli import explain
from kimi_runtime.settings import read_settings
from kimi_runtime.sim.cli import app as sim_app
from kimi_runtime.spec.file import not_that, read_spec
from kimi_runtime.spec.router import RouterSpec
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.spec.worker import FileWeights, PackagedWeights, WorkerSpec
from kimi_runtime.umbp_cli import app as umbp_app

__all__ = ["app", "tell_capacity"]

S = TypeVar("S", bound=BaseModel)
E = TypeVar("E", bound=BaseException)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Run one part of the stack.",
    pretty_exceptions_enable=False,  # standard error is a log
)

app.add_typer(sim_app, name="sim")
app.add_typer(umbp_app, name="umbp")

ENGINE_EXTRA = ("safetensors", "torch")

SpecFile = Annotated[
    Path, typer.Option("--spec", metavar="FILE", help="The part's spec file (JSON).")
]


@app.command()
def worker(spec: SpecFile) -> None:
    """Run an engine behind its HTTP face."""
    from kimi_runtime.server.run import run_worker

    _run(spec, WorkerSpec, run_worker)


@app.command()
def router(spec: SpecFile) -> None:
    """Run the front door: OpenAI's API over the workers."""
    from kimi_runtime.server.run import run_router

    _run(spec, RouterSpec, run_router)


@umbp_app.callback(invoke_without_command=True)
def umbp(
    context: typer.Context,
    spec: Annotated[
        Path | None, typer.Option("--spec", metavar="FILE", help="Run a daemon from this file.")
    ] = None,
) -> None:
    """Run the KV-cache pool's daemon of this node, or look into one that runs."""
    if context.invoked_subcommand is not None:
        if spec is not None:
            raise typer.BadParameter("--spec comes after the command")
        return
    if spec is None:
        raise typer.BadParameter("say from which file to run (--spec), or a command (--help)")
    from kimi_runtime.server.run import run_umbp

    path = spec
    _guarded(lambda: run_umbp(path, lambda: _read(path, UmbpSpec)))


@app.command()
def quality(
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="FOLDER", help="config.json and weights; none: kimi-nano."),
    ] = None,
    dialogues: Annotated[int, typer.Option("--dialogues", min=1, help="Held-out dialogues.")] = 240,
    needles: Annotated[
        int, typer.Option("--needles", min=0, help="Questions for each length of pasted text.")
    ] = 24,
    seed: Annotated[int, typer.Option("--seed", help="Which dialogues.")] = 0,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Of the engine.")] = 1,
    instant: Annotated[
        bool, typer.Option("--instant", help="Answers without thinking first.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 where a floor is missed.")
    ] = False,
) -> None:
    """Put held-out tool dialogues to a model, through the engine, and print what it got right."""
    from kimi_runtime.bench.quality.report import markdown, missed
    from kimi_runtime.bench.quality.run import Plan, examine

    plan = Plan(dialogues, needles, seed=seed, threads=threads, thinking=not instant)

    async def run() -> None:
        weights = PackagedWeights() if model is None else FileWeights(path=model)
        result = await examine(weights, plan, on_progress=_show_progress)
        typer.echo(markdown(result), nl=False)
        if check and (short := missed(result)):
            raise KimistackError(f"{result.model} misses the floor of: {', '.join(short)}")

    _guarded(run)


app.command()(explain)
app.command()(bench)


def _show_progress(done: int, of: int) -> None:
    """One line on a terminal, rewritten; nothing where standard error is a file."""
    if sys.stderr.isatty():
        typer.echo(f"\r{done} of {of} questions", nl=done == of, err=True)


def _run(path: Path, kind: type[S], run: Callable[[S], Coroutine[Any, Any, None]]) -> None:
    _guarded(lambda: run(_read(path, kind)))


def _guarded(run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run it; what was foreseen becomes one line and an exit status."""
    try:
        asyncio.run(run())
    except* KimistackError as group:
        error = _first(group)
        typer.echo(f"kimistack: {' '.join(str(error).split())}", err=True)
        raise SystemExit(error.exit_code) from None
    except* ModuleNotFoundError as group:
        missing = _first(group).name
        if missing not in ENGINE_EXTRA:
            raise
        typer.echo(
            f"kimistack: there is no {missing} here, which an engine needs; install it with: "
            "pip install 'kimistack[engine]'",
            err=True,
        )
        raise SystemExit(ConfigError.exit_code) from None


def _read(path: Path, kind: type[S]) -> S:
    spec = read_spec(path, kind)
    try:
        return read_settings().onto(spec)
    except ValidationError as exc:
        raise not_that(path, kind, exc) from exc


def _first(group: BaseExceptionGroup[E]) -> E:
    for error in group.exceptions:
        return _first(error) if isinstance(error, BaseExceptionGroup) else error
    raise AssertionError("an exception group is never empty")


if __name__ == "__main__":
    app()
