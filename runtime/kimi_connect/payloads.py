"""The payloads of a pool's requests and answers; `wire` has the frames around them."""

import struct
from enum import IntEnum
from typing import NamedTuple, TypeVar

from kimi_connect.wire import (
    KEY_BYTES,
    SESSION_BYTES,
    TAG_BYTES,
    U8,
    U32,
    U64,
    Commitment,
    Cursor,
    Extent,
    Gap,
    Grant,
    Granted,
    GroupTag,
    HintKind,
    PinnedBlock,
    Priority,
    Source,
    Stretch,
    WireError,
    pack_text,
)

_Kind = TypeVar("_Kind", bound=IntEnum)

MAX_WITHIN_MS = 2**32 - 1
MAX_PIECES = 4096
"""Pieces of one state."""
DEFAULT_TENANT = "default"
_NO_MS = 2**32 - 1

_UNPIN = struct.Struct("<QIB")
_EXTENT = struct.Struct("<QI")
_ITEM = struct.Struct(f"<{KEY_BYTES}sI")
_GRANT = struct.Struct("<BQI")
_PINNED = struct.Struct("<QIBI")
_TAG = struct.Struct(f"<I{TAG_BYTES}s")
_STRETCH = struct.Struct("<IBd")
_HINT = struct.Struct(f"<{SESSION_BYTES}sBI{SESSION_BYTES}s")


def pack_keys(keys: "tuple[bytes, ...] | list[bytes]") -> bytes:
    """The payload of HELD, TOUCH, USED and SERVED."""
    return U32.pack(len(keys)) + b"".join(keys)


def unpack_keys(payload: bytes) -> "list[bytes]":
    """The payload of HELD, TOUCH, USED and SERVED."""
    cursor = Cursor(payload)
    keys = [cursor.take(KEY_BYTES) for _ in range(cursor.count(KEY_BYTES))]
    cursor.end()
    return keys


def pack_pin(
    keys: "tuple[bytes, ...] | list[bytes]", within_s: float, tenant: str = DEFAULT_TENANT
) -> bytes:
    """PIN's payload: the keys, how long its sender waits for the answer, and whose blocks it is."""
    within_ms = max(0, min(MAX_WITHIN_MS, int(1e3 * within_s)))
    return U32.pack(within_ms) + pack_text(tenant) + pack_keys(keys)


def unpack_pin(payload: bytes) -> "tuple[list[bytes], float, str]":
    """PIN's payload: the keys, how long its sender waits (seconds), the tenant."""
    cursor = Cursor(payload)
    (within_ms,), tenant = cursor.unpack(U32), cursor.text()
    keys = [cursor.take(KEY_BYTES) for _ in range(cursor.count(KEY_BYTES))]
    cursor.end()
    return keys, within_ms / 1e3, tenant


def pack_quote(keys: "tuple[bytes, ...] | list[bytes]", block_bytes: int) -> bytes:
    """QUOTE's payload: the run asked about, and about how large its blocks are."""
    return U32.pack(block_bytes) + pack_keys(keys)


def unpack_quote(payload: bytes) -> "tuple[list[bytes], int]":
    """QUOTE's payload: the keys, and the bytes of a block."""
    cursor = Cursor(payload)
    (block_bytes,) = cursor.unpack(U32)
    keys = [cursor.take(KEY_BYTES) for _ in range(cursor.count(KEY_BYTES))]
    cursor.end()
    return keys, block_bytes


def pack_deepest(boundaries: "tuple[bytes, ...] | list[bytes]", pieces: int) -> bytes:
    """DEEPEST's payload: ends of blocks, and how many pieces the state at one of them has.

    Its answer counts the boundaries up to the last one whose state is there whole; 0 for none.
    """
    return U32.pack(pieces) + pack_keys(boundaries)


def unpack_deepest(payload: bytes) -> "tuple[list[bytes], int]":
    """DEEPEST's payload: the boundaries, and the number of pieces; WireError for too many."""
    boundaries, pieces = unpack_quote(payload)
    if not 0 < pieces <= MAX_PIECES:
        raise WireError(f"a state has 1 to {MAX_PIECES} pieces, not {pieces}")
    return boundaries, pieces


