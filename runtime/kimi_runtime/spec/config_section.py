"""Typed reading of a JSON file of somebody else's making: every complaint names key and file."""

from collections.abc import Mapping
from typing import cast

from kimi_runtime.errors import ConfigError


class ConfigSection:
    """One object of the file. A key that is missing or of the wrong type is a ConfigError."""

    def __init__(self, data: Mapping[str, object], source: str, prefix: str = "") -> None:
        self.data, self.source, self.prefix = data, source, prefix

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.data.get(key) is not None

    def section(self, key: str) -> "ConfigSection":
        """A nested object."""
        value = self._value(key)
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return ConfigSection(value, self.source, f"{self.prefix}{key}.")

    def integer(self, key: str) -> int:
        """A whole number (JSON's `1.0` is none)."""
        value = self._value(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, "a whole number")
        return value

    def number(self, key: str) -> float:
        """Any number."""
        value = self._value(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a number")
        return float(value)

    def boolean(self, key: str) -> bool:
        """True or false."""
        value = self._value(key)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str) -> str:
        """A string."""
        value = self._value(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self._value(key)
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.wrong(key, "a list of whole numbers")
        return tuple(cast("list[int]", value))

    def integer_or_integers(self, key: str) -> tuple[int, ...]:
        """One whole number or a list of them, as a tuple."""
        return self.integers(key) if isinstance(self._value(key), list) else (self.integer(key),)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        value = self._value(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of strings")
        return tuple(cast("list[str]", value))

    def require(self, key: str, wanted: object) -> None:
        """The key, where it is given, must have this value: nothing else is implemented."""
        if self.has(key) and self.data[key] != wanted:
            raise self.wrong(key, f"{wanted!r}, the only value this runtime implements")

    def wrong(self, key: str, wanted: str) -> ConfigError:
        """The error for a value that cannot be used."""
        found = repr(self.data.get(key))
        shown = found if len(found) <= 80 else f"{found[:77]}..."
        return ConfigError(f"{self.prefix}{key} in {self.source} is {shown}; it must be {wanted}")

    def _value(self, key: str) -> object:
        if not self.has(key):
            raise ConfigError(
                f"{self.source} lacks {self.prefix}{key}, which has no safe default; "
                "add it, or use the config.json that came with the weights"
            )
        return self.data[key]
