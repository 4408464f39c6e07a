"""Links that transfers share, and the routes over them."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.router.estimate.rates import LinkRates
from kimi_runtime.router.flows import Flows, max_min_rates
from kimi_runtime.router.routes import Routes
from kimi_runtime.router.view import KvSource
from kimi_runtime.spec.hardware import NODES, LinkSpec
from worker_views import worker

LINKS = ("a", "b", "c", "d")
routes = st.dictionaries(
    st.integers(0, 30).map(str),
    st.lists(st.sampled_from(LINKS), min_size=1, max_size=3, unique=True).map(tuple),
    min_size=1,
    max_size=12,
)
capacities = st.fixed_dictionaries({link: st.floats(1, 100) for link in LINKS})
sizes = st.lists(st.floats(1.0, 1e4), min_size=1, max_size=8)


def link(rate):
    """A link that carries `rate` bytes a second before anything is learned."""
    return LinkSpec(name="l", rate=rate / 0.7, latency=0.0)


def flows(**links):
    rates = LinkRates()
    for name, rate in links.items():
        rates.expect(name, link(rate))
    return Flows(rates)


@settings(max_examples=60, deadline=None)
@given(routes, capacities)
def test_no_link_carries_more_than_it_can_and_every_flow_is_held_by_a_full_one(flows, limits):
    rates = max_min_rates(flows, limits)
    used = {
        name: sum(rates[flow] for flow, links in flows.items() if name in links) for name in LINKS
    }
    assert all(used[name] <= limits[name] * (1 + 1e-9) for name in LINKS)
    for flow, links in flows.items():
        assert any(
            used[name] >= limits[name] * (1 - 1e-9)
            and all(rates[flow] >= rates[o] * (1 - 1e-9) for o, on in flows.items() if name in on)
            for name in links
        )


@settings(max_examples=60, deadline=None)
@given(routes, capacities)
def test_on_one_link_one_more_flow_makes_nobody_faster(flows, limits):
    alone = dict.fromkeys(flows, ("a",))
    before = max_min_rates(alone, limits)
    after = max_min_rates({**alone, "new": ("a",)}, limits)
    assert all(after[flow] <= before[flow] * (1 + 1e-9) for flow in alone)


def test_a_flow_over_a_dead_link_stands_still_and_one_over_none_is_at_once_there():
    assert max_min_rates({"x": ("a",), "y": ()}, {"a": 0.0}) == {"x": 0.0, "y": math.inf}


@settings(max_examples=60, deadline=None)
@given(sizes, st.floats(1.0, 1e4))
def test_on_one_link_a_transfer_ends_when_it_was_expected_to(others, size):
    shared = flows(a=100.0)
    for number, other in enumerate(others):
        shared.start(f"other {number}", ("a",), other, now_s=0.0)
    expected_s = shared.seconds(("a",), size).mean
    shared.start("new", ("a",), size, now_s=0.0)
    shared.advance(expected_s * (1 - 1e-6))
    assert shared._flows["new"].ended_s is None
    shared.advance(expected_s * (1 + 1e-6))
    assert shared._flows["new"].ended_s == pytest.approx(expected_s)


@settings(max_examples=60, deadline=None)
@given(sizes, st.floats(1.0, 1e4))
def test_what_others_lose_is_how_much_later_they_end(others, size):
    def ends(*, with_new):
        shared = flows(a=1e4)
        for number, other in enumerate(others):
            shared.start(str(number), ("a",), other, now_s=0.0)
        lost_s = shared.delay_s(("a",), size)
        if with_new:
            shared.start("new", ("a",), size, now_s=0.0)
        shared.advance(20.0)
        return lost_s, sum(shared._flows[str(n)].ended_s for n in range(len(others)))

    lost_s, alone_s = ends(with_new=False)
    assert ends(with_new=True)[1] - alone_s == pytest.approx(lost_s, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(1, 1e4), st.floats(0, 20)), min_size=1, max_size=8))
def test_every_byte_is_carried_once(arrivals):
    shared, at_s = flows(a=100.0, b=40.0), 0.0
    for number, (size, later_s) in enumerate(arrivals):
        at_s += later_s
        shared.start(str(number), ("a", "b")[: 1 + number % 2], size, now_s=at_s)
    begun = {name: flow.started_s for name, flow in shared._flows.items()}
    step_s = 0.5
    for _ in range(4000):
        at_s += step_s
        shared.advance(at_s)
        if all(flow.ended_s is not None for flow in shared._flows.values()):
            break
    for name, flow in shared._flows.items():
        slowest = 40.0 if len(flow.links) == 2 else 100.0
        assert flow.ended_s - begun[name] >= flow.size_bytes / slowest * (1 - 1e-6)


def test_a_link_that_carries_nothing_is_no_way_at_all():
    assert flows().seconds(("unknown",), 1.0) is None
    assert flows(a=10.0).seconds(("a",), 0.0) == (0.0, 0.0)


def test_transfers_that_nobody_ends_are_forgotten():
    shared = flows(a=10.0)
    shared.start("x", ("a",), 10.0, now_s=0.0)
    shared.start("stuck", ("nowhere",), 10.0, now_s=0.0)
    shared.advance(2.0)
    assert len(shared) == 2
    shared.advance(40.0)
    shared.advance(80.0)
    assert len(shared) == 0


def test_a_clock_that_jumps_back_moves_nothing():
    shared = flows(a=10.0)
    shared.start("x", ("a",), 100.0, now_s=100.0)
    shared.advance(105.0)
    shared.advance(0.0)
    assert shared._flows["x"].left_bytes == pytest.approx(50.0)


def test_too_many_transfers_are_refused_and_counted():
    shared = flows(a=10.0)
    shared.max_flows = 2
    assert [shared.start(str(n), ("a",), 10.0, now_s=0.0) for n in range(3)] == [True, True, False]
    assert shared.refused == 1


def test_how_many_shared_is_remembered_for_who_measures():
    shared = flows(a=10.0)
    shared.start("x", ("a",), 100.0, now_s=0.0)
    shared.start("y", ("a",), 100.0, now_s=5.0)
    flow = shared.end("x", now_s=15.0)
    assert shared.sharing(flow, now_s=15.0) == pytest.approx((5 + 2 * 10) / 15)


def test_routes_are_those_of_the_machines():
    rates = LinkRates()
    routes = Routes(rates, NODES["MI355X"], ranks=4)
    here = worker("w", node="n0")
    there = worker("v", node="n1")
    pool = KvSource("pool-1", "n1", "dram", 1000)
    assert routes.to_worker(pool, here) == ("n1/net", "w/in")
    assert routes.to_worker(pool, there) == ("v/host",)
    assert routes.to_worker(KvSource("pool-1", "n1", "ssd", 1), here) == (
        "n1/ssd",
        "n1/net",
        "w/in",
    )
    assert routes.to_worker(KvSource("v", "n1", "hbm", 1), here) == ("v/out", "w/in")
    assert routes.to_worker(KvSource("w", "n0", "hbm", 1), here) == ()
    assert routes.to_worker(pool, worker("x")) == ("x/pool",)
    assert routes.between(here, there) == ("w/out", "v/in")
    assert routes.between(here, worker("u", node="n0")) == ("w/peer", "u/peer")
    assert all(rates.of(name, now_s=0.0) for name in ("n1/net", "w/in", "n1/ssd", "v/host"))
    routes.forget(["w"])
    assert rates.of("w/in", now_s=0.0) is None
    assert routes.to_worker(pool, here) == ("n1/net", "w/in")
    assert rates.of("w/in", now_s=0.0) is not None
