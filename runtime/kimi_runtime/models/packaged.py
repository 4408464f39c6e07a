"""The trained models that come with the package."""

from importlib import resources
from pathlib import Path

from kimi_runtime.errors import ConfigError


def packaged_folder(name: str) -> Path:
    """The folder with config.json and weights of `name`. ConfigError where it was not packaged."""
    folder = Path(str(resources.files("kimi_runtime.models") / name))
    if not (folder / "model.safetensors").is_file():
        raise ConfigError(
            f"the trained {name} is not in {folder}; install the whole package, name the folder "
            "of a model, or use weights of kind 'random'"
        )
    return folder
