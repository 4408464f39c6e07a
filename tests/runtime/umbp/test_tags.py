"""Tags: one definition, two leaf functions, any order of arrival."""

import hashlib
import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_connect.tags import LEAF_BYTES, numpy_leaves, tag_of_leaves
from kimi_runtime.umbp import tags

KEY = b"k" * 16
in_numpy = numpy_leaves()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 70_000), st.integers(0, 2**32))
def test_both_leaf_functions_are_the_same_function(size, seed):
    data = memoryview(bytes((seed + 7 * n) % 256 for n in range(size)))
    assert tags.leaves(data) == in_numpy(data)


def test_the_tag_of_known_bytes_never_changes():
    data = memoryview(bytes(n % 251 for n in range(10_000)))
    assert tags.tag(KEY, 3, data).hex() == "75a0dd142045a5df322753aed61f8ad3"


@pytest.mark.parametrize("count", [0, 1, 254, 255, 256, 510, 511, 3000])
def test_a_tag_is_one_hash_over_all_leaves_however_many_there_are(count):
    leaves = os.urandom(8 * count)
    whole = hashlib.blake2b(
        struct.pack("<IQ", 2, 77) + leaves, key=KEY, digest_size=16, person=b"kimi-tag"
    )
    assert tag_of_leaves(KEY, 2, 77, leaves) == whole.digest()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 20_000), st.data())
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


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40_000), st.randoms(use_true_random=False))
def test_parts_in_any_order_even_twice_give_the_tag_of_the_whole(size, shuffler):
    data = memoryview(os.urandom(size))
    step = LEAF_BYTES * shuffler.randint(1, 3)
    starts = list(range(0, size, step))
    partial = tags.PartialTag(size)
    for start in [*shuffler.sample(starts, len(starts)), shuffler.choice(starts)]:
        partial.add(start, data[start : start + step])
    assert partial.complete
    assert partial.finish(KEY, 2) == tags.tag(KEY, 2, data)


def test_a_tag_with_missing_parts_can_t_be_finished():
    partial = tags.PartialTag(10_000)
    partial.add(0, memoryview(bytes(8192)))
    with pytest.raises(ValueError, match="1 leaves"):
        partial.finish(KEY, 0)


@pytest.mark.parametrize(("start", "size"), [(1, 4096), (0, 100), (8192, 4096), (-4096, 4096)])
def test_parts_that_are_no_whole_leaves_are_refused(start, size):
    with pytest.raises(ValueError, match="whole leaves"):
        tags.PartialTag(10_000).add(start, memoryview(bytes(size)))


def test_no_bytes_have_a_tag_too():
    assert tags.tag(KEY, 0, memoryview(b"")) == tag_of_leaves(KEY, 0, 0, b"")
