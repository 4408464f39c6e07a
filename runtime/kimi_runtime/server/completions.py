"""`POST /v1/completions`: a text or ids, continued as they are, without a chat format."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from kimi_runtime.errors import RequestError
from kimi_runtime.protocol.chat import Rendered
from kimi_runtime.router.service import Router
from kimi_runtime.server.answer import Answer, Part, PlainParser
from kimi_runtime.server.generation import Ask, Caller, Generations
from kimi_runtime.server.openai_output import completion_logprobs, new_head, usage_json
from kimi_runtime.server.openai_request import CompletionRequest
from kimi_runtime.server.stream import SSE_DONE, sse_event
from kimi_runtime.spec.request import TokenLogprob


class Completions:
    """Answers to plain prompts."""

    def __init__(self, router: Router, generations: Generations) -> None:
        self._generations, self._vocabulary = generations, router.vocabulary
        self._model = router.spec.model_name

    async def stream(
        self, wanted: CompletionRequest, caller: Caller
    ) -> AsyncGenerator[bytes, None]:
        """Server-sent events."""
        head = new_head("cmpl", self._model)
        options = wanted.stream_options
        async with self._open(wanted, caller) as answer:
            offset = 0
            async with aclosing(self._generations.parts(answer)) as parts:
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

    async def whole(self, wanted: CompletionRequest, caller: Caller) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        texts: list[str] = []
        logprobs: list[TokenLogprob] = []
        async with (
            self._open(wanted, caller) as answer,
            aclosing(self._generations.parts(answer)) as parts,
        ):
            async for part in parts:
                texts.append(_text(part))
                logprobs.extend(part.logprobs)
        choice = _completion_choice("".join(texts), answer.finish)
        if wanted.logprobs is not None:
            choice["logprobs"] = completion_logprobs(logprobs, self._vocabulary, offset=0)
        usage = usage_json(answer.usage)
        return new_head("cmpl", self._model).object("text_completion", [choice], usage=usage)

    @asynccontextmanager
    async def _open(self, wanted: CompletionRequest, caller: Caller) -> AsyncIterator[Answer]:
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
        async with self._generations.open(wanted, caller, ask) as answer:
            yield answer


def _text(part: Part) -> str:
    return "".join(getattr(event, "text", "") for event in part.events)


def _completion_choice(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, "text": text, "finish_reason": finish, "logprobs": None}
