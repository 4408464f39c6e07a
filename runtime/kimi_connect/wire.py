"""What a pool daemon and its clients say to each other over the node's Unix socket.

A frame is `<length u32> <op u8> <request u64>` and `length` bytes of payload, little-endian. Every
request has one answer with its number. A connection starts with a mutual challenge: CHALLENGE from
the daemon, HELLO with a proof from the client, WELCOME with a proof from the daemon (or REFUSED).
Bytes of KV never pass here: both sides map the arena file.
"""

import hashlib
import hmac
import struct
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple, TypeVar

_Kind = TypeVar("_Kind", bound=IntEnum)

VERSION = 1
MAX_PAYLOAD = 8 << 20
KEY_BYTES = 16
TAG_BYTES = 16
NONCE_BYTES = 32
MAX_KEYS = 1024
"""Keys a client puts into one request. The daemon may answer for fewer: ask again for the rest."""

_HEADER = struct.Struct("<IBQ")
_U8, _U16, _U32, _U64 = (struct.Struct(code) for code in ("<B", "<H", "<I", "<Q"))
_UNPIN = struct.Struct("<QIB")
_EXTENT = struct.Struct("<QI")
_ITEM = struct.Struct(f"<{KEY_BYTES}sI")
_GRANT = struct.Struct("<BQI")
_PINNED = struct.Struct("<QIBI")
_TAG = struct.Struct(f"<I{TAG_BYTES}s")


class WireError(ValueError):
    """The peer sent something that is no frame or message of this protocol."""


class Op(IntEnum):
    """The kind of a frame."""

    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    REFUSED = 4
    RESERVE = 10
    RESERVED = 11
    COMMIT = 12
    COMMITTED = 13
    ABORT = 14
    PIN = 15
    PINNED = 16
    RENEW = 17
    UNPIN = 18
    HELD = 19
    REPORT = 20
    COUNT = 21
    ERROR = 22


class Outcome(str, Enum):  # noqa: UP042  (StrEnum needs Python 3.11; engines run 3.10 too)
    """Why a load's run ended. "No answer" and "not there" never look the same."""

    HIT = "hit"
    MISS = "miss"
    UNAVAILABLE = "unavailable"
    CORRUPT = "corrupt"
    LATE = "late"


class Grant(IntEnum):
    """The answer to one key of a RESERVE."""

    RESERVED = 0
    HELD = 1
    FULL = 2


class Commitment(IntEnum):
    """The answer to one block of a COMMIT. DUPLICATE: the key was held already, which is as good.

    EXPIRED: the reservation was over before the commit came; nothing was kept.
    """

    COMMITTED = 0
    DUPLICATE = 1
    EXPIRED = 2


class Gap(IntEnum):
    """Why a PINNED run is shorter than what was asked."""

    NONE = 0
    MISS = 1
    EVICTED = 2


class Extent(NamedTuple):
    """`pages` pages of the arena from page `first`."""

    first: int
    pages: int


class Granted(NamedTuple):
    """Where one block may be written. Only RESERVED has a generation and extents."""

    grant: Grant
    generation: int = 0
    extents: "tuple[Extent, ...]" = ()


class GroupTag(NamedTuple):
    """The tag of one layer group: the next `size` bytes of a block."""

    size: int
    tag: bytes


class PinnedBlock(NamedTuple):
    """Where one block lies, and the tags its bytes must have, group by group."""

    generation: int
    size: int
    tags: "tuple[GroupTag, ...]"
    extents: "tuple[Extent, ...]"


@dataclass(frozen=True)
class Hello:
    """The client's side of the handshake.

    `instance` names this client of this process over its reconnects. `writing` are generations
    that one of its threads may still store to; the daemon frees every other reservation of it.
    """

    nonce: bytes
    instance: bytes
    name: str
    writing: "tuple[int, ...]"
    proof: bytes


