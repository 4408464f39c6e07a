"""How a log's segments follow from its capacity."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.ssd import MAX_SEGMENTS, MIN_CAPACITY_BYTES, SsdSpec


@settings(max_examples=50, deadline=None)
@given(st.integers(MIN_CAPACITY_BYTES, 64 << 40))
def test_any_capacity_has_few_enough_files_and_room_to_compact(capacity):
    spec = SsdSpec.sized(Path("/ssd"), capacity)
    assert 8 <= spec.segments <= MAX_SEGMENTS
    assert spec.capacity - spec.segments * spec.segment < spec.segment


@pytest.mark.parametrize(
    ("capacity", "segment"), [(16 << 20, 1 << 20), (64 << 30, 256 << 20), (4 << 40, 1 << 30)]
)
def test_segments_grow_with_the_capacity(capacity, segment):
    assert SsdSpec.sized(Path("/ssd"), capacity).segment == segment


def test_a_capacity_that_is_too_small_says_what_is_enough():
    with pytest.raises(ConfigError, match="at least 16MiB"):
        SsdSpec.sized(Path("/ssd"), MIN_CAPACITY_BYTES - 1)
