"""A conversation as the codecs see it, and what a codec finds in a model's output ids.

Pure types without wire details: `server/openai.py` and `server/anthropic.py` translate to and from
them, `protocol/history.py` brings any client's habits into this one form.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call. `parameters` is a JSON schema whose root is an object."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in the history. `arguments` is the JSON text exactly as it was generated."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `reasoning` and `calls` belong to assistants, `call_id` to tool results."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    name: str | None = None
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class NamedChoice:
    """The model must call this tool."""

    name: str


@dataclass(frozen=True, slots=True)
class Chat:
    """Everything a prompt is rendered from."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    choice: Literal["auto", "none", "required"] | NamedChoice = "auto"
    thinking: bool = True
    parallel_calls: bool = True
    keep_reasoning: bool = False
    """Render every turn's reasoning, not only that of the turns after the last answer."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as ids.

    `pending` counts the ids at the end that official usage numbers leave out (the generation
    stub's tail). `boundaries` are positions after a special token at the end of a message: the
    ids before one are the same in every later turn that keeps those messages and renders their
    reasoning alike.
    """

    ids: tuple[int, ...]
    pending: int
    starts_in_reasoning: bool
    boundaries: tuple[int, ...] = ()
    next_call_number: int = 0
    """The K2 call counter runs over the whole conversation; the next call gets this number."""


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More reasoning text."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More answer text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A tool call began; `index` counts from 0 in this response."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's argument text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call is complete: it may be run now."""

    index: int


OutputEvent = ReasoningDelta | ContentDelta | CallStarted | CallArguments | CallEnded
