"""A FleetSpec in a file that changes. Whoever writes the file replaces it as a whole."""

from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from kimi_runtime.spec.router import FleetSpec


class FleetFile:
    """Looks at the file; one that cannot be read or is none changes nothing.

    `complain` hears why, once for as long as it is the same; `what` names the file in that.
    """

    def __init__(self, path: Path, what: str, complain: Callable[[str], None]) -> None:
        self._path, self._what, self._complain = path, what, complain
        self._text, self._said = b"", ""

    def changed(self) -> FleetSpec | None:
        """What the file says now, if that is another valid text than at the last look."""
        try:
            text = self._path.read_bytes()
        except OSError as exc:
            self._say(f"{self._what} {self._path} cannot be read: {exc.strerror}")
            return None
        if text == self._text:
            return None
        self._text = text
        try:
            spec = FleetSpec.model_validate_json(text)
        except ValidationError as exc:
            first = exc.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            self._say(f"{self._path} is no FleetSpec: {where}: {first['msg']}")
            return None
        self._said = ""
        return spec

    def _say(self, why: str) -> None:
        if why != self._said:
            self._said = why
            self._complain(why)