def pack_quoted(stretches: "list[Stretch]") -> bytes:
    """QUOTED's payload: the run there is, in stretches."""
    body = b"".join(_STRETCH.pack(*stretch) for stretch in stretches)
    return U32.pack(len(stretches)) + body


def unpack_quoted(payload: bytes) -> "list[Stretch]":
    """QUOTED's payload."""
    cursor = Cursor(payload)
    stretches: list[Stretch] = []
    for _ in range(cursor.count(_STRETCH.size)):
        blocks, source, seconds = _STRETCH.unpack(cursor.take(_STRETCH.size))
        if not seconds >= 0:
            raise WireError("a stretch takes no negative time")
        stretches.append(Stretch(blocks, member(Source, source), seconds))
    cursor.end()
    return stretches


def pack_reserve(
    items: "list[tuple[bytes, int]]",
    tenant: str = DEFAULT_TENANT,
    priority: Priority = Priority.NORMAL,
) -> bytes:
    """RESERVE's payload: whose blocks, how dear, keys and sizes in bytes."""
    head = U8.pack(priority) + pack_text(tenant) + U32.pack(len(items))
    return head + b"".join(_ITEM.pack(key, size) for key, size in items)


def unpack_reserve(payload: bytes) -> "tuple[list[tuple[bytes, int]], str, Priority]":
    """RESERVE's payload: keys and sizes (at least 1), the tenant, the priority."""
    cursor = Cursor(payload)
    (priority,), tenant = cursor.unpack(U8), cursor.text()
    items: list[tuple[bytes, int]] = []
    for _ in range(cursor.count(_ITEM.size)):
        key, size = _ITEM.unpack(cursor.take(_ITEM.size))
        if not size:
            raise WireError("a block has at least one byte")
        items.append((key, size))
    cursor.end()
    return items, tenant, member(Priority, priority)


class HintFields(NamedTuple):
    """HINT's payload."""

    session: bytes
    kind: HintKind
    keys: "list[bytes]"
    expected_s: "float | None"
    child: bytes
    tenant: str


def pack_hint(hint: HintFields) -> bytes:
    """HINT's payload; ValueError for a session's name of another size."""
    if len(hint.session) != SESSION_BYTES or len(hint.child) not in (0, SESSION_BYTES):
        raise ValueError(f"a session is named by {SESSION_BYTES} bytes")
    expected_ms = _NO_MS
    if hint.expected_s is not None:
        expected_ms = max(0, min(_NO_MS - 1, int(1e3 * hint.expected_s)))
    head = _HINT.pack(hint.session, hint.kind, expected_ms, hint.child)
    return head + pack_text(hint.tenant) + pack_keys(hint.keys)


def unpack_hint(payload: bytes) -> HintFields:
    """HINT's payload."""
    cursor = Cursor(payload)
    session, kind, expected_ms, child = _HINT.unpack(cursor.take(_HINT.size))
    tenant = cursor.text()
    keys = [cursor.take(KEY_BYTES) for _ in range(cursor.count(KEY_BYTES))]
    cursor.end()
    expected_s = None if expected_ms == _NO_MS else expected_ms / 1e3
    return HintFields(session, member(HintKind, kind), keys, expected_s, child, tenant)


def pack_reserved(grants: "list[Granted]") -> bytes:
    """RESERVED's payload."""
    parts = [U32.pack(len(grants))]
    for grant, generation, extents in grants:
        parts.append(_GRANT.pack(grant, generation, len(extents)))
        parts.extend(_EXTENT.pack(*extent) for extent in extents)
    return b"".join(parts)


def unpack_reserved(payload: bytes) -> "list[Granted]":
    """RESERVED's payload."""
    cursor = Cursor(payload)
    grants = take_granted(cursor)
    cursor.end()
    return grants


def take_granted(cursor: Cursor) -> "list[Granted]":
    """Grants after their count."""
    grants = []
    for _ in range(cursor.count(_GRANT.size)):
        grant, generation, count = cursor.unpack(_GRANT)
        grants.append(Granted(member(Grant, grant), generation, _extents(cursor, count)))
    return grants


