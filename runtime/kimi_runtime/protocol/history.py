"""Any client's message list as one conversation.

Clients differ in where they put reasoning, how often they encode arguments, what ids look like.
All of it becomes `Message`s here, and what was changed is reported; the codec then renders what
the official API would.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kimi_runtime.errors import RequestError
from kimi_runtime.protocol.chat import Message, ToolCall
from kimi_runtime.protocol.unicode import require_unicode

MAX_ID_CHARS = 256

Role = Literal["system", "user", "assistant", "tool"]
_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_REASONING_KEYS = ("reasoning_content", "reasoning", "reasoning_details")
_KNOWN = {"role", "content", "name", "tool_calls", "tool_call_id", *_REASONING_KEYS}
_UNSUPPORTED = ("partial", "tools", "function_call", "audio")


@dataclass(frozen=True, slots=True)
class History:
    """The messages, and a line for everything that was not taken as it came."""

    messages: tuple[Message, ...]
    changes: tuple[str, ...] = ()


def normalise(raw: Any, *, require_reasoning: bool = False) -> History:
    """Read OpenAI's `messages`. Raises RequestError that names the field, e.g. `messages[3].role`.

    `require_reasoning` refuses an assistant turn with tool calls but without reasoning, as the
    official API does when thinking is on; otherwise its reasoning is empty.
    """
    if not isinstance(raw, list):
        raise RequestError("messages must be a list", param="messages")
    if not raw:
        raise RequestError("messages is empty; send at least one", param="messages")
    reader = _Reader(require_reasoning)
    messages = tuple(reader.message(entry, f"messages[{i}]") for i, entry in enumerate(raw))
    return History(messages, tuple(reader.changes))


class _Reader:
    def __init__(self, require_reasoning: bool) -> None:
        self._require_reasoning = require_reasoning
        self._call_ids: set[str] = set()
        self._calls = 0
        self.changes: list[str] = []

    def message(self, raw: Any, param: str) -> Message:
        if not isinstance(raw, Mapping):
            raise _wrong(param, "an object", raw)
        role = self._role(raw, param)
        for key in _UNSUPPORTED:
            if raw.get(key):
                raise RequestError(f"{param}.{key} is not supported", param=f"{param}.{key}")
        for key in sorted(map(str, set(raw) - _KNOWN)):
            if raw.get(key):
                self.changes.append(f"{param}.{key} was ignored")
        name = raw.get("name")
        if name is not None:
            name = _text(name, f"{param}.name") or None
        if role == "assistant":
            return self._assistant(raw, param, name)
        if role == "tool":
            return self._result(raw, param, name)
        if raw.get("content") is None:
            raise RequestError(f"{param}.content is missing", param=f"{param}.content")
        return Message(role, self._content(raw, param), name)

    def _role(self, raw: Mapping[str, Any], param: str) -> Role:
        role = raw.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise RequestError(
                f"{param}.role is {role!r}; it must be one of {', '.join(_ROLES)}",
                param=f"{param}.role",
            )
        if role != _ROLES[role]:
            self.changes.append(f"{param}.role {role!r} was read as {_ROLES[role]!r}")
        return _ROLES[role]

    def _content(self, raw: Mapping[str, Any], param: str) -> str:
        """A string, nothing, or text parts, which are joined as the chat template joins them."""
        content = raw.get("content")
        if content is None:
            return ""
        if isinstance(content, str):
            return require_unicode(content, f"{param}.content")
        if not isinstance(content, list):
            raise _wrong(f"{param}.content", "a string or a list of parts", content)
        return "".join(
            self._part(part, f"{param}.content[{number}]") for number, part in enumerate(content)
        )

    def _part(self, part: Any, param: str) -> str:
        if isinstance(part, str):
            return require_unicode(part, param)
        if not isinstance(part, Mapping):
            raise _wrong(param, "an object", part)
        kind = part.get("type")
        if kind != "text":
            raise RequestError(
                f"{param}.type is {kind!r}; this model takes only 'text' parts",
                param=f"{param}.type",
            )
        return _text(part.get("text"), f"{param}.text")

    def _assistant(self, raw: Mapping[str, Any], param: str, name: str | None) -> Message:
        content = self._content(raw, param)
        reasoning = self._reasoning(raw, param)
        entries = raw.get("tool_calls") or []
        if not isinstance(entries, list):
            raise _wrong(f"{param}.tool_calls", "a list", entries)
        calls = tuple(
            self._call(entry, f"{param}.tool_calls[{number}]")
            for number, entry in enumerate(entries)
        )
        if calls and reasoning is None and self._require_reasoning:
            raise RequestError(
                f"{param} has tool calls but no reasoning_content; send it back as it was received",
                param=f"{param}.reasoning_content",
            )
        return Message("assistant", content, name, reasoning or "", calls)

    def _reasoning(self, raw: Mapping[str, Any], param: str) -> str | None:
        for key in _REASONING_KEYS:
            value = raw.get(key)
            if value is None:
                continue
            if key != _REASONING_KEYS[0]:
                self.changes.append(f"{param}.{key} was read as reasoning_content")
            if not isinstance(value, list):
                return _text(value, f"{param}.{key}")
            texts = [part.get("text") for part in value if isinstance(part, Mapping)]
            return "".join(_text(text or "", f"{param}.{key}") for text in texts)
        return None

    def _call(self, raw: Any, param: str) -> ToolCall:
        if not isinstance(raw, Mapping):
            raise _wrong(param, "an object", raw)
        if raw.get("type", "function") != "function":
            raise RequestError(
                f"{param}.type is {raw['type']!r}; only 'function' is supported",
                param=f"{param}.type",
            )
        function = raw.get("function")
        if not isinstance(function, Mapping):
            raise _wrong(f"{param}.function", "an object", function)
        name = _text(function.get("name"), f"{param}.function.name")
        if not name:
            raise RequestError(f"{param}.function.name is empty", param=f"{param}.function.name")
        call_id = raw.get("id")
        if call_id is None:
            call_id = f"call_{self._calls}"
            self.changes.append(f"{param}.id was missing and became {call_id!r}")
        call_id = _identifier(call_id, f"{param}.id")
        self._calls += 1
        self._call_ids.add(call_id)
        arguments = self._arguments(function.get("arguments"), f"{param}.function.arguments")
        return ToolCall(call_id, name, arguments)

    def _arguments(self, raw: Any, param: str) -> str:
        """The JSON text as it was generated; objects and doubly encoded text become it again."""
        if raw is None or raw == "":
            self.changes.append(f"{param} was empty and became {{}}")
            return "{}"
        if isinstance(raw, Mapping):
            self.changes.append(f"{param} was an object and was encoded")
            return require_unicode(json.dumps(raw, ensure_ascii=False), param)
        text = _text(raw, param)
        if text.lstrip().startswith('"'):
            try:
                inner = json.loads(text)
                if isinstance(inner, str) and isinstance(json.loads(inner), dict):
                    self.changes.append(f"{param} was encoded twice and was decoded once")
                    return require_unicode(inner, param)
            except (ValueError, RecursionError):
                return text
        return text

    def _result(self, raw: Mapping[str, Any], param: str, name: str | None) -> Message:
        call_id = _identifier(raw.get("tool_call_id"), f"{param}.tool_call_id")
        if call_id not in self._call_ids:
            raise RequestError(
                f"{param}.tool_call_id is {call_id!r}, but no earlier assistant message made that "
                "call; send the message with its tool_calls before the result",
                param=f"{param}.tool_call_id",
            )
        if raw.get("content") is None:
            self.changes.append(f"{param}.content was missing and is empty")
        return Message("tool", self._content(raw, param), name, call_id=call_id)


def _identifier(raw: Any, param: str) -> str:
    text = _text(raw, param)
    if not 0 < len(text) <= MAX_ID_CHARS:
        raise RequestError(
            f"{param} has {len(text)} characters; it must have 1 to {MAX_ID_CHARS}", param=param
        )
    return text


def _text(raw: Any, param: str) -> str:
    if not isinstance(raw, str):
        raise _wrong(param, "a string", raw)
    return require_unicode(raw, param)


def _wrong(param: str, expected: str, got: Any) -> RequestError:
    kind = "missing" if got is None else f"a {type(got).__name__}"
    return RequestError(f"{param} must be {expected}, it is {kind}", param=param)
