"""Rules of a grammar for JSON values, in llguidance's Lark dialect.

The library's own `%json` binds an object's keys to the schema's order. A model that writes another
order, which is as valid, would be pushed from what it means to write: a value that it had for the
first key would come behind the second. So objects whose keys are all known get rules in which each
key comes once at any place, and `%json` what has no such objects.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

JSON_STYLE: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
"""One optional space after a separator, as models write it, and no other white space: a model
without skill would fill its budget with blanks."""

MAX_KEYS = 64
"""Of an object in any order: which of them were written is one 64-bit parameter of its rules."""

_OBJECT = frozenset(("type", "properties", "required", "additionalProperties", "$defs"))
_ARRAY = frozenset(("type", "items", "minItems", "maxItems"))
_FOREIGN_REF = re.compile(r'"\$ref": "(?!#/\$defs/)')
_BETWEEN_ITEMS = f"/{JSON_STYLE['item_separator']}/"
_BETWEEN_KEY_AND_VALUE = f"/{JSON_STYLE['key_separator']}/"


def json_expression(schema: Any) -> str:
    """A value that fits `schema`, its keys in the schema's order."""
    return f"%json {json.dumps({'x-guidance': JSON_STYLE, **schema}, ensure_ascii=False)}"


class AnyOrder:
    """Collects in `lines` the rules for values whose keys come in any order."""

    def __init__(self, *, required_first: bool) -> None:
        """`required_first`: optional keys come behind the required ones, so that an output which
        must soon end is never led through them.
        """
        self._required_first = required_first
        self._definitions: Any = None
        self._shared: dict[str, str] = {}
        self.lines: list[str] = []

    def add(self, name: str, schema: Mapping[str, Any]) -> None:
        """The rule `name` for values that fit `schema`, which is one of `constrained`."""
        if _FOREIGN_REF.search(json.dumps(schema)):  # then its parts cannot stand alone
            self.lines.append(f"{name}: {json_expression(schema)}")
            return
        self._definitions = schema.get("$defs")
        value = self._value(name, schema)
        if value != name:
            self.lines.append(f"{name}: {value}")

    def _value(self, name: str, node: Any) -> str:
        """The name of the rule for `node`: `name`, or of one that is there already."""
        if _has_known_keys(node):
            self._object(name, node["properties"], node.get("required", ()))
        elif _has_such_items(node):
            self._array(name, node)
        else:
            expression = json_expression(self._alone(node))
            known = self._shared.setdefault(expression, name)
            if known != name:
                return known
            self.lines.append(f"{name}: {expression}")
        return name

    def _alone(self, node: Any) -> dict[str, Any]:
        schema = dict(node) if isinstance(node, Mapping) else {}
        if self._definitions is not None and '"$ref"' in json.dumps(schema):
            schema["$defs"] = self._definitions
        return schema

    def _object(self, name: str, properties: Mapping[str, Any], required: Sequence[str]) -> None:
        whole = _all_set([number for number, key in enumerate(properties) if key in required])
        end = '"}"' + (f" %if {whole}" if whole else "")
        first, more = [] if whole else ['"}"'], [end]
        for number, key in enumerate(properties):
            member = f"{name}_{number} {name}_more::set_bit({number})"
            waits = self._required_first and whole and key not in required
            condition = f"bit_clear({number})"
            more.append(
                f"{_BETWEEN_ITEMS} {member} "
                f"%if {f'and({condition}, {whole})' if waits else condition}"
            )
            if not waits:
                first.append(member)
        self.lines += [
            f'{name}: "{{" {name}_first::0x0',
            f"{name}_first::_: " + " | ".join(first),
            f"{name}_more::_: " + "\n | ".join(more),
        ]
        for number, (key, node) in enumerate(properties.items()):
            text = json.dumps(json.dumps(key, ensure_ascii=False), ensure_ascii=False)
            value = self._value(f"{name}_{number}_value", node)
            self.lines.append(f"{name}_{number}: {text} {_BETWEEN_KEY_AND_VALUE} {value}")

    def _array(self, name: str, node: Mapping[str, Any]) -> None:
        least, most = int(node.get("minItems", 0)), node.get("maxItems")
        item = self._value(f"{name}_item", node["items"])
        items = item
        if most != 1:
            upto = "" if most is None else int(most) - 1
            items += f" ({_BETWEEN_ITEMS} {item}){{{max(least - 1, 0)},{upto}}}"
        self.lines.append(f'{name}: "[" ' + (items if least else f"({items})?") + ' "]"')


def _has_known_keys(node: Any) -> bool:
    if not isinstance(node, Mapping) or not _OBJECT.issuperset(node):
        return False
    properties = node.get("properties") or {}
    return (
        node.get("type") == "object"
        and node.get("additionalProperties") is False
        and 0 < len(properties) <= MAX_KEYS
        and set(node.get("required", ())) <= set(properties)
    )


def _has_such_items(node: Any) -> bool:
    """Whether `node` is a list of objects with known keys, or of such lists."""
    if not isinstance(node, Mapping) or not _ARRAY.issuperset(node) or node.get("maxItems") == 0:
        return False
    items = node.get("items")
    return node.get("type") == "array" and (_has_known_keys(items) or _has_such_items(items))


def _all_set(bits: Sequence[int]) -> str:
    """The condition that all of these bits of the parameter are set; empty for none."""
    condition = ""
    for bit in bits:
        one = f"bit_set({bit})"
        condition = f"and({condition}, {one})" if condition else one
    return condition