@dataclass(frozen=True)
class Welcome:
    """The daemon's side: what a client needs to map the arena, and the times it grants."""

    proof: bytes
    epoch: int
    page_bytes: int
    pages: int
    pin_lease_s: float
    reservation_ttl_s: float
    arena: str


def client_proof(
    call_key: bytes, server_nonce: bytes, nonce: bytes, instance: bytes, name: str
) -> bytes:
    """What a HELLO must carry: only a holder of the call key can answer the daemon's nonce."""
    message = b"umbp client" + server_nonce + nonce + instance + name.encode()
    return hmac.new(call_key, message, hashlib.sha256).digest()


def server_proof(call_key: bytes, server_nonce: bytes, nonce: bytes) -> bytes:
    """What a WELCOME must carry."""
    return hmac.new(call_key, b"umbp daemon" + nonce + server_nonce, hashlib.sha256).digest()


def frame(op: Op, request: int, payload: bytes = b"") -> bytes:
    """One frame."""
    if len(payload) > MAX_PAYLOAD:
        raise WireError(f"a payload of {len(payload)} bytes passes the limit of {MAX_PAYLOAD}")
    return _HEADER.pack(len(payload), op, request) + payload


class Frame(NamedTuple):
    """One frame as received."""

    op: Op
    request: int
    payload: bytes


class FrameDecoder:
    """Cuts a byte stream into frames. Nothing is lost if its reader is cancelled."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Take received bytes in."""
        self._buffer += data

    def next(self) -> "Frame | None":
        """The next whole frame; None: more bytes are needed. WireError ends the connection."""
        if len(self._buffer) < _HEADER.size:
            return None
        length, op, request = _HEADER.unpack_from(self._buffer)
        if length > MAX_PAYLOAD:
            raise WireError(f"a frame announces {length} bytes; at most {MAX_PAYLOAD} are allowed")
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[_HEADER.size : end])
        del self._buffer[:end]
        try:
            return Frame(Op(op), request, payload)
        except ValueError as exc:
            raise WireError(f"there is no frame of kind {op}") from exc


class Cursor:
    """Reads a payload from its start; WireError past its end."""

    def __init__(self, payload: bytes) -> None:
        self._payload, self._at = payload, 0

    def unpack(self, form: struct.Struct) -> "tuple[int, ...]":
        """The fields of one struct of integers."""
        return form.unpack(self.take(form.size))

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        data = self._payload[self._at : self._at + size]
        if len(data) != size:
            raise WireError(f"a payload of {len(self._payload)} bytes ends too early")
        self._at += size
        return data

    def count(self, item_bytes: int) -> int:
        """A u32 count of items that are at least `item_bytes` each, so that it can't lie."""
        (count,) = self.unpack(_U32)
        if count * item_bytes > len(self._payload) - self._at:
            raise WireError(f"a payload announces {count} items and is too short for them")
        return count

    def text(self) -> str:
        """A string after its u16 length."""
        (size,) = self.unpack(_U16)
        try:
            return self.take(size).decode()
        except UnicodeDecodeError as exc:
            raise WireError("a text is no UTF-8") from exc

    def end(self) -> None:
        """Nothing may be left."""
        if self._at != len(self._payload):
            raise WireError(f"a payload has {len(self._payload) - self._at} bytes too many")


def pack_text(text: str) -> bytes:
    """A string with its u16 length, cut to what that can say."""
    data = text.encode()[:0xFFFF]
    return _U16.pack(len(data)) + data


def unpack_text(payload: bytes) -> str:
    """The text of an ERROR or REFUSED."""
    return Cursor(payload).text()


_WELCOME = struct.Struct("<QIQdd")


def pack_hello(hello: Hello) -> bytes:
    """HELLO's payload."""
    head = _U16.pack(VERSION) + hello.nonce + hello.instance + pack_text(hello.name)
    return head + pack_generations(hello.writing) + hello.proof


