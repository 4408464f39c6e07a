"""What clients of OpenAI's API read: completions, chunks, usage, logprobs; Kimi's additions too."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kimi_runtime import clock
from kimi_runtime.protocol.chat import (
    CallArguments,
    CallEnded,
    CallStarted,
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
)
from kimi_runtime.protocol.vocabulary import Vocabulary
from kimi_runtime.server.answer import Part, Usage
from kimi_runtime.spec.request import TokenLogprob


def usage_json(usage: Usage) -> dict[str, Any]:
    """Usage with cached tokens in both places: at the top (Kimi) and in the details (OpenAI)."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer repeats."""

    id: str
    created: int
    model: str

    def object(self, kind: str, choices: list[Any], **more: Any) -> dict[str, Any]:
        """A response object of that kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


def new_head(prefix: str, model: str) -> Head:
    """The head of a new answer, with an id of its own."""
    return Head(f"{prefix}-{secrets.token_hex(12)}", int(clock.unix_s()), model)


@dataclass(slots=True)
class ChatChunks:
    """The chunks of a streamed chat completion. The role is in the first delta only."""

    head: Head
    vocabulary: Vocabulary
    include_usage: bool
    _begun: bool = False

    def of(self, part: Part) -> list[dict[str, Any]]:
        """Chunks for one part: a delta for each event that has one."""
        deltas = [delta for event in part.events if (delta := _delta(event)) is not None]
        if part.logprobs and not deltas:
            deltas = [{"content": ""}]
        chunks = [self._chunk(delta) for delta in deltas]
        if part.logprobs:
            last = next(
                (c for c in reversed(chunks) if "content" in c["choices"][0]["delta"]), chunks[-1]
            )
            last["choices"][0]["logprobs"] = logprobs_json(part.logprobs, self.vocabulary)
        return chunks

    def last(self, finish: str, usage: Usage) -> list[dict[str, Any]]:
        """The finishing chunk, with Kimi's usage in its choice, and OpenAI's own usage chunk."""
        end = self._chunk({})
        end["choices"][0] |= {"finish_reason": finish, "usage": usage_json(usage)}
        if not self.include_usage:
            return [end]
        return [end, self.head.object("chat.completion.chunk", [], usage=usage_json(usage))]

    def _chunk(self, delta: dict[str, Any]) -> dict[str, Any]:
        if not self._begun:
            delta, self._begun = {"role": "assistant", **delta}, True
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        more = {"usage": None} if self.include_usage else {}
        return self.head.object("chat.completion.chunk", [choice], **more)


def _delta(event: OutputEvent) -> dict[str, Any] | None:
    match event:
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ContentDelta(text):
            return {"content": text}
        case CallStarted(index, call_id, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": call_id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case CallEnded():
            return None


@dataclass(slots=True)
class ChatMessage:
    """A whole assistant message, gathered from parts. Calls that never ended are left out."""

    vocabulary: Vocabulary
    _reasoning: list[str] = field(default_factory=list)
    _content: list[str] = field(default_factory=list)
    _calls: dict[int, CallStarted] = field(default_factory=dict)
    _arguments: dict[int, list[str]] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)
    _logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, part: Part) -> None:
        """Take a part in."""
        self._logprobs.extend(part.logprobs)
        for event in part.events:
            match event:
                case ReasoningDelta(text):
                    self._reasoning.append(text)
                case ContentDelta(text):
                    self._content.append(text)
                case CallStarted(index):
                    self._calls[index], self._arguments[index] = event, []
                case CallArguments(index, text):
                    self._arguments[index].append(text)
                case CallEnded(index):
                    self._ended.add(index)

    def choice(self, finish: str, *, with_logprobs: bool) -> dict[str, Any]:
        """The one entry of `choices`."""
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": "".join(self._arguments[index])},
            }
            for index, call in sorted(self._calls.items())
            if index in self._ended
        ]
        content = "".join(self._content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or (None if calls else ""),
        }
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if calls:
            message["tool_calls"] = calls
        choice = {"index": 0, "message": message, "finish_reason": finish}
        if with_logprobs:
            choice["logprobs"] = logprobs_json(self._logprobs, self.vocabulary)
        return choice


def logprobs_json(logprobs: Sequence[TokenLogprob], vocabulary: Vocabulary) -> dict[str, Any]:
    """Chat logprobs: `{"content": [{token, logprob, bytes, top_logprobs}]}`."""
    content = [
        {
            **_token(entry.id, entry.logprob, vocabulary),
            "top_logprobs": [_token(number, value, vocabulary) for number, value in entry.top],
        }
        for entry in logprobs
    ]
    return {"content": content, "refusal": None}


def _token(number: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "token": _token_text(number, vocabulary),
        "logprob": logprob,
        "bytes": list(vocabulary.token_bytes(number)),
    }


def _token_text(number: int, vocabulary: Vocabulary) -> str:
    if vocabulary.is_special(number):
        return vocabulary.name(number)
    return vocabulary.decode_text((number,))


def completion_logprobs(
    logprobs: Sequence[TokenLogprob], vocabulary: Vocabulary, *, offset: int
) -> dict[str, Any]:
    """The older form of `/v1/completions`; `offset` is where the first token's text begins."""
    texts = [_token_text(entry.id, vocabulary) for entry in logprobs]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [entry.logprob for entry in logprobs],
        "top_logprobs": [
            {_token_text(number, vocabulary): value for number, value in entry.top}
            for entry in logprobs
        ],
        "text_offset": offsets,
    }
