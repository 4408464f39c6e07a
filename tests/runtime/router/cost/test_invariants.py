"""What a plan's cost promises, whatever the fleet looks like."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kimi_runtime.errors import Unavailable
from kimi_runtime.router.cost.order import Grid
from kimi_runtime.router.plan import Mode
from kimi_runtime.router.policies.cost import CostPolicy
from kimi_runtime.router.view import KvSource, Line, RequestClass
from kimi_runtime.spec.router import Cost
from kimi_runtime.spec.worker import Role
from worker_views import turn, worker

SPEC = Cost(model="kimi-k2.6", gpu="MI355X", tensor=4)
NODES = ("n0", "n1", "n2", "")

any_worker = st.builds(
    worker,
    st.just(""),
    role=st.sampled_from(Role),
    layout=st.sampled_from(["fp8", "fp8", "bf16"]),
    node=st.sampled_from(NODES),
    certain=st.sampled_from([True, True, True, False]),
    age_s=st.sampled_from([0.0, 0.0, 0.1, 5.0]),
    waiting=st.integers(0, 6),
    running=st.integers(0, 64),
    queued_tokens=st.sampled_from([0, 0, 500, 20_000, 300_000]),
    free_blocks=st.sampled_from([0, 800, 3_000, 16_384]),
    cached_tokens=st.sampled_from([0, 0, 20_000, 64_000, 70_000]),
    fetches=st.booleans(),
    streams=st.sampled_from([1, 1, 8]),
    max_running=st.sampled_from([None, 32]),
    utilisation=st.sampled_from([None, 0.0, 0.5, 0.95]),
    space_price_s=st.sampled_from([0.0, 0.001]),
    unused_blocks=st.sampled_from([None, 0, 16_384]),
    line=st.sampled_from([None, None, Line(900), Line(-90, ((700, 2.0),), ((3.0, 2_000),))]),
)


@st.composite
def fleets(draw, least=1, most=10):
    count = draw(st.integers(least, most))
    return [dataclasses.replace(draw(any_worker), name=f"w{n}") for n in range(count)]


any_source = st.builds(
    KvSource,
    name=st.sampled_from(["pool-0", "pool-1"]),
    node=st.sampled_from(["n0", "n9"]),
    tier=st.sampled_from(["dram", "ssd"]),
    tokens=st.sampled_from([8_000, 66_000, 70_500]),
)
any_turn = st.builds(
    turn,
    session=st.binary(min_size=1, max_size=8),
    prompt_tokens=st.sampled_from([1_000, 71_000, 130_000]),
    owners=st.sampled_from([(), ("w0",), ("w1", "w2"), ("gone",)]),
    sources=st.lists(any_source, max_size=2, unique_by=lambda one: one.name).map(tuple),
    urgency=st.sampled_from(RequestClass),
    moved_ago_s=st.sampled_from([None, 0.0, 10.0]),
    shared_tokens=st.sampled_from([0, 20_000]),
    shared_per_s=st.just(2.0),
    shared_holders=st.just(1),
    shared_busy=st.sampled_from([0.0, 0.9]),
)


def busy_planner():
    """A planner some of whose links carry transfers."""
    planner = CostPolicy(SPEC).planner
    holder = worker("w0", node="n0")
    for number, target in enumerate(("w1", "w3")):
        links = planner.routes.between(holder, worker(target, node="n7"))
        planner.flows.start(f"flow {number}", links, 5e9, now_s=0.0)
    return planner


def decide(request, workers, *, planner=None, **options):
    planner = planner or busy_planner()
    return planner.plan(request, workers, now_s=0.0, **options)


def chosen(request, workers):
    plan = decide(request, workers).plan
    return plan.mode, plan.prefill, plan.decode, plan.fetches


def found_and_best(request, workers):
    """What the search decides, and what pricing everything does."""
    try:
        found = decide(request, workers)
    except Unavailable:
        assume(False)
    return found, decide(request, workers, exhaustive=True)


@settings(max_examples=150, deadline=None)
@given(any_turn, fleets())
def test_the_search_finds_what_pricing_everything_finds(request_view, workers):
    found, best = found_and_best(request_view, workers)
    assert found.plan.workers == best.plan.workers
    assert found.explanation.chosen == best.explanation.chosen


@settings(max_examples=50, deadline=None)
@given(any_turn, fleets(13, 24))
def test_the_search_of_a_large_fleet_finds_what_pricing_everything_finds(request_view, workers):
    found, best = found_and_best(request_view, workers)
    assert found.explanation.chosen == best.explanation.chosen
    assert found.plan.fetches == best.plan.fetches
    assert found.plan.hand_off == best.plan.hand_off


@pytest.mark.parametrize("role", [Role.BOTH, Role.PREFILL])
@pytest.mark.parametrize("found", [0, 1000])
def test_a_worker_that_must_read_a_state_behind_its_own_is_not_left_out(role, found):
    """Of what it holds itself it can use little, and little of that is really there."""
    planner = CostPolicy(SPEC).planner
    for _ in range(60):
        planner.models.hits.observe("reader", "hbm", predicted=1000, found=found)
    reader = worker("reader", role=role, cached_tokens=64_000, checkpoints=(8_000,))
    usual = {"role": role, "cached_tokens": 40_000, "checkpoints": (40_000,), "reads_pools": False}
    others = [worker(f"w{n}", **usual) for n in range(15)]
    decodes = [worker("d", role=Role.DECODE)] if role is Role.PREFILL else []
    pool = KvSource("pool-0", "n0", "dram", 60_032, (60_032,))
    asked = turn(sources=(pool,))
    chosen = decide(asked, [reader, *others, *decodes], planner=planner).explanation.chosen
    best = decide(asked, [reader, *others, *decodes], planner=planner, exhaustive=True)
    assert best.explanation.chosen.source == "pool-0"
    assert chosen == best.explanation.chosen


even_nodes = st.lists(
    st.tuples(
        st.sampled_from([(Role.PREFILL, Role.DECODE), (Role.PREFILL, Role.PREFILL, Role.DECODE)]),
        st.sampled_from([{}, {}, {"running": 4, "free_blocks": 12_000}]),
    ),
    min_size=2,
    max_size=6,
)
"""Of each node who it has, and how busy they are: many pairs cost the same."""


def nodes_of(drawn):
    return [
        worker(f"w{node}{place}", node=f"n{node}", role=role, roles=(role,), **load)
        for node, (roles, load) in enumerate(drawn)
        for place, role in enumerate(roles)
    ]


some_links = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["in", "out", "peer", "host"])), max_size=2
).map(lambda drawn: [f"w{node}0/{kind}" for node, kind in drawn])


@settings(max_examples=150, deadline=None)
@given(any_turn, even_nodes, some_links, some_links)
def test_of_nodes_that_cost_the_same_the_one_is_found_that_wins_by_name(
    request_view, drawn, busy, slow
):
    planner, workers = CostPolicy(SPEC).planner, nodes_of(drawn)
    planner.plan(request_view, workers, now_s=0.0, exhaustive=True)  # the links are known now
    for number, link in enumerate(busy):
        planner.flows.start(f"flow {number}", (link,), 5e9, now_s=0.0)
    for link in slow * 20:
        planner.models.links.observe(link, 2_500_000_000, 1.0, sharing=1.0, now_s=0.0)
    found = planner.plan(request_view, workers, now_s=0.0)
    best = planner.plan(request_view, workers, now_s=0.0, exhaustive=True)
    assert found.explanation.chosen == best.explanation.chosen


pools = st.lists(
    st.tuples(st.sampled_from(["dram", "ssd"]), st.sampled_from([20_032, 40_064, 60_032])),
    min_size=2,
    max_size=8,
)
net_links = st.lists(st.integers(0, 7), max_size=4)


@settings(max_examples=80, deadline=None)
@given(any_turn, fleets(), pools, net_links, net_links)
def test_of_pools_that_hold_the_same_the_one_is_found_that_costs_least(
    request_view, workers, drawn, busy, slow
):
    planner = CostPolicy(SPEC).planner
    sources = [
        KvSource(f"pool-{number}", f"n{number}", tier, tokens, (tokens // 2, tokens))
        for number, (tier, tokens) in enumerate(drawn)
    ]
    asked = dataclasses.replace(request_view, sources=tuple(sources))
    try:
        planner.plan(asked, workers, now_s=0.0, exhaustive=True)  # the links are known now
    except Unavailable:
        assume(False)
    for number, node in enumerate(busy):
        planner.flows.start(f"flow {number}", (f"n{node}/net",), 5e9, now_s=0.0)
    for node in slow * 20:
        planner.models.links.observe(f"n{node}/net", 2_500_000_000, 1.0, sharing=1.0, now_s=0.0)
    found = planner.plan(asked, workers, now_s=0.0)
    best = planner.plan(asked, workers, now_s=0.0, exhaustive=True)
    assert found.explanation.chosen == best.explanation.chosen
    assert found.plan.fetches == best.plan.fetches


@settings(max_examples=60, deadline=None)
@given(any_turn, fleets())
def test_leaving_out_a_plan_that_was_not_chosen_changes_nothing(request_view, workers):
    try:
        before = chosen(request_view, workers)
    except Unavailable:
        assume(False)
    used = {before[1], before[2], *(fetch.source for fetch in before[3])}
    planned = {w.role for w in workers if w.name in used}
    assume(before[0] is Mode.PD or planned == {Role.BOTH} or not workers)
    for one in workers:
        if one.name not in used:
            assert chosen(request_view, [w for w in workers if w is not one]) == before


@settings(max_examples=60, deadline=None)
@given(any_turn, fleets(), st.randoms(use_true_random=False))
def test_the_order_of_workers_does_not_matter(request_view, workers, chance):
    shuffled = list(workers)
    chance.shuffle(shuffled)
    try:
        assert chosen(request_view, workers) == chosen(request_view, shuffled)
    except Unavailable:
        assume(False)


def cost_of(request_view, one, others=()):
    """The cost of the best plan that ends at `one`."""
    explained = decide(request_view, [one, *others], exhaustive=True).explanation
    return min(c.cost_s for c in explained.candidates if c.decode == one.name)


@settings(max_examples=60, deadline=None)
@given(any_worker, any_turn, st.integers(1, 300_000), st.integers(1, 8))
def test_a_longer_queue_never_makes_a_worker_cheaper(one, request_view, tokens, waiting):
    one = dataclasses.replace(one, name="w0", role=Role.BOTH)
    longer = dataclasses.replace(one, queued_tokens=one.queued_tokens + tokens)
    more = dataclasses.replace(longer, waiting=one.waiting + waiting)
    before = cost_of(request_view, one)
    assert before <= cost_of(request_view, longer) * (1 + 1e-9)
    assert cost_of(request_view, longer) <= cost_of(request_view, more) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(any_worker, st.integers(1, 100_000))
def test_a_longer_prompt_never_costs_less(one, more_tokens):
    one = dataclasses.replace(one, name="w0", role=Role.BOTH)
    short = turn(prompt_tokens=71_000)
    long = turn(prompt_tokens=71_000 + more_tokens)
    assert cost_of(short, one) <= cost_of(long, one) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(any_worker, any_worker, st.integers(0, 60_000))
def test_more_bytes_to_hand_over_never_cost_less(prefill, decode, resident):
    prefill = dataclasses.replace(prefill, name="p", role=Role.PREFILL, layout="fp8")
    decode = dataclasses.replace(decode, name="d", role=Role.DECODE, layout="fp8")
    decode = dataclasses.replace(decode, fetches=False, space_price_s=0.0)
    less = dataclasses.replace(decode, cached_tokens=resident + 10_000)
    more = dataclasses.replace(decode, cached_tokens=resident)
    before = cost_of(turn(), less, [prefill])
    assert before <= cost_of(turn(), more, [prefill]) * (1 + 1e-9)


@settings(max_examples=10, deadline=None)
@given(any_turn, any_worker, st.integers(2, 6))
def test_equal_workers_share_sessions_evenly(request_view, one, count):
    one = dataclasses.replace(one, role=Role.BOTH, node="", free_blocks=16_384, max_running=None)
    workers = [dataclasses.replace(one, name=f"w{n}") for n in range(count)]
    request_view = dataclasses.replace(request_view, owners=())
    planner = CostPolicy(SPEC).planner
    picks = Counter(
        planner.plan(
            dataclasses.replace(request_view, session=b"%d" % n), workers, now_s=0.0
        ).plan.decode
        for n in range(60 * count)
    )
    assert len(picks) == count
    assert min(picks.values()) > 25


@settings(max_examples=40, deadline=None)
@given(any_turn, fleets())
def test_without_a_link_nothing_is_read(request_view, workers):
    planner = CostPolicy(SPEC).planner
    planner.routes.to_worker = lambda source, one: ("no such link",)
    planner.routes.between = lambda prefill, decode: ("no such link",)
    try:
        plan = planner.plan(request_view, workers, now_s=0.0).plan
    except Unavailable:
        assume(False)
    assert plan.fetches == ()
    assert plan.mode is Mode.EXTEND


@settings(max_examples=40, deadline=None)
@given(any_turn, fleets())
def test_with_room_to_spare_nobody_pays_for_evictions(request_view, workers):
    roomy = [dataclasses.replace(w, unused_blocks=10**9, space_price_s=1.0) for w in workers]
    try:
        explained = decide(request_view, roomy, exhaustive=True).explanation
    except Unavailable:
        assume(False)
    assert all(candidate.terms.e_evict == 0 for candidate in explained.candidates)


@settings(max_examples=40, deadline=None)
@given(any_turn, any_worker, st.floats(0.05, 100.0))
def test_old_news_never_beats_the_same_news_fresh(request_view, one, age_s):
    one = dataclasses.replace(one, role=Role.BOTH, certain=True, age_s=0.0, node="")
    request_view = dataclasses.replace(request_view, owners=())
    for old in (dataclasses.replace(one, age_s=age_s), dataclasses.replace(one, certain=False)):
        workers = [
            dataclasses.replace(old, name="old"),
            dataclasses.replace(one, name="fresh"),
        ]
        assert decide(request_view, workers).plan.decode == "fresh"


@settings(max_examples=40, deadline=None)
@given(any_turn, fleets())
def test_the_terms_add_up_to_the_cost_and_none_is_infinite(request_view, workers):
    try:
        explained = decide(request_view, workers, exhaustive=True).explanation
    except Unavailable:
        assume(False)
    for candidate in explained.candidates:
        assert sum(candidate.terms) == pytest.approx(candidate.cost_s)
        assert all(abs(value) < 1e6 for value in candidate.terms)
        delays = candidate.terms._replace(replicate=0.0)
        assert all(value >= -1e-9 for value in delays)


@settings(max_examples=200, deadline=None)
@given(st.floats(-10, 1e4), st.floats(-10, 1e4))
def test_the_tie_grid_keeps_order_and_is_as_wide_as_it_says(one, other):
    grid = Grid(0.002, 0.03)
    low, high = sorted((one, other))
    assert grid.step(low) <= grid.step(high)
    assert low < grid.end(grid.step(low)) * (1 + 1e-9) + 1e-12
    if high > low + max(0.002, 0.031 * abs(low)) * 1.001:
        assert grid.step(low) < grid.step(high)
