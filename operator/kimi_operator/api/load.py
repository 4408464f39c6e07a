"""Reading a KimiDeployment from a file: every problem is one line that names file and field."""

import difflib
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kimi_operator.api.base import API_VERSION
from kimi_operator.api.deployment import KimiDeployment
from kimi_runtime.errors import ConfigError

MAX_FILE_BYTES = 2**20
"""What etcd stores of one object at the most, and more than anybody writes."""


class _StrictLoader(yaml.SafeLoader):
    """YAML as everywhere, but a key written twice is an error: the first would be lost.

    `<<: *anchor` merges, as it does for kubectl.
    """


def _mapping_without_repeats(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Hashable, Any]:
    seen = set()
    for key_node, _ in node.value:
        merges = key_node.tag == "tag:yaml.org,2002:merge"
        key = "<<" if merges else loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(
                None, None, f"a key is a text, not {key!r}", key_node.start_mark
            )
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"{key!r} is written twice", key_node.start_mark
            )
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(
    yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_repeats
)


def load_deployment(path: Path) -> KimiDeployment:
    """The KimiDeployment in a YAML (or JSON) file of one document.

    Raises ConfigError of one line: the file, the field's path and what is wrong with it.
    """
    return parse_deployment(read_text(path), str(path))


def read_text(path: Path) -> str:
    """A file of a sensible size as text. Raises ConfigError naming it."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(
                f"{path}: larger than {MAX_FILE_BYTES} bytes; is this the right file?"
            )
        return path.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {exc.start})") from exc


def parse_deployment(text: str, origin: str) -> KimiDeployment:
    """The KimiDeployment in a YAML text; `origin` leads every error. Raises ConfigError."""
    document = parse_mapping(text, origin)
    _require_kind(document, origin)
    return validated(document, origin)


def parse_mapping(text: str, origin: str) -> Mapping[str, Any]:
    """The one document of a YAML text, a mapping. Raises ConfigError."""
    try:
        documents = [d for d in yaml.load_all(text, _StrictLoader) if d is not None]
    except yaml.YAMLError as exc:
        raise ConfigError(f"{origin}: {_yaml_problem(exc)}") from exc
    if len(documents) != 1 or not isinstance(documents[0], Mapping):
        raise ConfigError(
            f"{origin}: one KimiDeployment is wanted, there are {len(documents)} documents"
            if len(documents) != 1
            else f"{origin}: a KimiDeployment is a mapping (apiVersion, kind, metadata, spec)"
        )
    return documents[0]


def validated(document: Mapping[str, Any], origin: str) -> KimiDeployment:
    """The document as a KimiDeployment. Raises ConfigError with the first problem."""
    try:
        return KimiDeployment.model_validate(document)
    except ValidationError as exc:
        problems = exc.errors(include_url=False)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        # a misspelt field is also a missing one: the spelling is what to change
        first = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
        raise ConfigError(f"{origin}: {_problem(first)}{more}") from exc


def _require_kind(document: Mapping[str, Any], origin: str) -> None:
    for field, wanted in (("apiVersion", API_VERSION), ("kind", "KimiDeployment")):
        found = document.get(field)
        if found != wanted:
            there = "it is missing" if found is None else f"not {found!r}"
            raise ConfigError(f"{origin}: {field} must be {wanted}, {there}")


def _yaml_problem(exc: yaml.YAMLError) -> str:
    if isinstance(exc, yaml.MarkedYAMLError) and exc.problem_mark is not None:
        mark = exc.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {exc.problem}"
    return " ".join(str(exc).split())


def _problem(error: ErrorDetails) -> str:
    """One pydantic error as `path: what is wrong`, on one line."""
    loc = error["loc"]
    context = error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            return _unknown_field(loc)
        case "missing":
            text = "is required"
        case "literal_error":
            text = f"{error['input']!r} is not one of {context['expected']}"
        case "rule":
            if context["field"]:
                loc = (*loc, *str(context["field"]).split("."))
            text = str(context["text"])
        case "value_error":
            text = str(context["error"])
        case "model_type" | "model_attributes_type" | "dict_type":
            text = f"a mapping is wanted, not {error['input']!r}"
        case _:
            text = f"{error['msg'][:1].lower()}{error['msg'][1:]}, not {error['input']!r}"
    return " ".join(f"{_dotted(loc)}: {text}".split())[:1000]


def _unknown_field(loc: tuple[int | str, ...]) -> str:
    *parents, name = loc
    known = _fields_at(parents)
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"
    return f"{_dotted(loc)}: unknown field{hint if known else ''}"


def _fields_at(loc: list[int | str]) -> list[str]:
    """Names of the fields a mapping at this path may have."""
    model: type[BaseModel] | None = KimiDeployment
    for step in loc:
        if isinstance(step, int) or model is None:
            continue
        annotation = next(
            (f.annotation for f in model.model_fields.values() if f.alias == step), None
        )
        model = model_within(annotation)
    return sorted(str(f.alias) for f in model.model_fields.values()) if model else []


def model_within(annotation: Any) -> type[BaseModel] | None:
    """The model in a field's annotation, unions and lists looked through; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (model_within(argument) for argument in get_args(annotation))
    return next((model for model in inner if model), None)


def _dotted(loc: tuple[int | str, ...]) -> str:
    text = ""
    for step in loc:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text
