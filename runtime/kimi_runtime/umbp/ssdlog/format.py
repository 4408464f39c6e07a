"""How the log looks on disk. Pure: bytes in, values out.

A log is a folder with a file `LOG` and segments `00000001.seg`, .... Each of these begins with
an *identity*; in a segment records follow, each at a multiple of `align`:

    head     fixed part ‖ (size u64, tag 16 bytes) of each layer group, padded with zeros to `align`
    body     its bytes, padded likewise

Integers are little-endian. The head's checksum covers the head, the body's covers the body, so that
a damaged body costs no other record. A head names its log, segment and offset: bytes that look like
a head but lie elsewhere (a copy of a log stored as a block, an older file's sectors) are none.

The body's checksum is XXH3-64 over the XXH3-64 digests of each group's leaves, the same ones
the group's tag is made of (`kimi_connect.tags`): one pass over the bytes gives both.
"""

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

import xxhash

from kimi_connect.tags import tag_of_leaves
from kimi_connect.wire import GroupTag
from kimi_runtime.umbp.tags import leaves

FORMAT = 2
"""Format 1 had leaves of 4 KiB."""
LOG_ID_BYTES = 8

_IDENTITY_MAGIC = b"KIMI-SSD"
_IDENTITY = struct.Struct("<8sIIQI8s")  # magic, format, align, segment bytes, number, log id
RECORD_MAGIC = b"KVR\xa7"
_FIXED = struct.Struct("<4sBxH8sIQQ16sQ8s")
_GROUP = struct.Struct("<Q16s")
_SUM_BYTES = 8
_GRAVE = struct.Struct("<16sQ")
_NO_KEY = bytes(16)
HEAD_MIN_BYTES = _FIXED.size + _SUM_BYTES
"""Without layer groups; less than the least `align`, so that a seal takes exactly one."""


class Kind(IntEnum):
    """What a record says."""

    BLOCK = 1
    TOMBSTONES = 2
    """Its body is (key, generation): every record of the key up to that generation is dead."""
    SEAL = 3
    """The last record of a segment: everything before it is on stable storage."""


class Identity(NamedTuple):
    """Which log a file belongs to. `number` is 0 in `LOG`."""

    log_id: bytes
    align: int
    segment_bytes: int
    number: int
    format: int = FORMAT


class Head(NamedTuple):
    """What stands before a record's body. `groups` is empty unless it is a block."""

    kind: Kind
    segment: int
    offset: int
    generation: int
    key: bytes
    body_bytes: int
    body_sum: bytes
    groups: tuple[GroupTag, ...] = ()

    def head_bytes(self, align: int) -> int:
        """Size of the head on disk; the body begins behind it."""
        return padded(HEAD_MIN_BYTES + len(self.groups) * _GROUP.size, align)

    def record_bytes(self, align: int) -> int:
        """Size of the whole record on disk."""
        return self.head_bytes(align) + padded(self.body_bytes, align)


class Grave(NamedTuple):
    """A key whose records up to `generation` are dead."""

    key: bytes
    generation: int


