"""A folder of safetensors files: which tensor is where, and its values by memory map.

Opening a file reads its header alone. What is read of it afterwards are pages of the page cache,
and only those of tensors that are looked at.
"""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kimi_runtime.errors import ConfigError

_INDEX = "model.safetensors.index.json"


class Checkpoint:
    """Tensors of a folder by name. ConfigError names a file or a tensor and what is wrong."""

    def __init__(self, folder: Path) -> None:
        """Read every header. Values are read when they are asked for."""
        self.folder = folder
        self._home: dict[str, Path] = {}
        self._state: dict[Path, tuple[int, ...]] = {}
        self._opened: dict[Path, Any] = {}
        for path in _paths(folder):
            for name in self._file(path).keys():  # noqa: SIM118  (not a mapping)
                if name in self._home:
                    raise ConfigError(
                        f"{name} is in {self._home[name].name} and in {path.name} of {folder}; "
                        "remove the file that is not of this checkpoint"
                    )
                self._home[name] = path

    def __contains__(self, name: object) -> bool:
        return name in self._home

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def path(self, name: str) -> Path:
        """The file that has the tensor."""
        return self._home[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """From the header."""
        return tuple(self._file(self._home[name]).get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """As stored, in mapped memory that lives as long as the tensor."""
        found: Tensor = self._file(self._home[name]).get_tensor(name)
        return found

    def unmap(self) -> None:
        """Let go of all files; whoever asks for a tensor afterwards maps its file anew."""
        self._opened.clear()

    def _file(self, path: Path) -> Any:
        if path not in self._opened:
            try:
                state = _state(path)
                if self._state.setdefault(path, state) != state:
                    raise ConfigError(f"{path} was replaced while it was being loaded; start again")
                self._opened[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as exc:
                raise ConfigError(
                    f"{path} cannot be read as safetensors: {_why(path, exc)}; fetch the file again"
                ) from exc
        return self._opened[path]


def _state(path: Path) -> tuple[int, ...]:
    """Changes when the file does."""
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _why(path: Path, exc: Exception) -> str:
    """A truncated file says how long its header makes it; others, what the library found."""
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            have = path.stat().st_size
            if header_bytes > have:
                return str(exc)
            header = json.loads(file.read(header_bytes))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key[0] != "_"]
        need = 8 + header_bytes + max(ends, default=0)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return str(exc)
    return f"it has {have} bytes, but its header asks for {need}" if have != need else str(exc)


def _paths(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        try:
            names: Iterable[object] = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as exc:
            raise ConfigError(f"{index} has no 'weight_map' of tensors to files") from exc
        paths = [folder / name for name in sorted(str(name) for name in names)]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"{folder} has no .safetensors file; it needs the model's weights")
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"{index} names {path.name}, which is not in {folder}; fetch it")
    return paths
