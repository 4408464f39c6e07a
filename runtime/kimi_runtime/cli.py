"""The runtime's subcommands: `worker`, `router`, `umbp`, each started from one spec file.

Exit status 0 after a drain, 2 with one line on standard error for a wrong spec, file, key or port,
1 with one line for everything else that was foreseen.
"""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, ValidationError

from kimi_runtime.errors import ConfigError, KimistackError
from kimi_runtime.settings import read_settings
from kimi_runtime.spec.router import RouterSpec
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.spec.worker import WorkerSpec

S = TypeVar("S", bound=BaseModel)
E = TypeVar("E", bound=BaseException)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Run one part of the stack.",
    pretty_exceptions_enable=False,  # standard error is a log
)

ENGINE_EXTRA = ("numpy", "safetensors", "torch")

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


@app.command()
def umbp(spec: SpecFile) -> None:
    """Run the KV-cache pool's daemon of this node."""
    from kimi_runtime.server.run import run_umbp

    _run(spec, UmbpSpec, run_umbp)


def _run(path: Path, kind: type[S], run: Callable[[S], Coroutine[Any, Any, None]]) -> None:
    try:
        asyncio.run(run(_read(path, kind)))
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
    try:
        text = path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"the spec file {path} cannot be read: {exc.strerror}") from exc
    try:
        return read_settings().onto(kind.model_validate_json(text))
    except ValidationError as exc:
        errors = exc.errors(include_url=False, include_context=False)
        places = "; ".join(
            f"{'.'.join(map(str, error['loc'])) or 'the file'}: {error['msg']}" for error in errors
        )
        raise ConfigError(f"{path} is no {kind.__name__}: {places}") from exc


def _first(group: BaseExceptionGroup[E]) -> E:
    for error in group.exceptions:
        return _first(error) if isinstance(error, BaseExceptionGroup) else error
    raise AssertionError("an exception group is never empty")


if __name__ == "__main__":
    app()