def padded(size: int, align: int) -> int:
    """`size` rounded up."""
    return -(-size // align) * align


def block_record_bytes(groups: int, body_bytes: int, align: int) -> int:
    """Size on disk of a block of so many layer groups."""
    return padded(HEAD_MIN_BYTES + groups * _GROUP.size, align) + padded(body_bytes, align)


def encode_identity(identity: Identity) -> bytes:
    """The first `align` bytes of a file."""
    fields = (identity.format, identity.align, identity.segment_bytes, identity.number)
    packed = _IDENTITY.pack(_IDENTITY_MAGIC, *fields, identity.log_id)
    return (packed + xxhash.xxh3_64_digest(packed)).ljust(identity.align, b"\0")


def decode_identity(raw: bytes) -> Identity | None:
    """The identity at the start of a file, of any format; None if there is none intact."""
    packed, rest = raw[: _IDENTITY.size], raw[_IDENTITY.size :]
    if len(packed) < _IDENTITY.size or rest[:_SUM_BYTES] != xxhash.xxh3_64_digest(packed):
        return None
    magic, version, align, segment_bytes, number, log_id = _IDENTITY.unpack(packed)
    if magic != _IDENTITY_MAGIC:
        return None
    return Identity(log_id, align, segment_bytes, number, version)


def encode_head(log_id: bytes, align: int, head: Head) -> bytes:
    """The head of a record, padded."""
    packed = _FIXED.pack(
        RECORD_MAGIC,
        head.kind,
        len(head.groups),
        log_id,
        head.segment,
        head.offset,
        head.generation,
        head.key,
        head.body_bytes,
        head.body_sum,
    )
    packed += b"".join(_GROUP.pack(*group) for group in head.groups)
    return (packed + xxhash.xxh3_64_digest(packed)).ljust(head.head_bytes(align), b"\0")


def head_size(raw: bytes | memoryview) -> int:
    """How many bytes of a head must be read to decode it; 0 if no head begins here."""
    if len(raw) < HEAD_MIN_BYTES or raw[:4] != RECORD_MAGIC:
        return 0
    return HEAD_MIN_BYTES + int.from_bytes(raw[6:8], "little") * _GROUP.size


def decode_head(raw: bytes | memoryview, log_id: bytes, segment: int, offset: int) -> Head | None:
    """The head that was written at `offset` of this segment of this log; None if it isn't there."""
    size = head_size(raw)
    if not size or len(raw) < size:
        return None
    packed = bytes(raw[: size - _SUM_BYTES])
    if raw[size - _SUM_BYTES : size] != xxhash.xxh3_64_digest(packed):
        return None
    _, kind, _, its_log, its_segment, its_offset, generation, key, body_bytes, body_sum = (
        _FIXED.unpack_from(packed)
    )
    if (its_log, its_segment, its_offset) != (log_id, segment, offset):
        return None
    groups = tuple(GroupTag(*group) for group in _GROUP.iter_unpack(packed[_FIXED.size :]))
    try:
        known = Kind(kind)
    except ValueError:
        return None
    return Head(known, segment, offset, generation, key, body_bytes, body_sum, groups)


def seal(segment: int, offset: int, generation: int) -> Head:
    """The record that ends a segment."""
    return Head(Kind.SEAL, segment, offset, generation, _NO_KEY, 0, body_sum_of(b""))


def tombstones(segment: int, offset: int, generation: int, body: bytes) -> Head:
    """The head of a tombstone record whose body is `body`."""
    return Head(Kind.TOMBSTONES, segment, offset, generation, _NO_KEY, len(body), body_sum_of(body))


def encode_graves(graves: Iterable[Grave]) -> bytes:
    """The body of a tombstone record."""
    return b"".join(_GRAVE.pack(*grave) for grave in graves)


def decode_graves(body: bytes) -> tuple[Grave, ...]:
    """The graves of an intact tombstone record."""
    whole = len(body) - len(body) % _GRAVE.size
    return tuple(Grave(*fields) for fields in _GRAVE.iter_unpack(body[:whole]))


def tombstones_bytes(graves: int, align: int) -> int:
    """Size on disk of a tombstone record; 0 for none."""
    return block_record_bytes(0, graves * _GRAVE.size, align) if graves else 0


def graves_within(size: int, align: int) -> int:
    """How many graves a tombstone record of at most `size` bytes on disk holds."""
    room = size - padded(HEAD_MIN_BYTES, align)
    return max(0, room - room % align) // _GRAVE.size


def group_leaves(groups: Sequence[int], body: memoryview) -> list[bytes]:
    """Leaf digests of each group's bytes; the groups' sizes sum to the body's."""
    digests, at = [], 0
    for size in groups:
        digests.append(leaves(body[at : at + size]))
        at += size
    return digests


def body_sum_of_leaves(digests: Iterable[bytes]) -> bytes:
    """The body's checksum from its groups' leaf digests."""
    return xxhash.xxh3_64_digest(b"".join(digests))


def body_sum_of(body: bytes) -> bytes:
    """The checksum of a body without layer groups."""
    return xxhash.xxh3_64_digest(xxhash.xxh3_64_digest(body))


def tags_of(key: bytes, groups: Sequence[int], digests: Sequence[bytes]) -> tuple[GroupTag, ...]:
    """The tags of a block whose groups have these sizes and leaf digests."""
    return tuple(
        GroupTag(size, tag_of_leaves(key, group, size, digest))
        for group, (size, digest) in enumerate(zip(groups, digests, strict=True))
    )


def body_intact(head: Head, body: memoryview) -> bool:
    """Whether a record's body has the checksum its head states."""
    if body.nbytes != head.body_bytes:
        return False
    if head.kind is not Kind.BLOCK:
        return body_sum_of(bytes(body)) == head.body_sum
    sizes = [group.size for group in head.groups]
    if sum(sizes) != body.nbytes:
        return False
    return body_sum_of_leaves(group_leaves(sizes, body)) == head.body_sum


def block_intact(head: Head, body: memoryview) -> bool:
    """Whether a block's body has its head's checksum and its key's tags."""
    sizes = [group.size for group in head.groups]
    if sum(sizes) != body.nbytes:
        return False
    digests = group_leaves(sizes, body)
    same = body_sum_of_leaves(digests) == head.body_sum
    return same and tags_of(head.key, sizes, digests) == head.groups
