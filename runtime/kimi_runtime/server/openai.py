"""OpenAI's API over the router: chat completions, completions, models."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request

from kimi_runtime import clock
from kimi_runtime.errors import KimistackError, NotFound, RequestError
from kimi_runtime.protocol.chat import Chat, Rendered
from kimi_runtime.protocol.codec_k2 import K2Codec
from kimi_runtime.router.service import Router
from kimi_runtime.server.answer import Answer, OutputParser, Part, PlainParser
from kimi_runtime.server.asgi import Trace, read_body, trace_of
from kimi_runtime.server.faults import openai_error
from kimi_runtime.server.metrics import RouterMetrics
from kimi_runtime.server.openai_output import (
    ChatChunks,
    ChatMessage,
    Head,
    completion_logprobs,
    usage_json,
)
from kimi_runtime.server.openai_request import (
    ChatRequest,
    CompletionRequest,
    SharedFields,
    parse_chat,
    parse_completion,
)
from kimi_runtime.server.prepare import (
    INSTANT_TEMPERATURE,
    THINKING_TEMPERATURE,
    Limits,
    Records,
    chat_of,
    grammar_of,
    sampling_of,
    stops_of,
)
from kimi_runtime.server.stream import SSE, SSE_DONE, Streamed, Whole, sse_event
from kimi_runtime.spec.request import Grammar, TokenLogprob

THREAD_BYTES = 64 * 1024
"""Bodies beyond this are rendered in a thread: 100k tokens take 40 ms, and others are streaming."""
MAX_RECORDS = 1024
SESSION_HEADER = "x-session-id"
MAX_HINT_CHARS = 256


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the tenant of its API key, and its word for the conversation, if any."""

    tenant: str
    hint: str | None
    trace: Trace


@dataclass(frozen=True, slots=True)
class Ask:
    """A rendered prompt, and how its output is constrained and read."""

    rendered: Rendered
    parser: OutputParser
    grammar: Grammar | None = None
    grammar_required: bool = False
    temperature: float = THINKING_TEMPERATURE
    one_call: bool = False


