"""KEEP and KEPT: blocks that were written to a client's stock, and what it may write to next.

A *stock* is pages that a client may write to without asking first, of the size of its blocks: so a
put copies at once and makes one call, whose answer brings the pages of a later put. See `stock`.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from kimi_connect.payloads import (
    member,
    pack_generations,
    pack_reserved,
    pack_tags,
    take_generations,
    take_granted,
    take_tags,
)
from kimi_connect.wire import (
    KEY_BYTES,
    U8,
    U32,
    U64,
    Cursor,
    Granted,
    GroupTag,
    Priority,
    WireError,
    pack_text,
)

STOCK_BYTES = 64 << 20
"""Of a client's stock, at most."""

STOCK_BLOCKS = 512
"""Likewise: each is granted, noted and taken back by itself."""

_BLOCK = struct.Struct(f"<{KEY_BYTES}sQB")
_WISH = struct.Struct("<II")


class Filled(NamedTuple):
    """A block that lies in the pages of a generation; 0: its sender found it to be there before."""

    key: bytes
    generation: int
    tags: "tuple[GroupTag, ...]" = ()


class Wish(NamedTuple):
    """Blocks of `size` bytes that are to be written later."""

    blocks: int = 0
    size: int = 1


class Keep(NamedTuple):
    """KEEP's payload. `returned` are generations of the stock that its sender will not write to."""

    blocks: "Sequence[Filled]"
    tenant: str
    priority: Priority
    wish: Wish
    returned: "Sequence[int]" = ()


class Kept(NamedTuple):
    """KEPT's payload: what was granted of the wish.

    It holds as long as the arena's number of what was `revoked` is this one.
    """

    revoked: int
    granted: "list[Granted]"


def pack_keep(keep: Keep) -> bytes:
    """KEEP's payload."""
    parts = [U8.pack(keep.priority), pack_text(keep.tenant), _WISH.pack(*keep.wish)]
    parts.append(pack_generations(list(keep.returned)))
    parts.append(U32.pack(len(keep.blocks)))
    for key, generation, tags in keep.blocks:
        parts.append(_BLOCK.pack(key, generation, len(tags)))
        parts.append(pack_tags(tags))
    return b"".join(parts)


def unpack_keep(payload: bytes) -> Keep:
    """KEEP's payload."""
    cursor = Cursor(payload)
    (priority,), tenant = cursor.unpack(U8), cursor.text()
    wish = Wish(*cursor.unpack(_WISH))
    if not wish.size:
        raise WireError("a block has at least one byte")
    returned = take_generations(cursor)
    blocks: list[Filled] = []
    for _ in range(cursor.count(_BLOCK.size)):
        key, generation, count = _BLOCK.unpack(cursor.take(_BLOCK.size))
        blocks.append(Filled(key, generation, take_tags(cursor, count)))
    cursor.end()
    return Keep(blocks, tenant, member(Priority, priority), wish, returned)


def pack_kept(kept: Kept) -> bytes:
    """KEPT's payload."""
    return U64.pack(kept.revoked) + pack_reserved(kept.granted)


def unpack_kept(payload: bytes) -> Kept:
    """KEPT's payload."""
    cursor = Cursor(payload)
    (revoked,) = cursor.unpack(U64)
    granted = take_granted(cursor)
    cursor.end()
    return Kept(revoked, granted)
