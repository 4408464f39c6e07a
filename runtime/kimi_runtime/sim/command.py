"""What the commands of `kimistack sim` share: reading files, progress, one line for errors."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import typer
from pydantic import TypeAdapter, ValidationError

from kimi_runtime.errors import ConfigError, KimistackError

T = TypeVar("T")


def show(text: str) -> None:
    """One line on a terminal, rewritten; nothing where standard error is a file."""
    if sys.stderr.isatty():
        typer.echo(f"\r\x1b[K{text}", nl=False, err=True)


def clear() -> None:
    """Take the line away."""
    show("")


def read_json(path: Path, adapter: TypeAdapter[T]) -> T:
    """A file as a model; ConfigError names file and field."""
    try:
        return adapter.validate_json(path.read_bytes())
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc
    except ValidationError as exc:
        raise ConfigError(f"{path}: {places(exc)}") from exc


def write(path: Path, text: bytes) -> None:
    """ConfigError if it cannot be."""
    try:
        path.write_bytes(text)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be written: {exc.strerror}") from exc


def places(exc: ValidationError) -> str:
    """Every field that does not fit, and why, in one line."""
    errors = exc.errors(include_url=False, include_context=False)
    return "; ".join(f"{'.'.join(map(str, one['loc'])) or 'it'}: {one['msg']}" for one in errors)


@contextmanager
def foreseen() -> Iterator[None]:
    """What was foreseen becomes one line and an exit status."""
    try:
        yield
    except ValidationError as exc:
        typer.echo(f"kimistack: {places(exc)}", err=True)
        raise SystemExit(ConfigError.exit_code) from None
    except KimistackError as exc:
        typer.echo(f"kimistack: {' '.join(str(exc).split())}", err=True)
        raise SystemExit(exc.exit_code) from None
