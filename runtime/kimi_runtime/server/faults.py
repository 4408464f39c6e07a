"""Errors as HTTP answers: OpenAI's form for clients, `ErrorBody` between processes."""

import math
from typing import Any

from kimi_runtime.errors import KimistackError, Unavailable
from kimi_runtime.spec.request import ErrorBody

UNAVAILABLE_RETRY_S = 2.0
"""When to try again after a 503: a restarted worker needs about this long to be found again."""


def retry_after_s(error: KimistackError) -> float | None:
    """Seconds for the Retry-After header; None where trying again would not help."""
    stated = getattr(error, "retry_after_s", None)
    if stated is not None:
        return float(stated)
    return UNAVAILABLE_RETRY_S if isinstance(error, Unavailable) else None


def headers_of(error: KimistackError) -> list[tuple[bytes, bytes]]:
    """Headers an error's answer has besides its body's."""
    headers = []
    wait_s = retry_after_s(error)
    if wait_s is not None:
        headers.append((b"retry-after", str(max(math.ceil(wait_s), 1)).encode()))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def openai_error(error: KimistackError) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}` as OpenAI's clients read it."""
    return {
        "error": {
            "message": str(error),
            "type": error.type,
            "param": getattr(error, "param", None),
            "code": getattr(error, "code", None),
        }
    }


def error_body(error: KimistackError) -> ErrorBody:
    """The error as one process tells it to another."""
    return ErrorBody(
        status=error.status,
        type=error.type,
        message=str(error),
        param=getattr(error, "param", None),
        code=getattr(error, "code", None),
        retry_after_s=retry_after_s(error),
    )


class InternalError(KimistackError):
    """A bug of ours; the log has its stack."""
