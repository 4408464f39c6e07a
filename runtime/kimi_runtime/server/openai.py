"""OpenAI's API over the router: chat completions, completions, models."""

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import ExitStack
from functools import partial
from typing import Any

from starlette.requests import Request

from kimi_runtime import clock
from kimi_runtime.errors import KimistackError, NotFound
from kimi_runtime.protocol.codec_k2 import K2Codec
from kimi_runtime.router.admission import Slot
from kimi_runtime.router.service import Router
from kimi_runtime.server.asgi import read_body, trace_of
from kimi_runtime.server.chat import ChatCompletions
from kimi_runtime.server.completions import Completions
from kimi_runtime.server.faults import openai_error
from kimi_runtime.server.generation import Caller, Generations
from kimi_runtime.server.metrics import RouterMetrics
from kimi_runtime.server.openai_request import (
    SharedFields,
    parse_chat,
    parse_completion,
)
from kimi_runtime.server.stream import SSE, Streamed, Whole, sse_event

THREAD_BYTES = 64 * 1024
"""Bodies beyond this are rendered in a thread: 100k tokens take 40 ms, and others are streaming."""
SESSION_HEADER = "x-session-id"
MAX_HINT_CHARS = 256


class OpenAiApi:
    """The handlers; `app.py` gives them their routes."""

    def __init__(self, router: Router, codec: K2Codec, metrics: RouterMetrics) -> None:
        generations = Generations(router, metrics, codec.stop_ids)
        self._chat = ChatCompletions(router, codec, generations)
        self._completions = Completions(router, generations)
        self._router, self._spec = router, router.spec
        self._created = int(clock.unix_s())

    async def chat_completions(self, request: Request) -> Streamed | Whole:
        """`POST /v1/chat/completions`."""
        with ExitStack() as owned:
            slot = owned.enter_context(self._router.admission.slot())
            body = await self._body(request)
            wanted = parse_chat(body)
            self._check_model(wanted.model)
            caller = self._caller(request, wanted, slot)
            large = len(body) > THREAD_BYTES
            if wanted.stream:
                return self._streamed(self._chat.stream(wanted, caller, large=large), owned)
            return self._whole(partial(self._chat.whole, wanted, caller, large=large), owned)

    async def completions(self, request: Request) -> Streamed | Whole:
        """`POST /v1/completions`."""
        with ExitStack() as owned:
            slot = owned.enter_context(self._router.admission.slot())
            wanted = parse_completion(await self._body(request))
            self._check_model(wanted.model)
            caller = self._caller(request, wanted, slot)
            if wanted.stream:
                return self._streamed(self._completions.stream(wanted, caller), owned)
            return self._whole(partial(self._completions.whole, wanted, caller), owned)

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

    def _streamed(self, pieces: AsyncGenerator[bytes, None], owned: ExitStack) -> Streamed:
        return Streamed(
            pieces,
            media_type=SSE,
            last_words=_last_words,
            stall_s=self._spec.send_stall,
            owned=owned.pop_all(),
        )

    def _whole(self, work: Callable[[], Coroutine[Any, Any, Any]], owned: ExitStack) -> Whole:
        return Whole(work, stall_s=self._spec.send_stall, owned=owned.pop_all())

    def _check_model(self, name: str) -> None:
        if name != self._spec.model_name:
            raise NotFound(
                f"the model {name[:100]!r} is not served here; this is {self._spec.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def _caller(self, request: Request, wanted: SharedFields, slot: Slot) -> Caller:
        hint = request.headers.get(SESSION_HEADER) or wanted.prompt_cache_key
        return Caller(
            tenant=request.scope["kimistack.tenant"],
            hint=hint[:MAX_HINT_CHARS] if hint else None,
            trace=trace_of(request.scope),
            slot=slot,
        )


def _last_words(error: KimistackError) -> bytes:
    """A failure in the middle of a stream: the client's SDK raises it."""
    return sse_event(openai_error(error), event="error")
