"""What clients may send to `/v1/chat/completions` and `/v1/completions`, checked strictly.

A field that is not here is an error that names it: silently ignoring what a client asked for gives
it something else than it asked for. Accepted and ignored, because clients send them to everyone and
they change no output: `user`, `metadata`, `store`, `safety_identifier`, `prompt_cache_options` and
`prompt_cache_retention`. `prompt_cache_key` is a routing hint, and of `service_tier` the value
`flex` makes a request wait behind others.
"""

import re
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kimi_runtime.errors import RequestError

M = TypeVar("M", bound=BaseModel)

MAX_STOPS = 16
MAX_STOP_CHARS = 256

MESSAGE_FIELDS = frozenset(
    {
        *("role", "content", "name", "tool_calls", "tool_call_id"),
        *("reasoning_content", "reasoning", "reasoning_details"),
        *("refusal", "annotations", "cache_control", "provider_specific_fields"),
        *("partial", "tools", "function_call", "audio"),
    }
)
"""What a message may have. Those of the third line are ignored, as clients echo them from other
servers; those of the last are refused by `protocol.history` unless they are empty."""


class RequestModel(BaseModel):
    """Frozen, no unknown fields, no conversions between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ChosenFunction(RequestModel):
    """The function of a named choice."""

    name: str


class NamedToolChoice(RequestModel):
    """Call this tool."""

    type: Literal["function"]
    function: ChosenFunction


class TextFormat(RequestModel):
    """No constraint."""

    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaItem(RequestModel):
    """The schema of a `json_schema` format."""

    name: Annotated[str, MaxLen(64)]
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(RequestModel):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchemaItem


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class StreamOptions(RequestModel):
    """How to stream."""

    include_usage: bool = False


class Thinking(RequestModel):
    """Kimi's own switch. `keep: all` keeps the reasoning of earlier turns in the prompt."""

    type: Literal["enabled", "disabled"]
    effort: Literal["low", "medium", "high", "max"] | None = None
    keep: Literal["all"] | None = None


class TemplateArguments(RequestModel):
    """The open-source servers' switches."""

    thinking: bool | None = None
    enable_thinking: bool | None = None
    preserve_thinking: bool | None = None
    thinking_effort: Literal["low", "medium", "high", "max"] | None = None


Stop = str | Annotated[tuple[Annotated[str, MaxLen(MAX_STOP_CHARS)], ...], MaxLen(MAX_STOPS)]


class SharedFields(RequestModel):
    """What both endpoints take."""

    model: str
    max_tokens: Annotated[int, Ge(1)] | None = None
    temperature: Annotated[float, Ge(0), Le(2)] | None = None
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    top_k: Annotated[int, Ge(0)] | None = None
    min_p: Annotated[float, Ge(0), Le(1)] | None = None
    presence_penalty: Annotated[float, Ge(-2), Le(2)] | None = None
    frequency_penalty: Annotated[float, Ge(-2), Le(2)] | None = None
    repetition_penalty: Annotated[float, Gt(0), Le(10)] | None = None
    logit_bias: dict[str, Annotated[float, Ge(-100), Le(100)]] | None = None
    seed: Annotated[int, Ge(-(2**63)), Le(2**63 - 1)] | None = None
    stop: Stop | None = None
    n: Literal[1] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: Annotated[str, MaxLen(256)] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None


class ChatRequest(SharedFields):
    """The body of `POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(description="Read by `protocol.history.normalise`.")
    max_completion_tokens: Annotated[int, Ge(1)] | None = None
    tools: list[Any] | None = Field(None, description="Read by `protocol.schema.read_tools`.")
    tool_choice: Literal["auto", "none", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Ge(0), Le(20)] | None = None
    thinking: Thinking | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "max"] | None = None
    chat_template_kwargs: TemplateArguments | None = None


class CompletionRequest(SharedFields):
    """The body of `POST /v1/completions`: a text, or ids, taken as they are."""

    prompt: str | Annotated[tuple[Annotated[int, Ge(0)], ...], MinLen(1)]
    logprobs: Annotated[int, Ge(0), Le(5)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None


def parse_chat(body: bytes) -> ChatRequest:
    """The request in a body; RequestError that names the first wrong field."""
    request = _parse(ChatRequest, body)
    for number, message in enumerate(request.messages):
        for name in message.keys() - MESSAGE_FIELDS:
            if message[name]:
                raise _unsupported(f"messages[{number}].{name[:64]}")
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """The request in a body; RequestError that names the first wrong field."""
    return _parse(CompletionRequest, body)


def _parse(kind: type[M], body: bytes) -> M:
    try:
        return kind.model_validate_json(body)
    except ValidationError as exc:
        raise _named(exc) from exc


def _named(exc: ValidationError) -> RequestError:
    """The validation error that says most, in the client's own terms. Values are not quoted."""
    errors = exc.errors(include_url=False, include_context=False, include_input=False)
    # of a union, the arm that fits the value's type and goes furthest into it
    first = max(errors, key=lambda e: (len(_path(e["loc"])), not e["type"].endswith("_type")))
    param = _param(first["loc"])
    reason = first["msg"].replace("Tuple", "Array").replace(" after validation", "")
    match first["type"]:
        case "json_invalid" | "json_type":
            return RequestError(
                f"the request body is not valid JSON in UTF-8: {reason}", code="invalid_json"
            )
        case "extra_forbidden":
            return _unsupported(param)
        case "missing":
            return RequestError(
                f"missing required parameter: {param!r}", param=param, code="missing_parameter"
            )
        case _:
            return RequestError(f"{param}: {reason}", param=param, code="invalid_value")


def _unsupported(param: str) -> RequestError:
    return RequestError(
        f"unsupported parameter: {param!r} is not supported here; leave it out",
        param=param,
        code="unsupported_parameter",
    )


def _path(loc: tuple[int | str, ...]) -> list[int | str]:
    """A location without the names of union arms, which are no part of the request."""
    path = [part for part in loc if isinstance(part, int) or not _ARM.search(part)]
    if path[:1] == ["response_format"] and len(path) > 1:
        del path[1]  # the format's type, by which its arm was chosen
    return path


def _param(loc: tuple[int | str, ...]) -> str:
    """`stop[3]` or `tool_choice.function.name` from a location."""
    text = ""
    for part in _path(loc):
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "body"


_ARM = re.compile(r"\[|^(str|NamedToolChoice)$")
