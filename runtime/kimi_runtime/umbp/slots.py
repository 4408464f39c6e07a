"""Open addressing in flat arrays: 64-bit names to small numbers, in buckets of eight. Pure.

A name's home is a bucket; where that is full, the next with room. Nothing is ever taken out: a name
whose number is 0 stands for nothing and is left behind when everything moves to a new table.
"""

from collections.abc import Sequence
from struct import Struct
from typing import Any

import numpy as np

BUCKET = 8
_BUCKET_BITS = 3
_MULTIPLIER = 0x9E3779B97F4A7C15
_GOLDEN, _ONE = np.uint64(_MULTIPLIER), np.uint64(1)
_64_BITS = (1 << 64) - 1
_HALVES = Struct("<2Q")

Array = Any
"""A numpy array; shapes are in the docstrings."""


class Slots:
    """Room for `8 << bits` names."""

    def __init__(self, bits: int) -> None:
        self.bits, self.used = bits, 0
        self.buckets = 1 << bits
        self.names = np.zeros((self.buckets, BUCKET), np.uint64)
        self.numbers = np.zeros(self.buckets * BUCKET, np.uint32)
        self._mask = np.int64(self.buckets - 1)
        self._shift = np.uint64(64 - bits)
        self._flat: memoryview = self.names.reshape(-1).data
        self._numbers: memoryview = self.numbers.data

    @property
    def size(self) -> int:
        """Slots there are."""
        return self.buckets * BUCKET

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return int(self.names.nbytes + self.numbers.nbytes)

    def find(self, names: Array) -> Array:
        """Slots [N] of names [N]; -1 where one is not here."""
        bucket = self._home(names)
        rows: Array = self.names.take(bucket, axis=0)
        # a name is in one slot at most, so that flat positions tell rows and places in them
        hits = np.flatnonzero(rows == names[:, None])
        if len(hits) == len(names):  # all are at home
            return (bucket << _BUCKET_BITS) + (hits & (BUCKET - 1))
        found = np.full(len(names), -1, np.int64)
        pending = np.arange(len(names))
        while True:
            there = hits >> _BUCKET_BITS
            found[pending[there]] = (bucket[there] << _BUCKET_BITS) + (hits & (BUCKET - 1))
            on = rows[:, BUCKET - 1] != 0  # a bucket fills from its front
            on[there] = False
            if not on.any():
                return found
            pending, bucket = pending[on], (bucket[on] + 1) & self._mask
            rows = self.names.take(bucket, axis=0)
            hits = np.flatnonzero(rows == names[pending, None])

    def find_one(self, name: int) -> int:
        """The slot of one name; -1 if it is not here. Some microseconds less than `find`."""
        slot = self.place(name)
        return slot if slot >= 0 else -1

    def place(self, name: int) -> int:
        """The slot of one name; if it is not here, -1 minus the one that `insert_one` would take.

        One round of `find` costs as much as some tens of these.
        """
        bucket = (name * _MULTIPLIER & _64_BITS) >> (64 - self.bits)
        while True:
            at = bucket * BUCKET
            row = self._flat[at : at + BUCKET].tolist()
            if name in row:
                return at + row.index(name)
            if not row[-1]:  # a bucket fills from its front
                return -1 - (at + row.index(0))
            bucket = (bucket + 1) % self.buckets

    def insert_one(self, name: int, place: int) -> int:
        """The slot of a name that is not here, as `place` told of it. There must be room."""
        slot = -1 - place
        self._flat[slot] = name
        self.used += 1
        return slot

    def number(self, slot: int) -> int:
        """The number in a slot."""
        number: int = self._numbers[slot]
        return number

    def set_number(self, slot: int, number: int) -> None:
        """Keep a number in a slot."""
        self._numbers[slot] = number

    def insert(self, names: Array) -> Array:
        """Slots [N] for names [N] that are all different and not here. There must be room."""
        slots = np.empty(len(names), np.int64)
        pending = np.arange(len(names))
        bucket = self._home(names)
        while len(pending):
            taken = (self.names[bucket] != 0).sum(axis=1)
            full = taken == BUCKET
            _, first = np.unique(bucket, return_index=True)
            chosen = first[~full[first]]  # of those that meet in a bucket, one goes first
            at = bucket[chosen] * BUCKET + taken[chosen]
            self.names.reshape(-1)[at] = names[pending[chosen]]
            slots[pending[chosen]] = at
            rest = np.ones(len(pending), bool)
            rest[chosen] = False
            bucket = np.where(full, (bucket + 1) & self._mask, bucket)[rest]
            pending = pending[rest]
        self.used += len(names)
        return slots

    def _home(self, names: Array) -> Array:
        return ((names * _GOLDEN) >> self._shift).astype(np.int64)


def names_of(keys: Sequence[bytes]) -> Array:
    """Names [N] of keys of 16 bytes; never 0. Equal names of other keys are one in 2**64."""
    halves = np.frombuffer(b"".join(keys), "<u8").reshape(-1, 2)
    names = halves[:, 0] ^ (halves[:, 1] * _GOLDEN)
    return np.maximum(names, _ONE)


def name_of(key: bytes) -> int:
    """The name of one key."""
    low, high = _HALVES.unpack(key)
    return (low ^ high * _MULTIPLIER & _64_BITS) or 1
