"""From a checked request to what a worker needs: chat, sampling, grammar, stop strings."""

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from kimi_runtime.errors import RequestError
from kimi_runtime.protocol.chat import Chat, NamedChoice, Rendered
from kimi_runtime.protocol.grammar import json_grammar, tool_grammar
from kimi_runtime.protocol.history import normalise
from kimi_runtime.protocol.incremental import SessionRecord
from kimi_runtime.protocol.schema import read_object_schema, read_tools
from kimi_runtime.protocol.vocabulary import Vocabulary
from kimi_runtime.router.view import RequestClass
from kimi_runtime.server.openai_request import (
    ChatRequest,
    JsonSchemaFormat,
    NamedToolChoice,
    SharedFields,
    TextFormat,
)
from kimi_runtime.spec.request import BANS, Grammar, Sampling

THINKING_TEMPERATURE = 1.0
INSTANT_TEMPERATURE = 0.6
DEFAULT_TOP_P = 0.95
"""Kimi's own defaults (facts: models.md §2.3)."""
MAX_ID_DIGITS = 10
"""More are no id of any vocabulary, and Python refuses to read thousands of digits."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the router's file and its workers allow. `context_tokens` is None while unknown."""

    context_tokens: int | None
    default_max_tokens: int


def chat_of(request: ChatRequest, *, thinks: bool) -> tuple[Chat, tuple[str, ...]]:
    """The conversation, and a line for everything in it that was not taken as it came.

    `thinks` holds where the request does not say. Raises RequestError naming the field.
    """
    history = normalise(request.messages)
    tools, rewrites = read_tools(request.tools)
    choice = _choice(request, {tool.name for tool in tools})
    chat = Chat(
        messages=history.messages,
        tools=tools,
        choice=choice,
        thinking=_thinking(request, thinks),
        parallel_calls=request.parallel_tool_calls is not False,
        keep_reasoning=_keeps_reasoning(request),
    )
    return chat, (*history.changes, *rewrites)


def grammar_of(
    request: ChatRequest, chat: Chat, rendered: Rendered, vocabulary: Vocabulary
) -> tuple[Grammar | None, bool]:
    """The constraint of `response_format` or of the tools, and whether the client demands it.

    Takes up to some hundred milliseconds for many tools. Raises RequestError naming the field.
    """
    wanted = request.response_format
    if wanted is None or isinstance(wanted, TextFormat):
        demanded = chat.choice == "required" or isinstance(chat.choice, NamedChoice)
        return tool_grammar(vocabulary, chat, rendered), demanded
    if chat.tools and chat.choice != "none":
        raise RequestError(
            "response_format with JSON cannot be combined with tools that may be called; "
            "send tool_choice 'none' or leave one of them out",
            param="response_format",
        )
    schema = None
    if isinstance(wanted, JsonSchemaFormat):
        place = "response_format.json_schema.schema"
        schema = read_object_schema(wanted.json_schema.schema_, place, [])
    return json_grammar(vocabulary, schema, rendered), True


def sampling_of(
    request: SharedFields,
    *,
    default_temperature: float,
    stop_ids: tuple[int, ...],
    banned_ids: tuple[int, ...] = (),
    prompt_tokens: int,
    limits: Limits,
    vocabulary_size: int,
) -> Sampling:
    """How ids are drawn, with Kimi's defaults; `banned_ids` never are.

    Raises RequestError if prompt and output can't fit.
    """
    chat = request if isinstance(request, ChatRequest) else None
    if chat is not None:
        logprobs = (chat.top_logprobs or 0) if chat.logprobs else None
        if chat.top_logprobs and not chat.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    else:
        logprobs = getattr(request, "logprobs", None)
    return Sampling(
        temperature=_given(request.temperature, default_temperature),
        top_p=_given(request.top_p, DEFAULT_TOP_P),
        top_k=request.top_k or 0,
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_given(request.repetition_penalty, 1.0),
        logit_bias=_bias(request.logit_bias, vocabulary_size) | dict.fromkeys(banned_ids, BANS),
        seed=request.seed,
        max_tokens=_max_tokens(request, prompt_tokens, limits),
        stop_ids=stop_ids,
        logprobs=logprobs,
    )


def urgency_of(request: SharedFields) -> RequestClass:
    """How urgent the request is: in the service tier `flex` its client says that it can wait."""
    return RequestClass.BACKGROUND if request.service_tier == "flex" else RequestClass.INTERACTIVE


