"""Plain data laid over plain data, and where each value came from."""

from collections.abc import Iterator, Mapping
from typing import Any

Tree = dict[str, Any]
Path = tuple[str, ...]


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """`over` laid on `base`: mappings key by key, lists of named things by name, the rest whole."""
    merged: Tree = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            merged[key] = overlay(below, value)
        elif _is_named(value) and _is_named(below):
            merged[key] = _by_name(below, value)
        else:
            merged[key] = value
    return merged


def _is_named(value: Any) -> bool:
    """Whether it is a list that `env` is the model of: mappings told apart by `name`."""
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(item, Mapping) and "name" in item for item in value)
    )


def _by_name(base: Any, over: Any) -> list[Any]:
    named = {item["name"]: item for item in base}
    named.update({item["name"]: item for item in over})
    return list(named.values())


def leaves(tree: Mapping[str, Any], at: Path = ()) -> Iterator[Path]:
    """The path of every value that is no mapping; an empty mapping counts as a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*at, key))
        else:
            yield (*at, key)


def holds(tree: Mapping[str, Any], path: Path) -> bool:
    """Whether the tree has a value at the path."""
    node: Any = tree
    for key in path:
        if not isinstance(node, Mapping) or key not in node:
            return False
        node = node[key]
    return True
