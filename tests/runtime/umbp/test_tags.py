"""Tags: one definition, two leaf functions."""

import hashlib
import os
import random
import struct

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_connect.tags import LEAF_BYTES, numpy_leaves, tag_of_leaves
from kimi_runtime.umbp import tags

KEY = b"k" * 16
in_numpy = numpy_leaves()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 5 * LEAF_BYTES), st.integers(0, 2**32))
def test_both_leaf_functions_are_the_same_function(size, seed):
    data = memoryview(random.Random(seed).randbytes(size))
    assert tags.leaves(data) == in_numpy(data)


def test_the_tag_of_known_bytes_never_changes():
    data = memoryview(bytes(n % 251 for n in range(200_000)))
    assert tags.tag(KEY, 3, data).hex() == "c6b634e16ae18c1926b7fe5cb6b3c0d2"


@pytest.mark.parametrize("count", [0, 1, 254, 255, 256, 510, 511, 3000])
def test_a_tag_is_one_hash_over_all_leaves_however_many_there_are(count):
    leaves = os.urandom(8 * count)
    whole = hashlib.blake2b(
        struct.pack("<IQ", 2, 77) + leaves, key=KEY, digest_size=16, person=b"kimi-tag"
    )
    assert tag_of_leaves(KEY, 2, 77, leaves) == whole.digest()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 100_000), st.data())
def test_one_flipped_bit_anywhere_changes_the_tag(size, data):
    block = bytearray(os.urandom(size))
    before = tags.tag(KEY, 0, memoryview(block))
    bit = data.draw(st.integers(0, 8 * size - 1))
    block[bit // 8] ^= 1 << bit % 8
    assert tags.tag(KEY, 0, memoryview(block)) != before


def test_a_tag_is_bound_to_its_block_its_group_and_its_size():
    data = memoryview(bytes(5000))
    tag = tags.tag(KEY, 0, data)
    assert tags.tag(b"K" * 16, 0, data) != tag
    assert tags.tag(KEY, 1, data) != tag
    assert tags.tag(KEY, 0, memoryview(bytes(5001))) != tag  # both end in zeros


def test_swapped_leaves_or_groups_do_not_pass():
    block = bytearray(os.urandom(4 * LEAF_BYTES))
    groups = (2 * LEAF_BYTES, 2 * LEAF_BYTES)
    wanted = tags.block_tags(KEY, groups, memoryview(block))
    one, two = slice(0, LEAF_BYTES), slice(LEAF_BYTES, 2 * LEAF_BYTES)
    block[one], block[two] = block[two], block[one]
    assert not tags.matches(KEY, groups, memoryview(block), wanted)


def test_groups_must_fill_the_block():
    with pytest.raises(ValueError, match="layer groups"):
        tags.block_tags(KEY, (5, 5), memoryview(bytes(11)))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 5 * LEAF_BYTES), st.data())
def test_pieces_of_whole_leaves_have_the_leaves_of_the_whole(size, data):
    block = memoryview(os.urandom(size))
    step = LEAF_BYTES * data.draw(st.integers(1, 3))
    pieces = [block[start : start + step] for start in range(0, size, step)]
    assert b"".join(map(tags.leaves, pieces)) == tags.leaves(block)


@pytest.mark.parametrize("leaves", [tags.leaves, in_numpy])
@pytest.mark.parametrize("size", [1, 1023, 1024, LEAF_BYTES - 1, LEAF_BYTES, 3 * LEAF_BYTES + 5])
def test_a_leaf_is_the_hash_of_its_bytes_padded_to_whole_kibibytes(leaves, size):
    data = os.urandom(size)
    starts = range(0, size, LEAF_BYTES)
    cut = [data[start : start + LEAF_BYTES] for start in starts]
    padded = [leaf + bytes(-len(leaf) % 1024) for leaf in cut]
    assert leaves(memoryview(data)) == b"".join(map(xxhash.xxh3_64_digest, padded))


def test_no_bytes_have_a_tag_too():
    assert tags.tag(KEY, 0, memoryview(b"")) == tag_of_leaves(KEY, 0, 0, b"")