def unpack_hello(payload: bytes) -> Hello:
    """HELLO's payload; WireError also for another version."""
    cursor = Cursor(payload)
    (version,) = cursor.unpack(_U16)
    if version != VERSION:
        raise WireError(f"the client speaks version {version}, this daemon {VERSION}")
    nonce, instance, name = cursor.take(NONCE_BYTES), cursor.take(16), cursor.text()
    writing = tuple(cursor.unpack(_U64)[0] for _ in range(cursor.count(8)))
    hello = Hello(nonce, instance, name, writing, cursor.take(32))
    cursor.end()
    return hello


def pack_welcome(welcome: Welcome) -> bytes:
    """WELCOME's payload."""
    fields = _WELCOME.pack(
        welcome.epoch,
        welcome.page_bytes,
        welcome.pages,
        welcome.pin_lease_s,
        welcome.reservation_ttl_s,
    )
    return welcome.proof + fields + pack_text(welcome.arena)


def unpack_welcome(payload: bytes) -> Welcome:
    """WELCOME's payload."""
    cursor = Cursor(payload)
    proof = cursor.take(32)
    epoch, page_bytes, pages, lease_s, ttl_s = _WELCOME.unpack(cursor.take(_WELCOME.size))
    return Welcome(proof, epoch, page_bytes, pages, lease_s, ttl_s, cursor.text())


def pack_keys(keys: "tuple[bytes, ...] | list[bytes]") -> bytes:
    """PIN's and HELD's payload."""
    return _U32.pack(len(keys)) + b"".join(keys)


def unpack_keys(payload: bytes) -> "list[bytes]":
    """PIN's and HELD's payload."""
    cursor = Cursor(payload)
    keys = [cursor.take(KEY_BYTES) for _ in range(cursor.count(KEY_BYTES))]
    cursor.end()
    return keys


def pack_reserve(items: "list[tuple[bytes, int]]") -> bytes:
    """RESERVE's payload: keys and sizes in bytes."""
    return _U32.pack(len(items)) + b"".join(_ITEM.pack(key, size) for key, size in items)


def unpack_reserve(payload: bytes) -> "list[tuple[bytes, int]]":
    """RESERVE's payload; sizes are at least 1."""
    cursor = Cursor(payload)
    items: list[tuple[bytes, int]] = []
    for _ in range(cursor.count(_ITEM.size)):
        key, size = _ITEM.unpack(cursor.take(_ITEM.size))
        if not size:
            raise WireError("a block has at least one byte")
        items.append((key, size))
    cursor.end()
    return items


def pack_reserved(grants: "list[Granted]") -> bytes:
    """RESERVED's payload."""
    parts = [_U32.pack(len(grants))]
    for grant, generation, extents in grants:
        parts.append(_GRANT.pack(grant, generation, len(extents)))
        parts.extend(_EXTENT.pack(*extent) for extent in extents)
    return b"".join(parts)


def unpack_reserved(payload: bytes) -> "list[Granted]":
    """RESERVED's payload."""
    cursor = Cursor(payload)
    grants = []
    for _ in range(cursor.count(_GRANT.size)):
        grant, generation, count = cursor.unpack(_GRANT)
        grants.append(Granted(_member(Grant, grant), generation, _extents(cursor, count)))
    cursor.end()
    return grants


def pack_commit(blocks: "list[tuple[int, tuple[GroupTag, ...]]]") -> bytes:
    """COMMIT's payload: generations with their tags."""
    parts = [_U32.pack(len(blocks))]
    for generation, tags in blocks:
        parts.append(_U64.pack(generation) + _U8.pack(len(tags)))
        parts.extend(_TAG.pack(*tag) for tag in tags)
    return b"".join(parts)


def unpack_commit(payload: bytes) -> "list[tuple[int, tuple[GroupTag, ...]]]":
    """COMMIT's payload."""
    cursor = Cursor(payload)
    blocks = []
    for _ in range(cursor.count(9)):
        (generation,), (count,) = cursor.unpack(_U64), cursor.unpack(_U8)
        blocks.append((generation, _tags(cursor, count)))
    cursor.end()
    return blocks


