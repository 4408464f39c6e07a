"""Sizes, durations and rates as people write them (`512GiB`, `2h30m`, `50GB/s`), numbers in code.

The annotated types work in any pydantic model: they accept the written form or a plain number
(bytes, seconds, bytes per second) and hold the number. Their JSON schema is a string, which is
what a Kubernetes API server must accept for such a field.
"""

import math
import re
import sys
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_DECIMAL = {"k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_SCALES = {"": 1, **_BINARY, **_DECIMAL}
# [0-9], not \d: the latter also matches digits that the JSON schemas below refuse.
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGTP]i|[kKMGTP])?(B)?\s*")
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|us|s|m|h|d)")
_LARGEST = sys.float_info.max
_DURATION_S = {
    "us": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}


def parse_bytes(text: str | int | float) -> int:
    """A size in bytes from `512GiB`, `512Gi` (2**30), `1.5GB`, `64k` (10**3) or a whole number.

    Raises ValueError with the accepted forms for anything else, negative sizes and fractions of
    a byte included.
    """
    if isinstance(text, bool):
        raise ValueError(f"a size such as 512GiB is wanted, not {text!r}")
    if isinstance(text, int | float):
        whole = isinstance(text, int) or (math.isfinite(text) and text.is_integer())
        if not whole or text < 0:
            raise ValueError(
                f"a size is a whole number of bytes or a text like 512GiB, not {text!r}"
            )
        return int(text)
    value = _decimal_size(text) if isinstance(text, str) else None
    if value is None:
        raise ValueError(f"{text!r} is no size: write e.g. 512GiB, 64Mi, 1.5GB or 4096")
    if value != int(value):
        raise ValueError(f"{text!r} is no whole number of bytes")
    return int(value)


def _decimal_size(text: str) -> Decimal | None:
    """The number of bytes a text states, exactly; None if it states none."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    number, scale, _ = match.groups()
    return Decimal(number) * _SCALES[scale or ""]


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
        if not 0 <= text <= _LARGEST:
            raise ValueError(f"a duration is a number of seconds of at least 0, not {text!r}")
        return float(text)
    if isinstance(text, str):
        parts = _DURATION_PART.findall(text.strip())
        if parts and "".join(number + unit for number, unit in parts) == text.strip():
            return float(sum(Decimal(number) * _DURATION_S[unit] for number, unit in parts))
    raise ValueError(f"{text!r} is no duration: write e.g. 250ms, 30s, 5m or 2h30m")


def format_seconds(seconds: float) -> str:
    """Seconds as the largest unit that divides them: 7200 -> `2h`, 0.25 -> `250ms`; exact."""
    exact = Decimal(repr(float(seconds)))
    if exact == int(exact):
        for unit, size in (("h", 3600), ("m", 60)):
            if exact and int(exact) % size == 0:
                return f"{int(exact) // size}{unit}"
        return f"{int(exact)}s"
    millis = exact * 1000
    return f"{int(millis)}ms" if millis == int(millis) else f"{exact:f}s"


def parse_rate(text: str | int | float) -> float:
    """Bytes per second from `50GB/s` (10**9) or a plain number. ValueError otherwise."""
    if isinstance(text, str):
        value = _decimal_size(text.rstrip()[:-2]) if text.rstrip().endswith("/s") else None
        if value is None:
            raise ValueError(f"{text!r} is no rate: write e.g. 50GB/s")
        return float(value)
    if isinstance(text, bool) or not isinstance(text, int | float) or not 0 <= text <= _LARGEST:
        raise ValueError(f"a rate is bytes per second or a text like 50GB/s, not {text!r}")
    return float(text)


def format_rate(bytes_per_s: float) -> str:
    """A rate in decimal units: 5e10 -> `50GB/s`; exact."""
    exact = Decimal(repr(float(bytes_per_s)))
    for unit, power in (("T", 12), ("G", 9), ("M", 6), ("k", 3)):
        if exact >= 10**power:
            return f"{_plain(exact.scaleb(-power))}{unit}B/s"
    return f"{_plain(exact)}B/s"


def _plain(value: Decimal) -> str:
    """Digits without an exponent or trailing zeros."""
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


Bytes = Annotated[
    int,
    BeforeValidator(parse_bytes),
    PlainSerializer(format_bytes, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?([KMGTP]i|[kKMGTP])?B?$"}),
]
Seconds = Annotated[
    float,
    BeforeValidator(parse_seconds),
    PlainSerializer(format_seconds, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": r"^([0-9]+(\.[0-9]+)?(us|ms|s|m|h|d))+$"}),
]
Rate = Annotated[
    float,
    BeforeValidator(parse_rate),
    PlainSerializer(format_rate, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?([KMGTP]i|[kKMGTP])?B/s$"}),
]
