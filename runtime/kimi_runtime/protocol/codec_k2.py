"""The K2 family's conversation format (K2, K2-Thinking, K2.5, K2.6, K2.7-Code): chat to ids.

A message is a role token, a name, `<|im_middle|>`, a body and `<|im_end|>`. Tools are declared in a
first message of their own. Structure is made of special ids that no text can produce.
"""

from collections.abc import Sequence

from kimi_runtime.protocol.chat import Chat, Message, Rendered, ToolCall
from kimi_runtime.protocol.declare import declare
from kimi_runtime.protocol.incremental import Part, Segment, SessionRecord, encode_segments
from kimi_runtime.protocol.parser_k2 import K2Parser
from kimi_runtime.protocol.vocabulary import Vocabulary

PENDING_IDS = 3
"""Ids of the generation stub's end that usage figures leave out (facts: models.md, fact 6)."""

_CALL_MARKERS = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_ROLE_TOKENS = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}
_MIDDLE = Segment("<|im_middle|>", control=True)
_END = Segment("<|im_end|>", control=True)
_THINK = Segment("<think>", control=True)
_THOUGHT = Segment("</think>", control=True)


class K2Codec:
    """Renders chats and parses outputs for one vocabulary. Stateless; shared by all requests."""

    def __init__(self, vocabulary: Vocabulary, *, always_keep_reasoning: bool = False) -> None:
        """`always_keep_reasoning`: K2.7-Code's template, which ignores `Chat.keep_reasoning`."""
        self._vocabulary = vocabulary
        self._always_keep = always_keep_reasoning

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the ids."""
        return self._vocabulary

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an output: `<|im_end|>`, and `[EOS]`, which K2's configs name instead."""
        return (self._vocabulary.special("<|im_end|>"), self._vocabulary.special("[EOS]"))

    @property
    def call_ids(self) -> tuple[int, ...]:
        """Ids that only calls have: without one of them an output is reasoning and content."""
        return tuple(map(self._vocabulary.special, _CALL_MARKERS))

    def render(self, chat: Chat, record: SessionRecord | None = None) -> Rendered:
        """The prompt, the assistant's header included, so that the output continues it.

        With a `record` of the conversation only new turns are encoded; the ids are the same.
        Raises RequestError for text that is not Unicode.
        """
        record = SessionRecord(self._vocabulary) if record is None else record
        ids, ends, at = record.encode(self.parts(chat))
        stub, _ = encode_segments(self._vocabulary, self._stub(chat), at)
        return Rendered(
            ids=(*ids, *stub),
            pending=PENDING_IDS,
            starts_in_reasoning=chat.thinking,
            boundaries=tuple(ends),
            next_call_number=sum(len(message.calls) for message in chat.messages),
        )

    def parser(self, rendered: Rendered, chat: Chat) -> K2Parser:
        """A parser for the output ids that follow `rendered`, a prompt of `chat`."""
        return K2Parser(self._vocabulary, rendered, chat)

    def parts(self, chat: Chat) -> list[Part]:
        """One part per message, the tool declaration first."""
        parts = []
        if chat.tools:
            body = Segment(declare(chat.tools))
            parts.append((*_header("<|im_system|>", "tool_declare"), body, _END))
        call_ids = _CallIds()
        first_kept = self._first_kept(chat)
        for index, message in enumerate(chat.messages):
            role = _ROLE_TOKENS.get(message.role, "<|im_system|>")
            head = _header(role, message.name or message.role)
            if message.role == "assistant":
                body_parts = _assistant(message, call_ids, keep=index >= first_kept)
            elif message.role == "tool":
                heading = f"## Return of {call_ids.of_result(message.call_id or '')}\n"
                body_parts = [Segment(heading + message.content)]
            else:
                body_parts = [Segment(message.content)]
            parts.append((*head, *body_parts, _END))
        return parts

    def _first_kept(self, chat: Chat) -> int:
        """Index of the first message whose reasoning is rendered.

        Everything up to the last assistant message without calls (an answer, not a step on the
        way to one) has its reasoning emptied; without thinking all of it is.
        """
        if not chat.thinking:
            return len(chat.messages)
        if self._always_keep or chat.keep_reasoning:
            return 0
        answers = [
            index
            for index, message in enumerate(chat.messages)
            if message.role == "assistant" and not message.calls
        ]
        return answers[-1] + 1 if answers else 0

    @staticmethod
    def _stub(chat: Chat) -> Part:
        head = _header("<|im_assistant|>", "assistant")
        return (*head, _THINK) if chat.thinking else (*head, _THINK, _THOUGHT)


class _CallIds:
    """Renames calls to what the models know: `functions.{name}:{n}`, n over the conversation.

    With other ids in the history a model answers with bare counters (facts: models.md §2.3).
    """

    def __init__(self) -> None:
        self._count = 0
        self._renamed: dict[str, list[str]] = {}

    def of_calls(self, calls: Sequence[ToolCall]) -> list[str]:
        """The new ids of one message's calls."""
        renamed = [f"functions.{call.name}:{self._count + n}" for n, call in enumerate(calls)]
        self._count += len(calls)
        # Clients repeat ids: a result belongs to the newest message that made its call.
        fresh: dict[str, list[str]] = {call.id: [] for call in calls}
        for call, name in zip(calls, renamed, strict=True):
            fresh[call.id].append(name)
        self._renamed |= fresh
        return renamed

    def of_result(self, original: str) -> str:
        """Results of an id that one message has twice take its calls in order."""
        calls = self._renamed.get(original)
        if not calls:
            return original
        return calls.pop(0) if len(calls) > 1 else calls[0]


def _header(role_token: str, name: str) -> Part:
    return (Segment(role_token, control=True), Segment(name), _MIDDLE)


def _assistant(message: Message, call_ids: _CallIds, *, keep: bool) -> list[Segment]:
    body = [_THINK, Segment(message.reasoning if keep else ""), _THOUGHT, Segment(message.content)]
    if message.calls:
        body.append(Segment("<|tool_calls_section_begin|>", control=True))
        for call, call_id in zip(message.calls, call_ids.of_calls(message.calls), strict=True):
            body += [
                Segment("<|tool_call_begin|>", control=True),
                Segment(call_id),
                Segment("<|tool_call_argument_begin|>", control=True),
                Segment(call.arguments),
                Segment("<|tool_call_end|>", control=True),
            ]
        body.append(Segment("<|tool_calls_section_end|>", control=True))
    return body
