"""Blocks that travel inside their PUT: for few bytes a second call costs more than two more copies.

The daemon writes them itself, so that nobody else can store to their pages: there is no
reservation, and nothing of a client that ends in the middle is left.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from kimi_connect.payloads import member, pack_tags, take_tags
from kimi_connect.tags import Leaves, block_tags
from kimi_connect.wire import (
    KEY_BYTES,
    U8,
    U32,
    Cursor,
    GroupTag,
    Priority,
    WireError,
    pack_text,
)

SMALL_PUT_BYTES = 128 << 10
"""Of all blocks of one PUT."""

_BLOCK = struct.Struct(f"<{KEY_BYTES}sIB")


class SmallBlock(NamedTuple):
    """A block with its bytes, and the tags they must have."""

    key: bytes
    tags: "tuple[GroupTag, ...]"
    data: memoryview


def tagged(
    keys: Sequence[bytes],
    views: Sequence[memoryview],
    group_bytes: Sequence[int],
    leaves: Leaves,
) -> "list[SmallBlock]":
    """The blocks with their tags; `group_bytes` as a client has it."""
    blocks = []
    for key, view in zip(keys, views, strict=True):
        groups = group_bytes or (view.nbytes,)
        tags = block_tags(key, groups, view, leaves)
        blocks.append(SmallBlock(key, tuple(map(GroupTag, groups, tags)), view))
    return blocks


def pack_put(blocks: Sequence[SmallBlock], tenant: str, priority: Priority) -> bytes:
    """PUT's payload. Its answer counts how many leading blocks the pool holds."""
    parts: list[bytes | memoryview] = [
        U8.pack(priority),
        pack_text(tenant),
        U32.pack(len(blocks)),
    ]
    for key, tags, data in blocks:
        parts.append(_BLOCK.pack(key, data.nbytes, len(tags)))
        parts.append(pack_tags(tags))
    parts.extend(block.data for block in blocks)
    return b"".join(parts)


def unpack_put(payload: bytes) -> "tuple[list[SmallBlock], str, Priority]":
    """PUT's payload: the blocks, the tenant, the priority. WireError also for an empty block."""
    cursor = Cursor(payload)
    (priority,), tenant = cursor.unpack(U8), cursor.text()
    heads: list[tuple[bytes, int, tuple[GroupTag, ...]]] = []
    for _ in range(cursor.count(_BLOCK.size)):
        key, size, count = _BLOCK.unpack(cursor.take(_BLOCK.size))
        if not size:
            raise WireError("a block has at least one byte")
        heads.append((key, size, take_tags(cursor, count)))
    blocks = [SmallBlock(key, tags, cursor.view(size)) for key, size, tags in heads]
    cursor.end()
    return blocks, tenant, member(Priority, priority)
