"""Asking a process whether it is ready."""

import json
from contextlib import suppress
from dataclasses import dataclass

import aiohttp

PROBE_TIMEOUT_S = 10.0
"""A router's answer includes a real generation."""


@dataclass(frozen=True)
class Answer:
    """What `/readyz` said; `text` is its reason for not being ready, empty if nobody answered."""

    ready: bool
    text: str = ""


async def probe(http: aiohttp.ClientSession, url: str) -> Answer:
    """One GET with a deadline; a refused connection or a late answer is just not ready."""
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    try:
        async with http.get(url, timeout=timeout) as response:
            if response.status == 200:
                return Answer(ready=True)
            return Answer(ready=False, text=_reason(await response.content.read(4096)))
    except (aiohttp.ClientError, TimeoutError, OSError):
        return Answer(ready=False)


def _reason(body: bytes) -> str:
    """The message of an error body, or its plain text, on one line."""
    text = body.decode("utf-8", "replace")
    with suppress(
        ValueError, TypeError, KeyError, AttributeError
    ):  # what is no error body is shown as it is
        answer = json.loads(text)
        text = str(answer.get("error", answer)["message"])
    return " ".join(text.split())[:200]
