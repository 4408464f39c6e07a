"""The page allocator."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_connect.wire import Extent
from kimi_runtime.umbp.pages import Pages


def test_a_contiguous_run_is_preferred_to_scattered_pages():
    pages = Pages(100)
    parts = [pages.take(10) for _ in range(10)]
    for part in (1, 3, 6, 7):
        pages.give_back(parts[part])
    assert pages.take(20) == (Extent(60, 20),)
    assert sorted(pages.take(20)) == [Extent(10, 10), Extent(30, 10)]


def test_scattered_pages_are_used_to_the_last_one():
    pages = Pages(10)
    singles = [pages.take(1) for _ in range(10)]
    for part in singles[::2]:
        pages.give_back(part)
    taken = pages.take(5)
    assert sorted(extent.first for extent in taken) == [0, 2, 4, 6, 8]
    assert pages.take(1) is None


def test_neighbours_merge_on_both_sides():
    pages = Pages(30)
    left, middle, right = (pages.take(10) for _ in range(3))
    for part in (left, right, middle):
        pages.give_back(part)
    assert pages.free_runs() == {0: 30}


def test_a_block_lies_in_one_segment_if_any_has_room_for_it_and_in_several_only_if_it_must():
    pages = Pages(30, segments=(10, 20))
    assert pages.take(15) == (Extent(10, 15),)
    assert pages.take(7) == (Extent(0, 7),)
    assert pages.take(5) == (Extent(25, 5),)
    assert pages.take(3) == (Extent(7, 3),)
    pages.give_back([Extent(0, 10), Extent(10, 20)])
    assert pages.free_runs() == {0: 10, 10: 20}
    assert pages.take(25) == (Extent(10, 20), Extent(0, 5))


def test_scattered_pages_come_from_one_segment_if_it_has_enough():
    pages = Pages(20, segments=(10, 10), used=[Extent(n, 1) for n in range(0, 20, 2)])
    first = pages.take(4)
    assert len({extent.first // 10 for extent in first}) == 1
    assert len(pages.take(6)) == 6


def test_pages_in_use_from_the_start_are_not_free():
    pages = Pages(20, segments=(8, 12), used=[Extent(6, 4), Extent(0, 2)])
    assert pages.free_runs() == {2: 4, 10: 10}
    with pytest.raises(ValueError, match="overlap"):
        Pages(20, used=[Extent(0, 4), Extent(3, 1)])
    with pytest.raises(ValueError, match="segments"):
        Pages(20, segments=(8, 8))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 64), st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=80))
def test_pages_are_given_out_once_all_or_nothing_and_come_back(total, steps):
    pages = Pages(total)
    held = []
    for take, number in steps:
        if take or not held:
            free = pages.free
            taken = pages.take(number)
            assert (taken is None) == (number > free)
            if taken is not None:
                assert sum(extent.pages for extent in taken) == number
                held.append(taken)
        else:
            pages.give_back(held.pop(number % len(held)))
        used = [p for part in held for first, n in part for p in range(first, first + n)]
        free_pages = [p for first, n in pages.free_runs().items() for p in range(first, first + n)]
        assert sorted(used + free_pages) == list(range(total))
        assert pages.free == len(free_pages)
    for part in held:
        pages.give_back(part)
    assert pages.free_runs() == {0: total}
