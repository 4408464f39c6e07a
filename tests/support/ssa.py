"""Server-side apply as an API server does it: who owns which field, merging, conflicts.

Ownership is kept as the trie that `fieldsV1` is. Lists that Kubernetes merges by key are named in
`LIST_KEYS`; every other list is owned as a whole.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

Trie = dict[str, Any]
Manifest = dict[str, Any]


def cloned(value: Any) -> Any:
    """A copy of plain data; `copy.deepcopy` takes five times as long to get there."""
    if isinstance(value, Mapping):
        return {name: cloned(below) for name, below in value.items()}
    return [cloned(item) for item in value] if isinstance(value, list | tuple) else value


def sorted_by_name(value: Any) -> Any:
    """A copy of plain data with its mappings in the order in which a server writes them."""
    if isinstance(value, Mapping):
        return {name: sorted_by_name(value[name]) for name in sorted(value)}
    return [sorted_by_name(item) for item in value] if isinstance(value, list | tuple) else value


LIST_KEYS: dict[str, tuple[tuple[str, Any], ...]] = {
    "conditions": (("type", None),),
    "containers": (("name", None),),
    "env": (("name", None),),
    "imagePullSecrets": (("name", None),),
    "initContainers": (("name", None),),
    "ownerReferences": (("uid", None),),
    "volumeMounts": (("mountPath", None),),
    "volumes": (("name", None),),
}
PORT_KEYS = (("containerPort", None), ("protocol", "TCP"))
SERVICE_PORT_KEYS = (("port", None), ("protocol", "TCP"))
SETS = {"finalizers"}


def list_keys(field: str, items: Any) -> tuple[tuple[str, Any], ...]:
    """Keys (with defaults) the list merges by; empty for a list that is owned as a whole."""
    if field == "ports" and items and all(isinstance(item, Mapping) for item in items):
        if all("containerPort" in item for item in items):
            return PORT_KEYS
        return SERVICE_PORT_KEYS if all("targetPort" in item for item in items) else ()
    return LIST_KEYS.get(field, ())


def element_key(keys: tuple[tuple[str, Any], ...], item: Mapping[str, Any]) -> str:
    """The trie's name of a list element."""
    values = {name: item.get(name, default) for name, default in keys}
    return "k:" + json.dumps(values, sort_keys=True, separators=(",", ":"))


def fields_of(value: Any, field: str = "") -> Trie:
    """The trie of every field in a value."""
    if isinstance(value, Mapping):
        return {f"f:{name}": fields_of(below, name) for name, below in value.items()}
    if isinstance(value, list):
        if field in SETS:
            return {"v:" + json.dumps(item): {} for item in value}
        keys = list_keys(field, value)
        if keys:
            return {
                element_key(keys, item): {".": {}, **fields_of({**dict_defaults(keys, item)})}
                for item in value
            }
    return {}


def dict_defaults(keys: tuple[tuple[str, Any], ...], item: Mapping[str, Any]) -> dict[str, Any]:
    """The element with the defaults of its keys written out."""
    return {**{name: default for name, default in keys if default is not None}, **item}


def leaves(trie: Trie, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of the fields that are owned as a whole."""
    below = {name: rest for name, rest in trie.items() if name != "."}
    if not below:
        yield at
    for name, rest in below.items():
        yield from leaves(rest, (*at, name))


def from_paths(paths: Iterator[tuple[str, ...]] | set[tuple[str, ...]]) -> Trie:
    """The trie of some paths."""
    trie: Trie = {}
    for path in sorted(paths):
        node = trie
        for step in path:
            if step[:2] == "k:":
                node = node.setdefault(step, {".": {}})
            else:
                node = node.setdefault(step, {})
    return trie


_MISSING = object()


def value_at(obj: Any, path: tuple[str, ...]) -> Any:
    """The value a path leads to, `_MISSING` if there is none."""
    for step in path:
        if step[:2] == "f:":
            obj = obj.get(step[2:], _MISSING) if isinstance(obj, Mapping) else _MISSING
        elif isinstance(obj, list):
            obj = _element(obj, step)
        else:
            return _MISSING
        if obj is _MISSING:
            return _MISSING
    return obj


def _element(items: list[Any], step: str) -> Any:
    wanted = json.loads(step[2:])
    if step[:2] == "v:":
        return wanted if wanted in items else _MISSING
    for item in items:
        if all(item.get(name, value) == value for name, value in wanted.items()):
            return item
    return _MISSING


def removed(obj: Any, path: tuple[str, ...]) -> None:
    """Take the field away, in place, and maps and lists that this leaves empty."""
    parent = value_at(obj, path[:-1]) if len(path) > 1 else obj
    if parent is _MISSING:
        return
    step = path[-1]
    if step[:2] == "f:":
        parent.pop(step[2:], None)
    elif (element := _element(parent, step)) is not _MISSING:
        parent.remove(element)
    if not parent and len(path) > 1:
        removed(obj, path[:-1])


def merged(live: Any, applied: Any, field: str = "") -> Any:
    """`applied` laid on `live`: maps by name, keyed lists by key, the rest replaced."""
    if isinstance(live, Mapping) and isinstance(applied, Mapping):
        out = dict(live)
        for name, value in applied.items():
            out[name] = merged(out[name], value, name) if name in out else cloned(value)
        return out
    keys = list_keys(field, applied) if isinstance(applied, list) else ()
    if isinstance(live, list) and keys:
        out_list = list(live)
        for item in applied:
            step = element_key(keys, item)
            old = _element(out_list, step)
            if old is _MISSING:
                out_list.append(cloned(dict_defaults(keys, item)))
            else:
                out_list[out_list.index(old)] = merged(old, item)
        return out_list
    if isinstance(live, list) and isinstance(applied, list) and field in SETS:
        return live + [item for item in applied if item not in live]
    return cloned(applied)


def conflicts(live: Any, applied: Trie, wanted: Any, owned: Trie) -> list[tuple[str, ...]]:
    """Paths that both would own with different values."""
    others = set(leaves(owned))
    return [
        path
        for path in leaves(applied)
        if path in others and value_at(live, path) != value_at(wanted, path)
    ]
