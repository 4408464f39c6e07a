import hashlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.errors import ConfigError
from kimi_runtime.umbp.keys import (
    KEY_BYTES,
    block_keys,
    hex_keys,
    next_key,
    pool_key_of,
    root_key,
)

POOL = pool_key_of(b"c" * 32)
ROOT = root_key(POOL, model_digest="m", layout="l")
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=200)
bounded = settings(max_examples=50, deadline=None)


def test_a_key_is_blake2b_of_parent_and_little_endian_ids():
    expected = hashlib.blake2b(ROOT + struct.pack("<3I", 1, 2, 3), key=POOL, digest_size=16)
    assert next_key(POOL, ROOT, [1, 2, 3]) == expected.digest()


@bounded
@given(IDS, st.integers(1, 64))
def test_only_full_blocks_have_keys(ids, block_tokens):
    keys = block_keys(POOL, ROOT, ids, block_tokens)
    assert len(keys) == len(ids) // block_tokens
    assert all(len(key) == KEY_BYTES for key in keys)


@bounded
@given(IDS, st.integers(1, 64), st.integers(0, 8))
def test_hashing_only_what_is_new_gives_the_same_keys(ids, block_tokens, known):
    whole = block_keys(POOL, ROOT, ids, block_tokens)
    known = min(known, len(whole))
    parent = whole[known - 1] if known else ROOT
    assert whole[known:] == block_keys(POOL, parent, ids[known * block_tokens :], block_tokens)


@bounded
@given(st.lists(st.integers(0, 2**31 - 1), min_size=32, max_size=64), st.data())
def test_one_other_id_changes_its_block_and_all_later_ones_only(ids, data):
    position = data.draw(st.integers(0, len(ids) // 8 * 8 - 1))
    other = list(ids)
    other[position] ^= 1
    pairs = zip(block_keys(POOL, ROOT, ids, 8), block_keys(POOL, ROOT, other, 8), strict=True)
    for number, (key, changed) in enumerate(pairs):
        assert (key == changed) == (number < position // 8)


def test_the_same_block_after_another_history_has_another_key():
    first, second = block_keys(POOL, ROOT, [7] * 16, 8)
    assert first != second


@pytest.mark.parametrize(
    "change", [{"model_digest": "n"}, {"layout": "k"}, {"adapter": "a"}, {"tenant": "other"}]
)
def test_model_layout_adapter_and_tenant_never_share_a_block(change):
    base = {"model_digest": "m", "layout": "l", "adapter": "", "tenant": "default"}
    assert root_key(POOL, **(base | change)) != root_key(POOL, **base)


def test_parts_of_the_root_cannot_run_into_each_other():
    assert root_key(POOL, model_digest="ab", layout="c") != root_key(
        POOL, model_digest="a", layout="bc"
    )


def test_another_deployment_names_the_same_block_differently():
    other = pool_key_of(b"d" * 32)
    assert next_key(other, ROOT, [1]) != next_key(POOL, ROOT, [1])


def test_all_of_a_long_call_key_counts():
    assert pool_key_of(b"k" * 64 + b"1") != pool_key_of(b"k" * 64 + b"2")
    assert len(pool_key_of(b"k" * 1000)) == 32


def test_an_empty_call_key_is_refused():
    with pytest.raises(ConfigError, match="call key is empty"):
        pool_key_of(b"")


def test_keys_are_lower_case_hex_in_json():
    assert hex_keys([b"\xab" * 16, b"\x00" * 16]) == ("ab" * 16, "00" * 16)
