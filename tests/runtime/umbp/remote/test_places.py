"""Whom to ask, and which bytes go where."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_connect.wire import Extent
from kimi_runtime.umbp.remote.choice import owner_to_ask
from kimi_runtime.umbp.remote.places import spans_between

PAGES = st.lists(st.integers(1, 5), min_size=1, max_size=6)


def scattered(counts):
    """Extents of so many pages with a hole after each, the last one first."""
    first, extents = 0, []
    for count in counts:
        extents.append(Extent(first, count))
        first += count + 1
    return extents[::-1]


def offsets(extents, page, size):
    """Where each byte of a block lies."""
    every = [n for first, pages in extents for n in range(first * page, (first + pages) * page)]
    return every[:size]


@settings(max_examples=50, deadline=None)
@given(PAGES, PAGES, st.sampled_from([4, 8, 16]), st.sampled_from([4, 8, 16]), st.data())
def test_every_byte_of_a_block_goes_to_its_place_once(theirs, ours, their_page, our_page, data):
    most = min(sum(theirs) * their_page, sum(ours) * our_page)
    size = data.draw(st.integers(1, most))
    source, target = scattered(theirs), scattered(ours)
    spans = spans_between(source, their_page, target, our_page, size)
    moved = [(s.remote + n, s.local + n) for s in spans for n in range(s.size)]
    wanted = zip(offsets(source, their_page, size), offsets(target, our_page, size), strict=True)
    assert moved == list(wanted)


def test_pages_too_few_for_their_block_are_an_error():
    with pytest.raises(ValueError, match="too few"):
        spans_between([Extent(0, 1)], 16, [Extent(0, 2)], 16, 17)
    with pytest.raises(ValueError, match="too few"):
        spans_between([Extent(0, 2)], 16, [], 16, 17)


def test_the_longest_run_of_those_that_may_be_asked_is_asked_for():
    runs = {"a": 3, "b": 9, "c": 5}
    assert owner_to_ask(runs, {"a", "b", "c"}, {}, b"k") == "b"
    assert owner_to_ask(runs, {"a", "c"}, {}, b"k") == "c"
    assert owner_to_ask(runs, {"d"}, {}, b"k") is None
    assert owner_to_ask({"a": 0}, {"a"}, {}, b"k") is None


def test_equal_ones_share_the_work_and_all_who_want_a_run_agree():
    runs = dict.fromkeys("abcd", 4)
    chosen = [owner_to_ask(runs, set(runs), {}, bytes([n])) for n in range(64)]
    assert set(chosen) == set(runs)
    assert chosen == [owner_to_ask(runs, {*"dcba"}, {}, bytes([n])) for n in range(64)]
    assert owner_to_ask(runs, set(runs), {"a": 1, "b": 2, "d": 1}, b"k") == "c"
