"""Tags of KV bytes, on the C library the measurements chose (`docs/decisions/0003-tag-hash.md`).

The definition is `kimi_connect.tags`; here are its fast leaf function and a tag that is built while
its bytes arrive.
"""

from collections.abc import Sequence
from functools import lru_cache

import xxhash

from kimi_connect.tags import LEAF_BYTES, LEAF_DIGEST_BYTES, leaf_count, tag_of_leaves
from kimi_connect.tags import block_tags as tags_of_block

_digest = xxhash.xxh3_64_digest


def leaves(view: memoryview) -> bytes:
    """Digests of the 4 KiB leaves of flat bytes; a short last leaf is padded with zeros."""
    whole = view.nbytes - view.nbytes % LEAF_BYTES
    digests = [_digest(view[leaf]) for leaf in _slices(whole)]
    if whole < view.nbytes:
        digests.append(_digest(bytes(view[whole:]).ljust(LEAF_BYTES, b"\0")))
    return b"".join(digests)


@lru_cache(maxsize=64)
def _slices(size: int) -> tuple[slice, ...]:
    """The whole leaves of so many bytes: making these anew costs a fifth of a tag's time."""
    return tuple(slice(at, at + LEAF_BYTES) for at in range(0, size, LEAF_BYTES))


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


class PartialTag:
    """The tag of `size` bytes that arrive in parts, in any order.

    Parts start on a leaf's boundary and end on one, or at the end of the bytes. A part that comes
    again replaces what came before.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._digests = bytearray(leaf_count(size) * LEAF_DIGEST_BYTES)
        self._missing = set(range(leaf_count(size)))

    @property
    def complete(self) -> bool:
        """Whether every leaf has come."""
        return not self._missing

    def add(self, start: int, part: memoryview) -> None:
        """Take in the bytes from `start`; ValueError if they are not whole leaves inside."""
        end = start + part.nbytes
        aligned = start % LEAF_BYTES == 0 and (end % LEAF_BYTES == 0 or end == self.size)
        if start < 0 or end > self.size or not aligned:
            raise ValueError(f"bytes {start}..{end} are not whole leaves of {self.size} bytes")
        first = start // LEAF_BYTES
        digests = leaves(part)
        at = first * LEAF_DIGEST_BYTES
        self._digests[at : at + len(digests)] = digests
        self._missing.difference_update(range(first, first + leaf_count(part.nbytes)))

    def finish(self, binding: bytes, group: int) -> bytes:
        """The tag; ValueError while leaves are missing."""
        if self._missing:
            raise ValueError(f"{len(self._missing)} leaves of {self.size} bytes have not come")
        return tag_of_leaves(binding, group, self.size, bytes(self._digests))
