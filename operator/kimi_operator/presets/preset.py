"""Presets: what is known to serve a model on a GPU, as data files `<model>/<gpu>.yaml`."""

from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import yaml
from pydantic import Field, ValidationError

from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.base import SpecModel
from kimi_runtime.spec.model import QuantSpec


class Preset(SpecModel):
    """Values for a model on a GPU. `spec` holds for every engine, `engines` adds to it."""

    name: str
    description: str
    architecture: str = Field(description="Published model whose dimensions decide what fits.")
    hardware: str = Field(description="Name of a node in `spec.hardware`.")
    quantisation: QuantSpec | None = Field(None, description="None: the model's own format.")
    aggregated: bool = Field(
        False, description="Whether a spec that names no role gets decode alone."
    )
    spec: dict[str, Any]
    engines: dict[str, dict[str, Any]] = Field(min_length=1)


def preset_names() -> tuple[str, ...]:
    """Every preset there is, as `<model>/<gpu>`."""
    return tuple(sorted(_files()))


def _files() -> dict[str, Traversable]:
    return {
        f"{model.name}/{gpu.name.removesuffix('.yaml')}": gpu
        for model in files("kimi_operator.presets").iterdir()
        if model.is_dir()
        for gpu in model.iterdir()
        if gpu.name.endswith(".yaml")
    }


@lru_cache
def load_preset(name: str) -> Preset:
    """The preset of that name; ConfigError naming those there are."""
    file = _files().get(name)
    if file is None:
        raise ConfigError(
            f"spec.preset: there is no preset {name!r}; there are {', '.join(preset_names())}"
        )
    try:
        return Preset.model_validate({"name": name, **yaml.safe_load(file.read_text("utf-8"))})
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        raise ConfigError(f"preset {name}: {where}: {first['msg']}") from exc
