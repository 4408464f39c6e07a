"""States are kept at turn ends, on a grid, and where one was missed; chunks end there."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.engine.checkpoint_policy import EVERY_TOKENS, CheckpointPolicy

POLICY = CheckpointPolicy(64)


def test_the_grid_is_of_8192_tokens():
    assert EVERY_TOKENS == 8192
    assert [p for p in range(0, 40_000, 64) if POLICY.wanted(p, 0)] == [8192, 16384, 24576, 32768]


def test_a_turn_is_kept_behind_its_last_full_block():
    assert POLICY.wanted(9984, 10_000)
    assert not POLICY.wanted(9920, 10_000)
    assert POLICY.stop(9000, 10_000) == 9984
    assert POLICY.stop(9984, 10_000) == 10_000


def test_a_missed_position_is_kept_if_it_is_the_end_of_a_block():
    assert POLICY.wanted(640, 10_000, {640})
    assert not POLICY.wanted(641, 10_000, {641})
    assert POLICY.stop(0, 10_000, {640, 641}) == 640


def test_a_grid_that_misses_the_ends_of_blocks_is_refused():
    with pytest.raises(ValueError, match="take a multiple"):
        CheckpointPolicy(64, every_tokens=100)


@settings(max_examples=50, deadline=None)
@given(known=st.integers(1, 200), refused=st.sets(st.integers(0, 200), max_size=4))
def test_chunks_cover_the_prompt_and_pass_no_wanted_position(known, refused):
    policy = CheckpointPolicy(4, every_tokens=32)
    at, ends = 0, []
    while at < known:
        end = policy.stop(at, known, refused)
        assert at < end <= known
        at = end
        ends.append(at)
    wanted = [p for p in range(known + 1) if policy.wanted(p, known, refused)]
    assert set(wanted) <= set(ends)
