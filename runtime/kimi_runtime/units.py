"""Sizes, durations and rates as people write them (`512GiB`, `2h30m`, `50GB/s`), numbers in code.

The annotated types work in any pydantic model: they accept the written form or a plain number
(bytes, seconds, bytes per second) and hold the number. Their JSON schema is a string, which is
what a Kubernetes API server must accept for such a field.
"""

import math
import re
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_DECIMAL = {"k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_SCALES = {"": 1, **_BINARY, **_DECIMAL}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGTP]i|[kKMGTP])?(B)?\s*")
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|us|s|m|h|d)")
_DURATION_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_bytes(text: str | int | float) -> int:
    """A size in bytes from `512GiB`, `512Gi` (2**30), `1.5GB`, `64k` (10**3) or a whole number.

    Raises ValueError with the accepted forms for anything else, negative sizes and fractions of
    a byte included.
    """
    if isinstance(text, bool):
        raise ValueError(f"a size such as 512GiB is wanted, not {text!r}")
    if isinstance(text, int | float):
        if not math.isfinite(text) or text < 0 or text != int(text):
            raise ValueError(
                f"a size is a whole number of bytes or a text like 512GiB, not {text!r}"
            )
        return int(text)
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is no size: write e.g. 512GiB, 64Mi, 1.5GB or 4096")
    number, scale, _ = match.groups()
    value = (float(number) if "." in number else int(number)) * _SCALES[scale or ""]
    if value != int(value):
        raise ValueError(f"{text!r} is no whole number of bytes")
    return int(value)


def format_bytes(size: int) -> str:
    """The shortest exact binary form of a size: 536870912 -> `512MiB`, 1000 -> `1000B`."""
    for unit, scale in reversed(_BINARY.items()):
        if size and size % scale == 0:
            return f"{size // scale}{unit}B"
    return f"{size}B"


def parse_seconds(text: str | int | float) -> float:
    """Seconds from `250ms`, `30s`, `2h30m`, or a plain number of seconds. ValueError otherwise."""
    if isinstance(text, bool):
        raise ValueError(f"a duration such as 30s is wanted, not {text!r}")
    if isinstance(text, int | float):
        if not math.isfinite(text) or text < 0:
            raise ValueError(f"a duration is a number of seconds of at least 0, not {text!r}")
        return float(text)
    if isinstance(text, str):
        parts = _DURATION_PART.findall(text.strip())
        if parts and "".join(number + unit for number, unit in parts) == text.strip():
            return sum(float(number) * _DURATION_S[unit] for number, unit in parts)
    raise ValueError(f"{text!r} is no duration: write e.g. 250ms, 30s, 5m or 2h30m")


def format_seconds(seconds: float) -> str:
    """Seconds as the largest unit that divides them: 7200 -> `2h`, 0.25 -> `250ms`."""
    for unit in ("h", "m", "s"):
        count = seconds / _DURATION_S[unit]
        if count >= 1 and count == int(count):
            return f"{int(count)}{unit}"
    millis = seconds * 1e3
    return f"{int(millis)}ms" if millis == int(millis) and millis else f"{seconds:g}s"


def parse_rate(text: str | int | float) -> float:
    """Bytes per second from `50GB/s` (10**9) or a plain number. ValueError otherwise."""
    if isinstance(text, str):
        if not text.rstrip().endswith("/s"):
            raise ValueError(f"{text!r} is no rate: write e.g. 50GB/s")
        return float(parse_bytes(text.rstrip()[:-2]))
    if isinstance(text, bool) or not math.isfinite(text) or text < 0:
        raise ValueError(f"a rate is bytes per second or a text like 50GB/s, not {text!r}")
    return float(text)


def format_rate(bytes_per_s: float) -> str:
    """A rate in decimal units: 5e10 -> `50GB/s`."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if bytes_per_s >= scale:
            return f"{bytes_per_s / scale:g}{unit}B/s"
    return f"{bytes_per_s:g}B/s"


Bytes = Annotated[
    int,
    BeforeValidator(parse_bytes),
    PlainSerializer(format_bytes, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": r"^\d+(\.\d+)?([KMGTP]i|[kKMGTP])?B?$"}),
]
Seconds = Annotated[
    float,
    BeforeValidator(parse_seconds),
    PlainSerializer(format_seconds, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": r"^(\d+(\.\d+)?(us|ms|s|m|h|d))+$"}),
]
Rate = Annotated[
    float,
    BeforeValidator(parse_rate),
    PlainSerializer(format_rate, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": r"^\d+(\.\d+)?([KMGTP]i|[kKMGTP])?B/s$"}),
]
