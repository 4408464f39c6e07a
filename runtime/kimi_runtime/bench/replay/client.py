"""One streamed chat completion, timed chunk by chunk."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from kimi_runtime.bench.replay.outcome import Outcome

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to ask: an OpenAI base URL ending in /v1, the model's name, and an API key."""

    url: str
    model: str
    api_key: str = "none"
    timeout_s: float = 120.0


class ChatClient:
    """Asks one endpoint over pooled connections. `clock` tells seconds since the replay began.

    No answer has a token of `never`.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        endpoint: Endpoint,
        clock: Callable[[], float],
        never: Iterable[int] = (),
    ) -> None:
        self._http, self._endpoint, self._clock = http, endpoint, clock
        self._bias = dict.fromkeys(map(str, never), -100)

    async def ask(
        self,
        outcome: Outcome,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        leave_after: int | None = None,
    ) -> None:
        """Fill the outcome; what goes wrong is its `error`. `leave_after`: chunks it stays for."""
        try:
            async with asyncio.timeout(self._endpoint.timeout_s):
                await self._stream(outcome, self._body(messages, max_tokens), leave_after)
        except TimeoutError:
            outcome.error = f"no end within {self._endpoint.timeout_s:g} s"
        except (aiohttp.ClientError, ValueError) as wrong:
            outcome.error = f"{type(wrong).__name__}: {wrong}"
        outcome.ended_s = self._clock()
        if outcome.error is None and outcome.finish is None and not outcome.aborted:
            outcome.error = "the stream ended without a finish reason"

    def _body(self, messages: Sequence[Message], max_tokens: int) -> dict[str, Any]:
        return {
            "model": self._endpoint.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "logit_bias": self._bias,
            "thinking": {"type": "disabled"},
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def _stream(
        self, outcome: Outcome, body: dict[str, Any], leave_after: int | None
    ) -> None:
        url = f"{self._endpoint.url}/chat/completions"
        headers = {
            "Authorization": f"Bearer {self._endpoint.api_key}",
            "X-Session-ID": outcome.session,
        }
        parts: list[str] = []
        async with self._http.post(url, json=body, headers=headers) as answer:
            outcome.status = answer.status
            if answer.status != 200:
                outcome.retry_after_s = _seconds(answer.headers.get("Retry-After"))
                outcome.error = f"HTTP {answer.status}: {(await answer.text())[:300]}"
                return
            try:
                async for event in _events(answer.content):
                    self._take(outcome, event, parts)
                    if leave_after is not None and len(outcome.chunk_s) >= leave_after:
                        outcome.aborted = True
                        break
            finally:
                outcome.text = "".join(parts)

    def _take(self, outcome: Outcome, event: dict[str, Any], parts: list[str]) -> None:
        if "error" in event:
            raise ValueError(f"an error within the stream: {event['error']}")
        if usage := event.get("usage"):
            outcome.prompt_tokens = usage["prompt_tokens"]
            outcome.output_tokens = usage["completion_tokens"]
            outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get(
                "cached_tokens", 0
            )
        for choice in event.get("choices", ()):
            delta = choice["delta"]
            if (text := delta.get("content") or delta.get("reasoning_content")) is not None:
                now_s = self._clock()
                outcome.first_s = now_s if outcome.first_s is None else outcome.first_s
                outcome.chunk_s.append(now_s)
                parts.append(text if delta.get("content") else "")
            outcome.finish = choice.get("finish_reason") or outcome.finish


def _seconds(header: str | None) -> float | None:
    """A Retry-After in seconds; None for none, and for a date."""
    return float(header) if header is not None and header.isdecimal() else None


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    async for line in stream:
        if line.startswith(b"data: ") and (data := line[6:].strip()) != b"[DONE]":
            yield json.loads(data)
