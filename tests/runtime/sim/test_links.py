"""Transfers share links max-min fairly over virtual time, and every byte arrives once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.sim.links import Links
from kimi_runtime.sim.timeline import Timeline

RATES = {"a": 10.0, "b": 5.0, "c": 1.0}


def test_two_transfers_on_one_link_take_twice_as_long():
    timeline, ended = Timeline(), {}
    links = Links(timeline, dict(RATES))
    for name in ("x", "y"):
        links.start(("a",), 100.0, lambda name=name: ended.setdefault(name, timeline.now_s))
    timeline.run()
    assert ended == {"x": pytest.approx(20.0), "y": pytest.approx(20.0)}


def test_what_one_link_leaves_over_goes_to_those_that_can_use_it():
    timeline, ended = Timeline(), {}
    links = Links(timeline, dict(RATES))
    links.start(("a", "c"), 10.0, lambda: ended.setdefault("slow", timeline.now_s))
    links.start(("a",), 90.0, lambda: ended.setdefault("fast", timeline.now_s))
    timeline.run()
    assert ended == {"slow": pytest.approx(10.0), "fast": pytest.approx(10.0)}


def test_a_link_that_stops_holds_its_transfers_until_it_goes_on():
    timeline, ended = Timeline(), []
    links = Links(timeline, dict(RATES))
    links.start(("a",), 100.0, lambda: ended.append(timeline.now_s))
    timeline.at(5.0, lambda: links.set_rate("a", 0.0))
    timeline.at(8.0, lambda: links.set_rate("a", 10.0))
    timeline.run()
    assert ended == [pytest.approx(13.0)]


def test_a_cancelled_transfer_never_ends_and_leaves_its_share_to_others():
    timeline, ended = Timeline(), []
    links = Links(timeline, dict(RATES))
    gone = links.start(("a",), 1000.0, lambda: ended.append("gone"))
    links.start(("a",), 100.0, lambda: ended.append(timeline.now_s))
    timeline.at(10.0, lambda: links.cancel(gone))
    timeline.run()
    assert ended == [pytest.approx(15.0)]
    assert not links.moving


def test_an_unknown_link_is_an_error():
    with pytest.raises(KeyError, match="no link 'z'"):
        Links(Timeline(), dict(RATES)).start(("z",), 1.0, lambda: None)


flows = st.lists(
    st.tuples(
        st.floats(0, 5),
        st.sampled_from([("a",), ("b",), ("c",), ("a", "b"), ("b", "c"), ("a", "b", "c")]),
        st.floats(0.1, 50),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=50, deadline=None)
@given(flows=flows)
def test_all_bytes_arrive_and_no_link_carries_more_than_its_rate(flows):
    timeline = Timeline()
    links = Links(timeline, dict(RATES))
    ended = []
    for at_s, route, size in flows:
        timeline.at(
            at_s,
            lambda route=route, size=size: links.start(
                route, size, lambda: ended.append(timeline.now_s)
            ),
        )
    timeline.run()
    assert len(ended) == len(flows)
    assert not links.moving
    for link, rate in RATES.items():
        sizes = [size for _, route, size in flows if link in route]
        assert links.moved_bytes.get(link, 0.0) == pytest.approx(sum(sizes))
        if sizes:
            assert max(ended) >= sum(sizes) / rate - 1e-6
