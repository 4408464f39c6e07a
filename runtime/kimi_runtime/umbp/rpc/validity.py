"""From when to when certificates are good: the two dates of X.509, read from their DER (RFC 5280).

The standard library tells them only of a certificate that a peer has shown and that was verified.
"""

import re
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

DAY_S = 86400.0

SOON_DAYS = 14
SOON_SHARE = 0.25
"""Of a certificate's whole time: one that is good for a day is not late all its life."""

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17
_VALIDITY_AT = 3
"""Behind the version, which may be absent: serial number, algorithm, issuer."""


class Validity(NamedTuple):
    """From when to when, in seconds since the epoch."""

    begins_s: float
    ends_s: float

    @property
    def days(self) -> float:
        """Days from its begin to its end."""
        return (self.ends_s - self.begins_s) / DAY_S

    def days_left(self, unix_s: float) -> float:
        """Days until it ends; negative once it has."""
        return (self.ends_s - unix_s) / DAY_S

    def ends_soon(self, unix_s: float) -> bool:
        """Whether it should have been renewed by now."""
        return self.days_left(unix_s) < min(SOON_DAYS, SOON_SHARE * self.days)


def validity_of(pem: bytes) -> Validity:
    """Of the certificate in a PEM file that ends first; ValueError if there is none to be read."""
    found = [
        _validity(ssl.PEM_cert_to_DER_cert(one))
        for one in _PEM.findall(pem.decode("ascii", "replace"))
    ]
    if not found:
        raise ValueError("no certificate")
    return min(found, key=lambda one: one.ends_s)


def _validity(der: bytes) -> Validity:
    try:
        ((_, certificate),) = _elements(der)
        _, signed = next(_elements(certificate))
        parts = list(_elements(signed))
        _, validity = parts[_VALIDITY_AT + (parts[0][0] == _VERSION)]
        begins, ends = _elements(validity)
    except (IndexError, StopIteration) as exc:
        raise ValueError("a certificate without its parts") from exc
    return Validity(_unix_s(*begins), _unix_s(*ends))


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of each element, one behind another."""
    at = 0
    while at + 2 <= len(data):
        tag, size = data[at], data[at + 1]
        at += 2
        if size & 0x80:
            digits = size & 0x7F
            size = int.from_bytes(data[at : at + digits], "big")
            at += digits
        if at + size > len(data):
            raise ValueError("a certificate that is cut off")
        yield tag, data[at : at + size]
        at += size


def _unix_s(tag: int, text: bytes) -> float:
    digits = text.decode("ascii")
    if tag == _UTC_TIME:  # its years have two digits, and are of 1950 to 2049
        digits = ("19" if digits[:2] >= "50" else "20") + digits
    return datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
