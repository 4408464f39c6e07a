"""`POST /v1/chat/completions`: from a checked request to events or a body."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from kimi_runtime.protocol.chat import Chat, Rendered
from kimi_runtime.protocol.codec_k2 import K2Codec
from kimi_runtime.router.estimate.outputs import Phase
from kimi_runtime.router.service import Router
from kimi_runtime.server.answer import Answer
from kimi_runtime.server.generation import Ask, Caller, Generations
from kimi_runtime.server.openai_output import ChatChunks, ChatMessage, new_head, usage_json
from kimi_runtime.server.openai_request import ChatRequest
from kimi_runtime.server.prepare import (
    INSTANT_TEMPERATURE,
    THINKING_TEMPERATURE,
    Records,
    chat_of,
    grammar_of,
)
from kimi_runtime.server.stream import SSE_DONE, sse_event

MAX_RECORD_IDS = 8_000_000


class ChatCompletions:
    """Answers to chats. `large` requests are tokenised in a thread: others are streaming."""

    def __init__(self, router: Router, codec: K2Codec, generations: Generations) -> None:
        self._codec, self._generations = codec, generations
        self._spec, self._vocabulary = router.spec, router.vocabulary
        self._records = Records(router.vocabulary, max_ids=MAX_RECORD_IDS)

    async def stream(
        self, wanted: ChatRequest, caller: Caller, *, large: bool
    ) -> AsyncGenerator[bytes, None]:
        """Server-sent events."""
        options = wanted.stream_options
        chunks = ChatChunks(
            new_head("chatcmpl", self._spec.model_name),
            self._vocabulary,
            include_usage=options is not None and options.include_usage,
        )
        async with self._open(wanted, caller, large=large) as answer:
            async with aclosing(self._generations.parts(answer)) as parts:
                async for part in parts:
                    events = chunks.of(part)
                    if events:
                        yield b"".join(map(sse_event, events))
            for event in chunks.last(answer.finish, answer.usage):
                yield sse_event(event)
        yield SSE_DONE

    async def whole(self, wanted: ChatRequest, caller: Caller, *, large: bool) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        message = ChatMessage(self._vocabulary)
        async with (
            self._open(wanted, caller, large=large) as answer,
            aclosing(self._generations.parts(answer)) as parts,
        ):
            async for part in parts:
                message.add(part)
        choice = message.choice(answer.finish, with_logprobs=bool(wanted.logprobs))
        usage = usage_json(answer.usage)
        return new_head("chatcmpl", self._spec.model_name).object(
            "chat.completion", [choice], usage=usage
        )

    @asynccontextmanager
    async def _open(
        self, wanted: ChatRequest, caller: Caller, *, large: bool
    ) -> AsyncIterator[Answer]:
        chat, changes = chat_of(wanted, thinks=self._spec.thinking)
        caller.trace.fields["rewrites"] = len(changes)
        rendered = await self._render(chat, caller, large=large)
        arguments = (wanted, chat, rendered, self._vocabulary)
        if chat.tools or wanted.response_format:
            grammar, demanded = await asyncio.to_thread(grammar_of, *arguments)
        else:
            grammar, demanded = None, False
        may_call = bool(chat.tools) and chat.choice != "none"
        ask = Ask(
            rendered=rendered,
            parser=self._codec.parser(rendered, chat),
            grammar=grammar,
            grammar_required=demanded,
            banned_ids=() if may_call else self._codec.call_ids,
            temperature=THINKING_TEMPERATURE if chat.thinking else INSTANT_TEMPERATURE,
            one_call=not chat.parallel_calls,
            phase=Phase.TOOL if may_call else Phase.FINAL,
        )
        async with self._generations.open(wanted, caller, ask) as answer:
            yield answer

    async def _render(self, chat: Chat, caller: Caller, *, large: bool) -> Rendered:
        name, record = self._records.take(caller.tenant, caller.hint, chat)
        if large:
            rendered = await asyncio.to_thread(self._codec.render, chat, record)
        else:
            rendered = self._codec.render(chat, record)
        self._records.give(name, record, size=len(rendered.ids))
        return rendered
