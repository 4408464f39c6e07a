"""Tags of KV bytes, on the C library the measurements chose (`docs/decisions/0003-tag-hash.md`).

The definition is `kimi_connect.tags`; here is its fast leaf function.
"""

from collections.abc import Sequence
from functools import lru_cache

import xxhash

from kimi_connect.tags import LEAF_BYTES, STEP_BYTES, tag_of_leaves
from kimi_connect.tags import block_tags as tags_of_block

_digest = xxhash.xxh3_64_digest


def leaves(view: memoryview) -> bytes:
    """Digests of the leaves of flat bytes."""
    size = view.nbytes
    if size <= LEAF_BYTES and size % STEP_BYTES == 0:
        return _digest(view) if size else b""
    digests = [_digest(view[leaf]) for leaf in _slices(size)]
    if size % STEP_BYTES:
        last = xxhash.xxh3_64(view[size - size % LEAF_BYTES :])
        last.update(bytes(-size % STEP_BYTES))
        digests.append(last.digest())
    return b"".join(digests)


@lru_cache(maxsize=64)
def _slices(size: int) -> tuple[slice, ...]:
    """The leaves of so many bytes that need no padding: to make these anew costs as much as to
    hash a part of them.
    """
    end = size - size % LEAF_BYTES if size % STEP_BYTES else size
    return tuple(slice(at, min(at + LEAF_BYTES, end)) for at in range(0, end, LEAF_BYTES))


def tag(binding: bytes, group: int, data: memoryview) -> bytes:
    """The 16-byte tag of one layer group's bytes, bound to `binding` (1 to 64 bytes)."""
    return tag_of_leaves(binding, group, data.nbytes, leaves(data))


def block_tags(binding: bytes, group_bytes: Sequence[int], block: memoryview) -> tuple[bytes, ...]:
    """One tag per layer group; `group_bytes` must sum to the block's size (ValueError)."""
    return tags_of_block(binding, group_bytes, block, leaves)


def matches(
    binding: bytes, group_bytes: Sequence[int], block: memoryview, tags: Sequence[bytes]
) -> bool:
    """Whether a block's bytes are the ones its tags were made of."""
    return block_tags(binding, group_bytes, block) == tuple(tags)
