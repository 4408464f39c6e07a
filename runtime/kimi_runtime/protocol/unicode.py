"""Text from outside must have a UTF-8 form."""

from kimi_runtime.errors import RequestError


def require_unicode(text: str, param: str) -> str:
    """`text` itself, or RequestError if JSON escapes put a lone surrogate into it."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise RequestError(
            f"{param} is not valid UTF-8: character {exc.start} is the lone surrogate "
            f"U+{ord(text[exc.start]):04X}",
            param=param,
        ) from exc
    return text