class OpenAiApi:
    """The handlers; `app.py` gives them their routes."""

    def __init__(self, router: Router, codec: K2Codec, metrics: RouterMetrics) -> None:
        self._router, self._codec, self._metrics = router, codec, metrics
        self._spec, self._vocabulary = router.spec, router.vocabulary
        self._records = Records(router.vocabulary, limit=MAX_RECORDS)
        self._created = int(clock.unix_s())

    async def chat_completions(self, request: Request) -> Streamed | Whole:
        """`POST /v1/chat/completions`."""
        body = await self._body(request)
        wanted = parse_chat(body)
        self._check_model(wanted.model)
        caller = self._caller(request, wanted)
        large = len(body) > THREAD_BYTES
        if wanted.stream:
            return self._streamed(self._chat_stream(wanted, caller, large=large))
        return self._whole(partial(self._chat_whole, wanted, caller, large=large))

    async def completions(self, request: Request) -> Streamed | Whole:
        """`POST /v1/completions`."""
        wanted = parse_completion(await self._body(request))
        self._check_model(wanted.model)
        caller = self._caller(request, wanted)
        if wanted.stream:
            return self._streamed(self._completion_stream(wanted, caller))
        return self._whole(partial(self._completion_whole, wanted, caller))

    def models(self) -> dict[str, Any]:
        """`GET /v1/models`."""
        return {"object": "list", "data": [self.model(self._spec.model_name)]}

    def model(self, name: str) -> dict[str, Any]:
        """`GET /v1/models/{name}`; NotFound for another model than ours."""
        self._check_model(name)
        context = self._router.fleet.max_context_tokens
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "kimistack",
            "context_length": context,
            "max_model_len": context,
            "input_modalities": ["text"],
            "output_modalities": ["text"],
            "capabilities": {
                "chat": True,
                "completions": True,
                "streaming": True,
                "thinking": True,
                "thinking_default": self._spec.thinking,
                "tools": True,
                "parallel_tool_calls": True,
                "structured_output": True,
                "logprobs": True,
                "vision": False,
            },
        }

    async def _body(self, request: Request) -> bytes:
        spec = self._spec
        return await read_body(request, limit=spec.max_body, stall_s=spec.send_stall)

    def _streamed(self, pieces: AsyncGenerator[bytes, None]) -> Streamed:
        return Streamed(
            pieces, media_type=SSE, last_words=_last_words, stall_s=self._spec.send_stall
        )

    def _whole(self, work: Any) -> Whole:
        return Whole(work, stall_s=self._spec.send_stall)

    def _check_model(self, name: str) -> None:
        if name != self._spec.model_name:
            raise NotFound(
                f"the model {name[:100]!r} is not served here; this is {self._spec.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def _caller(self, request: Request, wanted: SharedFields) -> Caller:
        hint = request.headers.get(SESSION_HEADER) or wanted.prompt_cache_key
        return Caller(
            tenant=request.scope["kimistack.tenant"],
            hint=hint[:MAX_HINT_CHARS] if hint else None,
            trace=trace_of(request.scope),
        )

    def _head(self, caller: Caller, prefix: str) -> Head:
        return Head(
            id=f"{prefix}-{secrets.token_hex(12)}",
            created=int(clock.unix_s()),
            model=self._spec.model_name,
        )

    async def _chat_stream(
        self, wanted: ChatRequest, caller: Caller, *, large: bool
    ) -> AsyncGenerator[bytes, None]:
        options = wanted.stream_options
        chunks = ChatChunks(
            self._head(caller, "chatcmpl"),
            self._vocabulary,
            include_usage=options is not None and options.include_usage,
        )
        async with self._chat_answer(wanted, caller, large=large) as answer:
            async with aclosing(self._observed(answer, caller)) as parts:
                async for part in parts:
                    events = chunks.of(part)
                    if events:
                        yield b"".join(map(sse_event, events))
            for event in chunks.last(answer.finish, answer.usage):
                yield sse_event(event)
        yield SSE_DONE

    async def _chat_whole(
        self, wanted: ChatRequest, caller: Caller, *, large: bool
    ) -> dict[str, Any]:
        message = ChatMessage(self._vocabulary)
        async with (
            self._chat_answer(wanted, caller, large=large) as answer,
            aclosing(self._observed(answer, caller)) as parts,
        ):
            async for part in parts:
                message.add(part)
        choice = message.choice(answer.finish, with_logprobs=bool(wanted.logprobs))
        usage = usage_json(answer.usage)
        return self._head(caller, "chatcmpl").object("chat.completion", [choice], usage=usage)

    @asynccontextmanager
    async def _chat_answer(
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
        ask = Ask(
            rendered=rendered,
            parser=self._codec.parser(rendered, chat),
            grammar=grammar,
            grammar_required=demanded,
            temperature=THINKING_TEMPERATURE if chat.thinking else INSTANT_TEMPERATURE,
            one_call=not chat.parallel_calls,
        )
        async with self._answer(wanted, caller, ask) as answer:
            yield answer

    async def _render(self, chat: Chat, caller: Caller, *, large: bool) -> Rendered:
        name, record = self._records.take(caller.tenant, caller.hint, chat)
        if large:
            rendered = await asyncio.to_thread(self._codec.render, chat, record)
        else:
            rendered = self._codec.render(chat, record)
        self._records.give(name, record)
        return rendered

    @asynccontextmanager
    async def _answer(
        self, wanted: SharedFields, caller: Caller, ask: Ask
    ) -> AsyncIterator[Answer]:
        """An admitted, planned answer; its slot is free again when the block ends."""
        router = self._router
        started_s = clock.now_s()
        with router.admission.slot() as slot:
            turn = router.sessions.begin(caller.tenant, caller.hint, ask.rendered)
            if not turn.continues:
                slot.starts_session()
            sampling = sampling_of(
                wanted,
                default_temperature=ask.temperature,
                stop_ids=self._codec.stop_ids,
                prompt_tokens=len(turn.ids),
                limits=Limits(router.fleet.max_context_tokens, self._spec.default_max_tokens),
                vocabulary_size=self._vocabulary.size,
            )
            job = router.job(
                turn,
                trace_id=caller.trace.id,
                sampling=sampling,
                grammar=ask.grammar,
                grammar_required=ask.grammar_required,
            )
            answer = Answer(
                router=router,
                turn=turn,
                job=job,
                parser=ask.parser,
                stops=stops_of(wanted),
                pending=ask.rendered.pending,
                one_call=ask.one_call,
            )
            try:
                yield answer
            finally:
                self._note(answer, caller)
            router.admission.served(clock.now_s() - started_s)

    async def _observed(self, answer: Answer, caller: Caller) -> AsyncGenerator[Part, None]:
        """The answer's parts, timed."""
        last_s: float | None = None
        async with aclosing(answer.parts()) as parts:
            async for part in parts:
                now_s = clock.now_s()
                if last_s is not None:
                    self._metrics.chunk(now_s - last_s)
                last_s = now_s
                yield part

    def _note(self, answer: Answer, caller: Caller) -> None:
        journey, usage = answer.job.journey, answer.usage
        self._metrics.ended(journey, usage)
        caller.trace.fields |= {
            "prompt_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "finish": answer.finish,
            "retries": journey.retries,
            "ttft_s": journey.ttft_s,
            "prefill_s": journey.prefill_s,
            "session": answer.turn.session.id.hex()[:12],
            "continues": answer.turn.continues,
        }
        if journey.plan is not None:
            caller.trace.fields |= {
                "mode": journey.plan.mode,
                "workers": journey.tried,
                "terms": dict(journey.plan.terms),
                "considered": journey.plan.considered,
            }

    @asynccontextmanager
    async def _completion_answer(
        self, wanted: CompletionRequest, caller: Caller
    ) -> AsyncIterator[Answer]:
        if isinstance(wanted.prompt, str):
            ids = tuple(self._vocabulary.encode_text(wanted.prompt))
        else:
            ids = wanted.prompt
        if not ids:
            raise RequestError("the prompt is empty; send at least one token", param="prompt")
        if max(ids) >= self._vocabulary.size:
            raise RequestError(
                f"the prompt has the id {max(ids)}; ids are 0 to {self._vocabulary.size - 1}",
                param="prompt",
            )
        rendered = Rendered(ids=ids, pending=0, starts_in_reasoning=False)
        ask = Ask(rendered, PlainParser(self._vocabulary))
        async with self._answer(wanted, caller, ask) as answer:
            yield answer

    async def _completion_stream(
        self, wanted: CompletionRequest, caller: Caller
    ) -> AsyncGenerator[bytes, None]:
        head = self._head(caller, "cmpl")
        options = wanted.stream_options
        async with self._completion_answer(wanted, caller) as answer:
            offset = 0
            async with aclosing(self._observed(answer, caller)) as parts:
                async for part in parts:
                    text = _text(part)
                    choice = _completion_choice(text)
                    if wanted.logprobs is not None:
                        choice["logprobs"] = completion_logprobs(
                            part.logprobs, self._vocabulary, offset=offset
                        )
                    offset += len(text)
                    yield sse_event(head.object("text_completion", [choice]))
            end = _completion_choice("", answer.finish) | {"usage": usage_json(answer.usage)}
            yield sse_event(head.object("text_completion", [end]))
            if options is not None and options.include_usage:
                yield sse_event(head.object("text_completion", [], usage=usage_json(answer.usage)))
        yield SSE_DONE

    async def _completion_whole(self, wanted: CompletionRequest, caller: Caller) -> dict[str, Any]:
        texts: list[str] = []
        logprobs: list[TokenLogprob] = []
        async with (
            self._completion_answer(wanted, caller) as answer,
            aclosing(self._observed(answer, caller)) as parts,
        ):
            async for part in parts:
                texts.append(_text(part))
                logprobs.extend(part.logprobs)
        choice = _completion_choice("".join(texts), answer.finish)
        if wanted.logprobs is not None:
            choice["logprobs"] = completion_logprobs(logprobs, self._vocabulary, offset=0)
        usage = usage_json(answer.usage)
        return self._head(caller, "cmpl").object("text_completion", [choice], usage=usage)


def _text(part: Part) -> str:
    return "".join(getattr(event, "text", "") for event in part.events)


def _completion_choice(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, "text": text, "finish_reason": finish, "logprobs": None}


def _last_words(error: KimistackError) -> bytes:
    """A failure in the middle of a stream: the client's SDK raises it."""
    return sse_event(openai_error(error), event="error")
