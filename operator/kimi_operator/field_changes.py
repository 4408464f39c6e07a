"""Which fields of an object an apply would change, by comparing what we own of it. Pure.

Only what we would write is looked at: a server fills in defaults and controllers write beside us.
What we own and no longer write goes away, as server-side apply has it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_operator.changes import HASH_ANNOTATION, applied_fields, owned_fields
from kimi_operator.nodes import quantity
from kimi_operator.observed import Manifest

KEYS = ("name", "containerPort", "port", "mountPath", "key", "type", "ip")
"""Fields that tell elements of a list apart, the first that all of them have."""
ABSENT: Any = object()
TEXT_CAP = 20_000


@dataclass(frozen=True)
class FieldChange:
    """One field, as text for people; None: it is not there before, or not after."""

    path: str
    before: str | None
    after: str | None


def field_changes(manifest: Manifest, child: Manifest) -> tuple[FieldChange, ...]:
    """What applying `manifest` would change of `child`, in the order of the manifest."""
    wanted = applied_fields(manifest)
    found = [
        change
        for change in _differences(wanted, child, "")
        if not change.path.endswith(f".{HASH_ANNOTATION}")
    ]
    return (*found, *_dropped(owned_fields(child), wanted, child, ""))


def differences(wanted: Any, live: Any) -> tuple[FieldChange, ...]:
    """What of `wanted` is not so in `live`."""
    return tuple(_differences(wanted, live, ""))


def value_changes(before: Any, after: Any) -> tuple[FieldChange, ...]:
    """All that differs between two trees of plain data, what one of them lacks included."""
    gone = [
        FieldChange(change.path, change.after, None)
        for change in _differences(before, after, "")
        if change.before is None
    ]
    return (*_differences(after, before, ""), *gone)


def _differences(wanted: Any, live: Any, path: str) -> Iterator[FieldChange]:
    if isinstance(wanted, Mapping) and isinstance(live, Mapping):
        for name, value in wanted.items():
            yield from _differences(value, live.get(name, ABSENT), f"{path}.{name}")
    elif isinstance(wanted, list | tuple) and isinstance(live, list | tuple):
        yield from _list_differences(wanted, live, path)
    elif not _same(wanted, live):
        yield FieldChange(path.lstrip("."), _text(live), _text(wanted))


def _list_differences(
    wanted: Sequence[Any], live: Sequence[Any], path: str
) -> Iterator[FieldChange]:
    key = _key_of(wanted, live)
    if key is None:
        if len(wanted) != len(live) or not all(map(_same, wanted, live)):
            yield FieldChange(path.lstrip("."), _text(list(live)), _text(list(wanted)))
        return
    there = {item[key]: item for item in live}
    for item in wanted:
        yield from _differences(item, there.get(item[key], ABSENT), f"{path}[{item[key]}]")


def _key_of(wanted: Sequence[Any], live: Sequence[Any]) -> str | None:
    """The field that tells the elements of both lists apart; None: they are compared as a whole."""
    items = [*wanted, *live]
    if not wanted or not all(isinstance(item, Mapping) for item in items):
        return None
    for key in KEYS:
        if all(key in item for item in items) and all(
            len({item[key] for item in each}) == len(each) for each in (wanted, live)
        ):
            return key
    return None


def _same(wanted: Any, live: Any) -> bool:
    if wanted == live:
        return True
    if live is ABSENT:
        return wanted in (None, {}, [], ())
    if isinstance(wanted, Mapping) and isinstance(live, Mapping):
        return all(_same(value, live.get(name, ABSENT)) for name, value in wanted.items())
    if isinstance(wanted, list | tuple) and isinstance(live, list | tuple):
        return len(wanted) == len(live) and all(map(_same, wanted, live))
    return _same_quantity(wanted, live)


def _same_quantity(wanted: Any, live: Any) -> bool:
    """Whether both are one quantity, which servers write in their own way (`1000m` is `1`)."""
    try:
        return quantity(str(wanted)) == quantity(str(live))
    except ValueError:
        return False


def _text(value: Any) -> str | None:
    if value is ABSENT:
        return None
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= TEXT_CAP else f"{text[:TEXT_CAP]}…"


def _dropped(owned: Mapping[str, Any], wanted: Any, live: Any, path: str) -> Iterator[FieldChange]:
    """Owned fields that are no longer written."""
    for entry, below in owned.items():
        if entry == ".":
            continue
        step, inner, there = _step(entry, wanted, live)
        if (
            step is None
            or there is ABSENT
            or path + step == f".metadata.annotations.{HASH_ANNOTATION}"
        ):
            continue
        if inner is ABSENT:
            yield FieldChange((path + step).lstrip("."), _text(there), None)
        elif isinstance(below, Mapping) and below:
            yield from _dropped(below, inner, there, path + step)


def _step(entry: str, wanted: Any, live: Any) -> tuple[str | None, Any, Any]:
    """One entry of `fieldsV1`: its place in the path, what is wanted there and what is there."""
    kind, name = entry[:2], entry[2:]
    if kind == "f:":
        at = (
            side.get(name, ABSENT) if isinstance(side, Mapping) else ABSENT
            for side in (wanted, live)
        )
        return f".{name}", *at
    if kind == "k:":
        keys = json.loads(name)
        found = [_element(side, keys) for side in (wanted, live)]
        return f"[{next(iter(keys.values()))}]", found[0], found[1]
    return None, ABSENT, ABSENT  # an element of a set: seen by comparing the whole list


def _element(side: Any, keys: Mapping[str, Any]) -> Any:
    if isinstance(side, list | tuple):
        for item in side:
            # a key that an element leaves out has the server's default (a port's protocol)
            if isinstance(item, Mapping) and all(
                item.get(name, value) == value for name, value in keys.items()
            ):
                return item
    return ABSENT