def stops_of(request: SharedFields) -> tuple[str, ...]:
    """The stop strings; the router looks for them, since workers do not know what is content."""
    stop = request.stop
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else stop
    if any(not text for text in stops):
        raise RequestError("stop has an empty string; leave it out", param="stop")
    return stops


class Records:
    """Encoded prompts of the newest conversations, so that only new turns are tokenised.

    A conversation is looked up by its tools and its messages up to the first user's; a wrong guess
    costs time, never another result. A record is taken out while it is in use. Holds `max_ids` ids
    together (about 40 bytes each, text included); the coldest are forgotten.
    """

    def __init__(self, vocabulary: Vocabulary, *, max_ids: int) -> None:
        self._vocabulary, self._max_ids = vocabulary, max_ids
        self._records: OrderedDict[bytes, tuple[SessionRecord, int]] = OrderedDict()
        self._ids = 0

    def take(self, tenant: str, hint: str | None, chat: Chat) -> tuple[bytes, SessionRecord]:
        """The record to render `chat` with, and the name to give it back under."""
        digest = blake2b(f"{tenant}\0{hint}\0{chat.tools!r}".encode(), digest_size=16)
        for message in chat.messages:
            digest.update(repr(message).encode())
            if message.role == "user":
                break
        name = digest.digest()
        record, size = self._records.pop(name, (None, 0))
        self._ids -= size
        return name, record or SessionRecord(self._vocabulary)

    def give(self, name: bytes, record: SessionRecord, *, size: int) -> None:
        """Give a record of `size` ids back."""
        _, replaced = self._records.pop(name, (None, 0))  # by a request of the same conversation
        self._ids += size - replaced
        self._records[name] = record, size
        while self._ids > self._max_ids:
            _, (_, dropped) = self._records.popitem(last=False)
            self._ids -= dropped


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _choice(
    request: ChatRequest, names: set[str]
) -> Literal["auto", "none", "required"] | NamedChoice:
    choice = request.tool_choice or ("auto" if names else "none")
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in names:
            raise RequestError(
                f"tool_choice names {name!r}, which is not among the tools",
                param="tool_choice.function.name",
            )
        return NamedChoice(name)
    if choice == "required" and not names:
        raise RequestError("tool_choice 'required' needs tools", param="tool_choice")
    return choice


def _thinking(request: ChatRequest, default: bool) -> bool:
    """The first that is given of: `thinking`, `chat_template_kwargs`, `reasoning_effort`."""
    if request.thinking is not None:
        return request.thinking.type == "enabled"
    arguments = request.chat_template_kwargs
    if arguments is not None:
        for switch in (arguments.thinking, arguments.enable_thinking):
            if switch is not None:
                return switch
    if request.reasoning_effort is not None:
        return request.reasoning_effort != "none"
    return default


def _keeps_reasoning(request: ChatRequest) -> bool:
    if request.thinking is not None and request.thinking.keep is not None:
        return True
    arguments = request.chat_template_kwargs
    return arguments is not None and bool(arguments.preserve_thinking)


def _max_tokens(request: SharedFields, prompt_tokens: int, limits: Limits) -> int:
    asked, param = request.max_tokens, "max_tokens"
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        asked, param = request.max_completion_tokens, "max_completion_tokens"
    context = limits.context_tokens
    if context is None:
        return asked or limits.default_max_tokens
    room = context - prompt_tokens
    if room < 1:
        raise RequestError(
            f"the prompt has {prompt_tokens} tokens, but the context is {context}; shorten it",
            param="messages" if isinstance(request, ChatRequest) else "prompt",
            code="context_length_exceeded",
        )
    if asked is not None and asked > room:
        raise RequestError(
            f"the prompt's {prompt_tokens} tokens and {param} {asked} pass the context of "
            f"{context}; shorten the prompt or send at most {room}",
            param=param,
            code="context_length_exceeded",
        )
    return min(limits.default_max_tokens, room) if asked is None else asked


def _bias(bias: dict[str, float] | None, vocabulary_size: int) -> dict[int, float]:
    result = {}
    for text, value in (bias or {}).items():
        known = text.isascii() and text.isdecimal() and len(text) <= MAX_ID_DIGITS
        if not known or int(text) >= vocabulary_size:
            raise RequestError(
                f"logit_bias names the token {text[:20]!r}; ids are 0 to {vocabulary_size - 1}",
                param="logit_bias",
            )
        result[int(text)] = value
    return result
