"""State checkpoints in the pool: under which keys a model's recurrent state is kept.

A model with linear-attention layers resumes at a position only with its state at exactly that
position. The state at the end of a block is cut into pieces, each an object of the pool like any
block, whose keys follow the block's own (its *boundary*): with keys read as little-endian numbers,

    piece n of boundary k  =  (k + (n + 1) * STRIDE) mod 2**128

Boundaries are outputs of a keyed hash, so that a piece's key meets another key as rarely as two
hashes do; and who holds one key of a state can name all of the others, without any list of them:
the pool can let a state go with its boundary, and a router can ask an index for both.
"""

import hashlib
from collections.abc import Callable, Sequence

from kimi_connect.wire import KEY_BYTES

PIECE_BYTES = 4 << 20
"""A piece's size: whole leaves, small enough for SSD records and for fetches in pieces."""

_STRIDE = int.from_bytes(
    hashlib.blake2b(b"kimistack/state", digest_size=KEY_BYTES).digest(), "little"
)
_STRIDE |= 1  # odd, so that no sum of fewer than 2**128 strides is none
_MASK = (1 << 8 * KEY_BYTES) - 1


def piece_count(state_bytes: int, piece_bytes: int = PIECE_BYTES) -> int:
    """How many pieces a state of so many bytes has."""
    return -(-state_bytes // piece_bytes)


def piece_keys(boundary: bytes, count: int) -> "list[bytes]":
    """The keys of a boundary's first `count` pieces."""
    number = int.from_bytes(boundary, "little")
    return [_key(number + n * _STRIDE) for n in range(1, count + 1)]


def pieces(state: memoryview, piece_bytes: int = PIECE_BYTES) -> "list[memoryview]":
    """A state's bytes, piece by piece."""
    return [state[at : at + piece_bytes] for at in range(0, state.nbytes, piece_bytes)]


def attached(key: bytes, held: Callable[[bytes], bool]) -> "list[bytes]":
    """What is worth nothing without `key`: of a boundary its state's pieces, of a piece the others.

    `held` says whether a key is held. Of a run of keys that follow each other the first is the
    boundary. Last pieces come first, so that what is left of a state on the way is a front of it.
    """
    number = int.from_bytes(key, "little")
    later = _run(number, _STRIDE, held)
    earlier = _run(number, -_STRIDE, held)
    return later[::-1] + earlier[:-1]


def takers(key: bytes, held: Callable[[bytes], bool]) -> "list[bytes]":
    """Of a piece, whether it is held or not, what it is worth nothing without: see `attached`."""
    number = int.from_bytes(key, "little")
    earlier = _run(number, -_STRIDE, held)
    return earlier + _run(number, _STRIDE, held) if earlier else []


def deepest(boundaries: Sequence[bytes], count: int, held: Callable[[bytes], bool]) -> int:
    """One more than the last of `boundaries` whose state is held whole; 0 if none's is."""
    for position in range(len(boundaries), 0, -1):
        number = int.from_bytes(boundaries[position - 1], "little")
        if all(held(_key(number + n * _STRIDE)) for n in range(1, count + 1)):
            return position
    return 0


def _run(number: int, step: int, held: Callable[[bytes], bool]) -> "list[bytes]":
    keys = []
    while held(key := _key(number + step)):
        keys.append(key)
        number += step
    return keys


def _key(number: int) -> bytes:
    return (number & _MASK).to_bytes(KEY_BYTES, "little")
