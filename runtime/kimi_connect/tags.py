"""The integrity tag of a block's layer group: 16 bytes over 128 KiB leaves, bound to the block.

    leaf  = XXH3-64 (seed 0) of 128 KiB; of the last one what is left, padded with zeros to whole
            KiB; 8 bytes, big-endian
    tag   = BLAKE2b-128(key = binding, person "kimi-tag"; group u32 ‖ size u64 ‖ leaves in order)

`binding` is the block's key (or what else names it), so the bytes of another block never pass. Any
leaf may be hashed alone, as its bytes arrive, in any order, here or on a device. Which function
hashes leaves is an argument: `numpy_leaves` needs nothing but numpy, the runtime's uses a C library
and is the same function. XXH3 is written down in the xxHash specification, `xxh3` section.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

LEAF_BYTES = 128 << 10
"""So large that calls cost little beside bytes, and that `xxhash` lets other threads run meanwhile
(`docs/decisions/0020-large-leaves.md`).
"""

STEP_BYTES = 1024
"""Leaves are padded to multiples of it: XXH3 mixes its state after so many bytes."""

LEAF_DIGEST_BYTES = 8
TAG_BYTES = 16

_HEAD = struct.Struct("<IQ")

Leaves = Callable[[memoryview], bytes]
"""Bytes of any length -> the digests of their leaves, one after another."""


def leaf_count(size: int) -> int:
    """Leaves of `size` bytes."""
    return -(-size // LEAF_BYTES)


def tag_of_leaves(binding: bytes, group: int, size: int, leaves: bytes) -> bytes:
    """The tag of `size` bytes whose leaf digests are `leaves`. `binding` has at most 64 bytes."""
    rooted = _HEAD.pack(group, size) + leaves
    made = hashlib.blake2b(rooted, key=binding, digest_size=TAG_BYTES, person=b"kimi-tag")
    return made.digest()


def block_tags(
    binding: bytes, group_bytes: Sequence[int], block: memoryview, leaves: Leaves
) -> "tuple[bytes, ...]":
    """One tag per layer group of a block; ValueError if the groups do not fill it."""
    if sum(group_bytes) != block.nbytes:
        raise ValueError(f"layer groups of {sum(group_bytes)} bytes in a block of {block.nbytes}")
    tags, start = [], 0
    for group, size in enumerate(group_bytes):
        digests = leaves(block[start : start + size])
        tags.append(tag_of_leaves(binding, group, size, digests))
        start += size
    return tuple(tags)


def numpy_leaves() -> Leaves:
    """The leaf function on numpy; ImportError without numpy."""
    import numpy as np

    secret = np.frombuffer(_SECRET, np.uint8)

    def words(offset: int, count: int) -> Any:
        return np.frombuffer(secret[offset : offset + 8 * count].tobytes(), "<u8")

    stripe_keys = np.stack([words(8 * stripe, 8) for stripe in range(16)])  # [16, 8]
    last_keys = np.stack([*stripe_keys[:15], words(192 - 64 - 7, 8)])
    scramble_key = words(192 - 64, 8)
    merge_key = words(11, 8)
    low32, prime32_1 = np.uint64(0xFFFFFFFF), np.uint64(_PRIME32_1)
    shift47 = np.uint64(47)
    swapped = [1, 0, 3, 2, 5, 4, 7, 6]
    initial = np.array(_INITIAL, np.uint64)

    def accumulated(steps: Any, keys: Any) -> Any:  # [N, 16, 8] -> [N, 8]
        keyed = steps ^ keys
        products = (keyed & low32) * (keyed >> np.uint64(32))
        return products.sum(axis=1) + steps.sum(axis=1)[:, swapped]

    def fold(left: Any, right: Any) -> Any:  # the two halves of the 128-bit product, xored
        shift = np.uint64(32)
        left_low, left_high = left & low32, left >> shift
        right_low, right_high = right & low32, right >> shift
        cross = left_high * right_low
        middle = (left_low * right_low >> shift) + (cross & low32) + left_low * right_high
        high = (cross >> shift) + (middle >> shift) + left_high * right_high
        return high ^ (left * right)

    def equal_leaves(data: Any) -> Any:  # [L, S, 16, 8] -> [L]
        count, steps = data.shape[:2]
        flat = data.reshape(-1, 16, 8)
        sums = np.empty((count * steps, 8), np.uint64)
        for start in range(0, len(flat), 128):  # 128 KiB at a time stay in the cache
            sums[start : start + 128] = accumulated(flat[start : start + 128], stripe_keys)
        by_step = sums.reshape(count, steps, 8).swapaxes(0, 1)
        state = np.tile(initial, (count, 1))
        high = np.empty_like(state)
        for added in by_step[:-1]:  # one after another: in place, since this is most of the time
            state += added
            np.right_shift(state, shift47, high)
            state ^= high
            state ^= scramble_key
            state *= prime32_1
        state += accumulated(data[:, -1], last_keys)
        keyed = state ^ merge_key
        folded = fold(keyed[:, 0::2], keyed[:, 1::2]).sum(axis=1)
        digest = folded + np.uint64(steps * STEP_BYTES * _PRIME64_1 & (2**64 - 1))
        digest = (digest ^ (digest >> np.uint64(37))) * np.uint64(0x165667919E3779F9)
        return digest ^ (digest >> np.uint64(32))

    def in_steps(flat: Any, count: int) -> Any:
        return flat.view("<u8").reshape(count, -1, 16, 8)

    def leaves(view: memoryview) -> bytes:
        flat = np.frombuffer(view, np.uint8)
        digests = np.empty(leaf_count(view.nbytes), ">u8")
        count, left = divmod(view.nbytes, LEAF_BYTES)
        if count:
            digests[:count] = equal_leaves(in_steps(flat[: count * LEAF_BYTES], count))
        if left:
            padded = np.zeros(-(-left // STEP_BYTES) * STEP_BYTES, np.uint8)
            padded[:left] = flat[count * LEAF_BYTES :]
            digests[count:] = equal_leaves(in_steps(padded, 1))
        return digests.tobytes()

    return leaves


_PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1, _PRIME64_2 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F
_PRIME64_3, _PRIME64_4 = 0x165667B19E3779F9, 0x85EBCA77C2B2AE63
_PRIME64_5 = 0x27D4EB2F165667C5
_INITIAL = (
    _PRIME32_3,
    _PRIME64_1,
    _PRIME64_2,
    _PRIME64_3,
    _PRIME64_4,
    _PRIME32_2,
    _PRIME64_5,
    _PRIME32_1,
)
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
