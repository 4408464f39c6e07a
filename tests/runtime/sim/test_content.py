"""What contexts and requests of the simulator say without words."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.sim.content import Unsaid


@given(st.integers(0, 40), st.integers(-50, 50), st.integers(-50, 50))
@settings(max_examples=50, deadline=None)
def test_ids_that_say_nothing_are_cut_and_grow_as_a_list_of_zeros(count: int, start: int, end: int):
    ids, zeros = Unsaid(count), [0] * count
    assert ids[start:end] == tuple(zeros[start:end])
    ids.append(5)
    ids.extend(range(3))
    ids.extend(iter((1, 2)))
    ids.insert(0, 7)
    zeros += [0] * 7
    assert list(ids) == zeros
    del ids[start:end]
    del zeros[start:end]
    assert len(ids) == len(zeros)


def test_ids_that_say_nothing_have_ends_and_cannot_be_told_otherwise():
    ids = Unsaid(2)
    assert ids[-1] == 0
    with pytest.raises(IndexError):
        ids[2]
    with pytest.raises(TypeError, match="only the number"):
        ids[0] = 1