def pack_committed(states: "list[Commitment]") -> bytes:
    """COMMITTED's payload."""
    return bytes(states)


def unpack_committed(payload: bytes) -> "list[Commitment]":
    """COMMITTED's payload."""
    return [_member(Commitment, state) for state in payload]


def pack_generations(generations: "tuple[int, ...] | list[int]") -> bytes:
    """ABORT's payload."""
    return struct.pack(f"<I{len(generations)}Q", len(generations), *generations)


def unpack_generations(payload: bytes) -> "list[int]":
    """ABORT's payload."""
    cursor = Cursor(payload)
    generations = [cursor.unpack(_U64)[0] for _ in range(cursor.count(8))]
    cursor.end()
    return generations


def pack_pinned(pin: int, gap: Gap, blocks: "list[PinnedBlock]") -> bytes:
    """PINNED's payload."""
    parts = [_U64.pack(pin) + _U8.pack(gap) + _U32.pack(len(blocks))]
    for block in blocks:
        head = _PINNED.pack(block.generation, block.size, len(block.tags), len(block.extents))
        parts.append(head)
        parts.extend(_TAG.pack(*tag) for tag in block.tags)
        parts.extend(_EXTENT.pack(*extent) for extent in block.extents)
    return b"".join(parts)


def unpack_pinned(payload: bytes) -> "tuple[int, Gap, list[PinnedBlock]]":
    """PINNED's payload: the pin's number, why the run ended, its blocks."""
    cursor = Cursor(payload)
    (pin,), (gap,) = cursor.unpack(_U64), cursor.unpack(_U8)
    blocks = []
    for _ in range(cursor.count(_PINNED.size)):
        generation, size, tag_count, extent_count = cursor.unpack(_PINNED)
        tags = _tags(cursor, tag_count)
        blocks.append(PinnedBlock(generation, size, tags, _extents(cursor, extent_count)))
    cursor.end()
    return pin, _member(Gap, gap), blocks


def pack_unpin(pin: int, good: int, *, corrupt: bool) -> bytes:
    """UNPIN's payload: how many leading blocks were copied and matched their tags.

    `corrupt`: the block after them did not match.
    """
    return _UNPIN.pack(pin, good, corrupt)


def unpack_unpin(payload: bytes) -> "tuple[int, int, bool]":
    """UNPIN's payload: the pin, the good blocks, whether the next one is corrupt."""
    cursor = Cursor(payload)
    pin, good, corrupt = cursor.unpack(_UNPIN)
    cursor.end()
    return pin, good, bool(corrupt)


def pack_number(number: int) -> bytes:
    """RENEW's and COUNT's payload."""
    return _U64.pack(number)


def unpack_number(payload: bytes) -> int:
    """RENEW's and COUNT's payload."""
    cursor = Cursor(payload)
    (number,) = cursor.unpack(_U64)
    cursor.end()
    return number


def pack_report(unavailable: int, late: int) -> bytes:
    """REPORT's payload: blocks a client lost without the daemon seeing it."""
    return _U64.pack(unavailable) + _U64.pack(late)


def unpack_report(payload: bytes) -> "tuple[int, int]":
    """REPORT's payload: blocks lost as (unavailable, late)."""
    cursor = Cursor(payload)
    (unavailable,), (late,) = cursor.unpack(_U64), cursor.unpack(_U64)
    cursor.end()
    return unavailable, late


def _tags(cursor: Cursor, count: int) -> "tuple[GroupTag, ...]":
    return tuple(GroupTag(*_TAG.unpack(cursor.take(_TAG.size))) for _ in range(count))


def _extents(cursor: Cursor, count: int) -> "tuple[Extent, ...]":
    return tuple(Extent(*cursor.unpack(_EXTENT)) for _ in range(count))


def _member(kind: "type[_Kind]", value: int) -> _Kind:
    try:
        return kind(value)
    except ValueError as exc:
        raise WireError(f"{value} is no {kind.__name__}") from exc
