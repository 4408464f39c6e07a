"""The trained kimi-nano that comes with the package."""

from importlib import resources
from pathlib import Path

from kimi_runtime.errors import ConfigError


def nano_folder() -> Path:
    """The folder with its config.json and weights. ConfigError where it was not packaged."""
    folder = Path(str(resources.files("kimi_runtime.models") / "kimi-nano"))
    if not (folder / "model.safetensors").is_file():
        raise ConfigError(
            f"the trained kimi-nano is not in {folder}; train one with scripts/train_nano.py and "
            "name its folder (kimistack quality --model FOLDER), or use weights of kind 'random'"
        )
    return folder