def pack_commit(blocks: "list[tuple[int, tuple[GroupTag, ...]]]") -> bytes:
    """COMMIT's payload: generations with their tags."""
    parts = [U32.pack(len(blocks))]
    for generation, tags in blocks:
        parts.append(U64.pack(generation) + U8.pack(len(tags)))
        parts.append(pack_tags(tags))
    return b"".join(parts)


def unpack_commit(payload: bytes) -> "list[tuple[int, tuple[GroupTag, ...]]]":
    """COMMIT's payload."""
    cursor = Cursor(payload)
    blocks = []
    for _ in range(cursor.count(9)):
        (generation,), (count,) = cursor.unpack(U64), cursor.unpack(U8)
        blocks.append((generation, take_tags(cursor, count)))
    cursor.end()
    return blocks


def pack_committed(states: "list[Commitment]") -> bytes:
    """COMMITTED's payload."""
    return bytes(states)


def unpack_committed(payload: bytes) -> "list[Commitment]":
    """COMMITTED's payload."""
    return [member(Commitment, state) for state in payload]


def pack_generations(generations: "tuple[int, ...] | list[int]") -> bytes:
    """ABORT's payload."""
    return struct.pack(f"<I{len(generations)}Q", len(generations), *generations)


def unpack_generations(payload: bytes) -> "list[int]":
    """ABORT's payload."""
    cursor = Cursor(payload)
    generations = take_generations(cursor)
    cursor.end()
    return generations


def take_generations(cursor: Cursor) -> "list[int]":
    """Generations after their count."""
    return [cursor.unpack(U64)[0] for _ in range(cursor.count(8))]


def pack_pinned(pin: int, gap: Gap, blocks: "list[PinnedBlock]") -> bytes:
    """PINNED's payload."""
    parts = [U64.pack(pin) + U8.pack(gap) + U32.pack(len(blocks))]
    for block in blocks:
        head = _PINNED.pack(block.generation, block.size, len(block.tags), len(block.extents))
        parts.append(head)
        parts.append(pack_tags(block.tags))
        parts.extend(_EXTENT.pack(*extent) for extent in block.extents)
    return b"".join(parts)


def unpack_pinned(payload: bytes) -> "tuple[int, Gap, list[PinnedBlock]]":
    """PINNED's payload: the pin's number, why the run ended, its blocks."""
    cursor = Cursor(payload)
    (pin,), (gap,) = cursor.unpack(U64), cursor.unpack(U8)
    blocks = []
    for _ in range(cursor.count(_PINNED.size)):
        generation, size, tag_count, extent_count = cursor.unpack(_PINNED)
        tags = take_tags(cursor, tag_count)
        blocks.append(PinnedBlock(generation, size, tags, _extents(cursor, extent_count)))
    cursor.end()
    return pin, member(Gap, gap), blocks


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
    return U64.pack(number)


def unpack_number(payload: bytes) -> int:
    """RENEW's and COUNT's payload."""
    cursor = Cursor(payload)
    (number,) = cursor.unpack(U64)
    cursor.end()
    return number


def pack_report(unavailable: int, late: int) -> bytes:
    """REPORT's payload: blocks a client lost without the daemon seeing it."""
    return U64.pack(unavailable) + U64.pack(late)


def unpack_report(payload: bytes) -> "tuple[int, int]":
    """REPORT's payload: blocks lost as (unavailable, late)."""
    cursor = Cursor(payload)
    (unavailable,), (late,) = cursor.unpack(U64), cursor.unpack(U64)
    cursor.end()
    return unavailable, late


def pack_tags(tags: "tuple[GroupTag, ...]") -> bytes:
    """Tags one after another; how many is said elsewhere."""
    return b"".join(_TAG.pack(*tag) for tag in tags)


def take_tags(cursor: Cursor, count: int) -> "tuple[GroupTag, ...]":
    """So many tags."""
    return tuple(GroupTag(*_TAG.unpack(cursor.take(_TAG.size))) for _ in range(count))


def _extents(cursor: Cursor, count: int) -> "tuple[Extent, ...]":
    return tuple(Extent(*cursor.unpack(_EXTENT)) for _ in range(count))


def member(kind: "type[_Kind]", value: int) -> _Kind:
    """The member of an enumeration; WireError if there is none with this number."""
    try:
        return kind(value)
    except ValueError as exc:
        raise WireError(f"{value} is no {kind.__name__}") from exc
