"""Reading a process' spec file: what is wrong with it is one line that says where."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from kimi_runtime.errors import ConfigError

S = TypeVar("S", bound=BaseModel)


def read_spec(path: Path, kind: type[S]) -> S:
    """The spec that a JSON file holds; ConfigError if it can't be read or is none."""
    try:
        text = path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"the spec file {path} cannot be read: {exc.strerror}") from exc
    try:
        return kind.model_validate_json(text)
    except ValidationError as exc:
        raise not_that(path, kind, exc) from exc


def not_that(path: Path, kind: type[BaseModel], exc: ValidationError) -> ConfigError:
    """What is wrong with the fields of a file, each by its place."""
    places = "; ".join(
        f"{'.'.join(map(str, error['loc'])) or 'the file'}: {error['msg']}"
        for error in exc.errors(include_url=False, include_context=False)
    )
    return ConfigError(f"{path} is no {kind.__name__}: {places}")
